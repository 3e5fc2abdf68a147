"""The context of a request to OpenAI's APIs: its caller, idempotency key and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvforge import SamplingParams
from kvforge.client.options import RequestOptions
from kvforge.gateway.access import Caller
from kvforge.gateway.chat.naming import Names
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.generation import Generation, Usage
from kvforge.gateway.generate.service import Model
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.http.keys import Key, session_of

from .fields import Common
from .request_body import Chat, Completion
from .responses_body import Create

RequestBody = Chat | Completion | Create


@dataclass(frozen=True, slots=True)
class Call:
    """The context of a request.

    Attributes:
        caller: Its sender.
        settings: The gateway's settings.
        model: The model.
        model_name: The name of the model in the request.
        key: The idempotency key.
        session: Requests of one session go to the same replica.
        ignored: Collects the ignored fields.
        names: The names of its fields.
    """

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
        asked: RequestBody,
        ignored: Ignored,
    ) -> Call:
        """Build the context from the headers and the body.

        Raises:
            ModelNotFound: The model is not served.
            InvalidRequest: Names a malformed header.
        """
        if asked.model:
            model.check(asked.model)
        key = Key.of(headers, _whole(asked))
        return cls(
            caller, settings, model, asked.model or model.names[0], key, session_of(headers), ignored, names_of(asked)
        )

    @property
    def resume(self) -> int:
        """How many tokens of the answer the client already has."""
        return self.key.resume

    @property
    def numbered(self) -> bool:
        """Whether events carry their position, so that a client can resume."""
        return bool(self.key.name)

    def options(self, sampling: SamplingParams, asked: Common | Create, max_tokens: int) -> RequestOptions:
        """Return the options of a submission.

        Raises:
            InvalidRequest: Names the field, for `names` to rename.
        """
        return RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=self.caller.tenant,
            cache_salt=self.caller.tenant_salt(asked.cache_salt or ""),
            priority=self.caller.check_priority(asked.priority or 0),
            detached=bool(self.key.name),
            idempotency_key=self.key.name,
        )

    def name(self, prefix: str, generations: list[Generation]) -> str:
        """Return the id of the response, which stays the same when the response is read again."""
        mark = "_" if prefix in ("", "resp") else "-"
        return f"{prefix}{mark}{generations[0].request_id:016x}"


def names_of(asked: RequestBody) -> Names:
    """Return the names of a request's fields."""
    if isinstance(asked, Create):
        return Names({"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"})
    if isinstance(asked, Completion):
        return Names({})
    most = "max_completion_tokens" if asked.max_completion_tokens is not None else "max_tokens"
    return Names({"prompt": "messages", "max_tokens": most, "logprobs": "top_logprobs"})


def total(generations: list[Generation]) -> Usage:
    """Return the sum of the token counts."""
    each = [generation.usage for generation in generations]
    return Usage(
        prompt=sum(usage.prompt for usage in each),
        completion=sum(usage.completion for usage in each),
        cached=sum(usage.cached for usage in each),
        reasoning=sum(usage.reasoning for usage in each),
    )


def _whole(asked: RequestBody) -> str:
    """Return why the answer cannot be resumed, or ""."""
    if isinstance(asked, Create):
        return "events of this API are not numbered"
    if not asked.stream:
        return "the answer is not streamed"
    several = asked.n or 1
    if isinstance(asked, Completion):
        several = max(several, asked.best_of or 1)
        prompts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        if len(prompts) > 1 and not all(isinstance(one, int) for one in prompts):
            several = len(prompts)
    return "there are several answers" if several > 1 else ""
