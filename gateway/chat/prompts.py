"""Prompts of one model: texts and conversations to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Int32Array
from kvforge.text.tokenizer import TextStream, Tokenizer

from .hygiene import Hygiene

# What a template may not be told by a request: they are the arguments of the function that runs it.
RESERVED = frozenset(
    {
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "messages"),
    }
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation. ids: [prompt_tokens] int32; text: what the template wrote."""

    ids: Int32Array
    text: str


class Prompts:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, hygiene: Hygiene | None = None) -> None:
        self.tokenizer = tokenizer
        self._hygiene = hygiene or Hygiene()
        template = tokenizer.chat_template
        self.has_template = bool(template)
        self.takes_tools = "tools" in template

    def text(self, prompt: str, *, special: bool = True) -> Int32Array:
        """A text as [prompt_tokens] int32. Raises InvalidRequest naming `prompt`."""
        return np.array(self.tokenizer.encode(prompt, special=special), np.int32)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continued: bool = False,
        opened: bool = True,
        told: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """A conversation up to where the model is to answer; `continued`: to go on with its last message;
        not `opened`: up to the end of the last message.

        Raises InvalidRequest naming `messages`, `tools` or `chat_template_kwargs`.
        """
        if not messages:
            raise InvalidRequest("messages", "are empty")
        if not self.has_template:
            problem = "the model has no chat template: use /v1/completions"
            raise InvalidRequest("messages", f"{problem}, or name one with chat_template in gateway.toml")
        if tools and not self.takes_tools:
            raise InvalidRequest("tools", "the model's chat template has no place for tools")
        extra = dict(told or {})
        if wrong := RESERVED & extra.keys():
            raise InvalidRequest("chat_template_kwargs", f"may not hold {min(wrong)!r}")
        options: dict[str, Any] = {
            "add_generation_prompt": opened and not continued,
            "continue_final_message": continued,
        }
        if tools:
            options["tools"] = [dict(tool) for tool in tools]
        text = self.tokenizer.render(self._hygiene.clean(messages), options | extra)
        return Rendered(np.array(self.tokenizer.encode(text, special=False), np.int32), text)

    def stream(self, *, continues: bool = False, keep: frozenset[str] = frozenset()) -> TextStream:
        """What turns one answer's tokens into text. keep: special tokens that are part of it."""
        return self.tokenizer.stream(continues=continues, keep=keep)

    def spelled(self, token_id: int) -> tuple[str, bytes]:
        """A token as text and as bytes; one that is special by its name."""
        pieces = self.tokenizer.pieces_of(frozenset())
        raw = pieces.bytes_of(token_id) if pieces is not None else b""
        if not raw:
            raw = self.tokenizer.spelled(token_id).encode()
        return raw.decode(errors="replace"), raw
