"""The prompts of one model: from texts and conversations to token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.gateway.text.inline import Texts
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Grammar, Int32Array
from kvforge.text.token_table import TokenTable
from kvforge.text.tokenizer import TextStream, Tokenizer

from .prompt_cleaner import PromptCleaner
from .template import TOOL, TemplateNeeds, conversation_for, probe, tool_for

# Arguments of the function that runs a template, which requests must not set.
RESERVED = frozenset(
    {
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "messages"),
    }
)
NO_TOKENIZER = "the service has no tokenizer for this model"
NAME_ONE = "name one with `tokenizer` in gateway.toml"
WriteCalls = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation. `ids` is [prompt_tokens] int32; `ending` is the end of the rendered text."""

    ids: Int32Array
    ending: str


class Prompts:
    """The prompts of one tokenizer.

    Args:
        tokenizer: Decodes tokens; a table if the tokenizer has one. None if the model has no tokenizer and prompts are
            token ids.
        texts: Renders and tokenises.
        hygiene: Removes changing parts of system prompts.
        needs: The needs of the chat template; `look` detects them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | TokenTable | None,
        texts: Texts,
        hygiene: PromptCleaner | None = None,
        needs: TemplateNeeds | None = None,
    ) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._hygiene = hygiene or PromptCleaner()
        self.needs = needs or TemplateNeeds()
        self._write_calls: WriteCalls | None = None

    async def look(self, write_calls: WriteCalls | None = None) -> None:
        """Detect the needs of the chat template.

        Args:
            write_calls: Writes calls in the model's format, for a template that drops those of a conversation.
        """

        async def render(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
            return (await self._texts.render(messages, options, whole=True))[1]

        self._write_calls = write_calls
        if self.template:
            self.needs = await probe(render, self.template, writes_calls=write_calls is not None)

    @property
    def template(self) -> str:
        """The chat template; "" if the model has none."""
        return self._tokenizer.chat_template if self._tokenizer is not None else ""

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The id of each special token, by its spelling."""
        return self._tokenizer.special_tokens if self._tokenizer is not None else {}

    async def text(self, prompt: str, *, special: bool = True, field: str = "prompt") -> Int32Array:
        """Tokenise a text.

        Returns:
            [prompt_tokens] int32.

        Raises:
            InvalidRequest: Names `field`.
        """
        if self._tokenizer is None:
            raise InvalidRequest(field, f"{NO_TOKENIZER}: send token ids, or {NAME_ONE}")
        return await self._texts.encode(prompt, special=special, field=field)

    async def decode(self, ids: Int32Array, field: str = "tokens") -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequest: Names `field`.
        """
        if self._tokenizer is None:
            raise InvalidRequest(field, f"{NO_TOKENIZER}; {NAME_ONE}")
        return await self._texts.decode(ids)

    async def check_shape(self, grammar: Grammar, field: str) -> None:
        """See `Texts.check`."""
        await self._texts.check(grammar, field)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continued: bool = False,
        opened: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Render a conversation up to the start of the model's answer.

        Args:
            messages: Content as text, arguments of calls as objects.
            tools: In the format of OpenAI's API.
            continued: Whether the answer continues the last message.
            opened: Whether to open the answer; else render up to the end of the last message.
            variables: Further variables of the template.

        Raises:
            InvalidRequest: Names `messages`, `tools` or `chat_template_kwargs`.
        """
        self.check(messages, tools)
        extra = dict(variables or {})
        if wrong := RESERVED & extra.keys():
            raise InvalidRequest("chat_template_kwargs", f"must not contain {min(wrong)!r}")
        options: dict[str, Any] = {
            "add_generation_prompt": opened and not continued,
            "continue_final_message": continued,
        }
        if tools:
            options["tools"] = [tool_for(tool, self.needs) for tool in tools]
        adapted = conversation_for(self._hygiene.clean(messages), self.needs, self._write_calls)
        ids, ending = await self._texts.render(adapted, options | extra)
        return Rendered(ids, ending)

    def check(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what the chat template would lose.

        Raises:
            InvalidRequest: Names `messages` or `tools`.
        """
        if not messages:
            raise InvalidRequest("messages", "are empty")
        if self._tokenizer is None:
            raise InvalidRequest("messages", f"{NO_TOKENIZER}: use /v1/completions with token ids, or {NAME_ONE}")
        needs, remedy = self.needs, "name another with chat_template in gateway.toml"
        if not self.template:
            problem = "the model has no chat template: use /v1/completions"
            raise InvalidRequest("messages", f"{problem}, or name one with chat_template in gateway.toml")
        if needs.problem:
            raise InvalidRequest("messages", f"{needs.problem}; {remedy}")
        if tools and needs.tools_problem:
            raise InvalidRequest("tools", f"{needs.tools_problem}; {remedy}")
        for at, message in enumerate(messages):
            if needs.tools_problem and (message.get("tool_calls") or message["role"] == TOOL):
                name = f"messages[{at}].{'tool_calls' if message.get('tool_calls') else 'role'}"
                raise InvalidRequest(name, f"{needs.tools_problem}; {remedy}")
            if message["role"] in needs.lost and message["content"]:
                problem = f"the model's chat template loses the words of the role {message['role']!r}"
                raise InvalidRequest(f"messages[{at}].content", f"{problem}; {remedy}")

    def stream(self, *, continues: bool = False, keep: frozenset[str] = frozenset()) -> TextStream:
        """Return the detokenizer of an answer. `keep` lists special tokens that stay in the text."""
        if self._tokenizer is None:
            return _NoText()
        return self._tokenizer.stream(continues=continues, keep=keep)

    def spelled(self, token_id: int) -> tuple[str, bytes]:
        """Return a token as text and as bytes; a special token by its name."""
        if self._tokenizer is None:
            return f"token_id:{token_id}", b""
        pieces = self._tokenizer.pieces_of(frozenset())
        raw = pieces.bytes_of(token_id) if pieces is not None else b""
        if not raw:
            raw = self._tokenizer.spelled(token_id).encode()
        return raw.decode(errors="replace"), raw

    def name_of(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it."""
        return self._tokenizer.spelled(token_id) if self._tokenizer is not None else f"token_id:{token_id}"

    async def close(self) -> None:
        """Stop the helper processes."""
        await self._texts.close()


class _NoText(TextStream):
    """The detokenizer of a model without a tokenizer: its tokens have no text."""

    def __init__(self) -> None:
        pass

    def push(self, token_ids: Iterable[int]) -> str:  # noqa: ARG002
        return ""

    def finish(self) -> str:
        return ""
