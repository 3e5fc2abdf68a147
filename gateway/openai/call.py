"""The context of a request of OpenAI's APIs: its caller, its idempotency key, its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvforge import Sampling
from kvforge.client.options import RequestOptions
from kvforge.gateway.access import Caller
from kvforge.gateway.chat.naming import Names
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.generation import Generation, Usage
from kvforge.gateway.generate.service import Model
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.http.keys import Key, session_of

from .asked import Chat, Completion
from .fields import Common
from .responses_asked import Create

Asked = Chat | Completion | Create


@dataclass(frozen=True, slots=True)
class Call:
    """model_name: as the request calls it. ignored: what of the request is not read. names: of its
    fields."""

    caller: Caller
    settings: Settings
    model: Model
    model_name: str
    key: Key
    session: str = ""
    ignored: Ignored = field(default_factory=Ignored)
    names: Names = field(default_factory=lambda: Names({}))

    @classmethod
    def of(
        cls,
        headers: Mapping[str, str],
        caller: Caller,
        settings: Settings,
        model: Model,
        asked: Asked,
        ignored: Ignored,
    ) -> Call:
        """Raises ModelNotFound, InvalidRequest naming a header."""
        if asked.model:
            model.check(asked.model)
        key = Key.of(headers, _whole(asked))
        return cls(
            caller, settings, model, asked.model or model.names[0], key, session_of(headers), ignored, names_of(asked)
        )

    @property
    def resume(self) -> int:
        """Tokens of the answer that the caller has."""
        return self.key.resume

    @property
    def numbered(self) -> bool:
        """Events say where they are, so that the caller can come back."""
        return bool(self.key.name)

    def options(self, sampling: Sampling, asked: Common | Create, max_tokens: int) -> RequestOptions:
        """Raises InvalidRequest, for `names` to rename."""
        return RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=self.caller.tenant,
            salt=self.caller.own_salt(asked.cache_salt or ""),
            priority=self.caller.check_priority(asked.priority or 0),
            detached=bool(self.key.name),
            key=self.key.name,
        )

    def name(self, prefix: str, generations: list[Generation]) -> str:
        """The id of the response: the same when it is asked for again."""
        mark = "_" if prefix in ("", "resp") else "-"
        return f"{prefix}{mark}{generations[0].request_id:016x}"


def names_of(asked: Asked) -> Names:
    """The names of a request's fields."""
    if isinstance(asked, Create):
        return Names({"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"})
    if isinstance(asked, Completion):
        return Names({})
    most = "max_completion_tokens" if asked.max_completion_tokens is not None else "max_tokens"
    return Names({"prompt": "messages", "max_tokens": most, "logprobs": "top_logprobs"})


def total(generations: list[Generation]) -> Usage:
    """The counts of all of them together."""
    each = [generation.usage for generation in generations]
    return Usage(
        prompt=sum(usage.prompt for usage in each),
        completion=sum(usage.completion for usage in each),
        cached=sum(usage.cached for usage in each),
        reasoning=sum(usage.reasoning for usage in each),
    )


def _whole(asked: Asked) -> str:
    """Why the answer to this cannot go on in its middle, or ""."""
    if isinstance(asked, Create):
        return "events of this API have no numbers"
    if not asked.stream:
        return "the answer is not streamed"
    several = asked.n or 1
    if isinstance(asked, Completion):
        several = max(several, asked.best_of or 1)
        prompts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        if len(prompts) > 1 and not all(isinstance(one, int) for one in prompts):
            several = len(prompts)
    return "there are several answers" if several > 1 else ""
