"""What a request of either API needs besides its body: who asks, under which key, of which model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.access import Caller
from gateway.config import Settings
from gateway.generate.generation import Generation, Usage
from gateway.generate.service import Model
from kvforge import Sampling
from kvforge.client.options import RequestOptions
from kvforge.protocol.errors import InvalidRequest, ModelNotFound

from .fields import Common, renamed

KEY_HEADER = "idempotency-key"
RESUME_HEADER = "last-event-id"


@dataclass(frozen=True, slots=True)
class Call:
    """key: the caller's own name of this request: it goes on when the connection, or this process, is lost, and is the
    same request when it comes again. resume: tokens of its answer that the caller has."""

    caller: Caller
    settings: Settings
    model: Model
    model_name: str
    key: str
    resume: int

    @classmethod
    def of(cls, headers: Mapping[str, str], caller: Caller, settings: Settings, model: Model, asked: str) -> Call:
        """Raises ModelNotFound, InvalidRequest naming a header."""
        if asked and asked not in model.names:
            raise ModelNotFound(asked, f"is not served here; served is {model.names[0]}")
        key, resume = headers.get(KEY_HEADER, ""), headers.get(RESUME_HEADER, "")
        if resume and not (key and resume.isdecimal() and len(resume) < 10):
            raise InvalidRequest(RESUME_HEADER, f"is a number of tokens, and comes with {KEY_HEADER}")
        return cls(caller, settings, model, asked or model.names[0], key, int(resume or 0))

    @property
    def numbered(self) -> bool:
        """Events say where they are, so that the caller can come back."""
        return bool(self.key)

    def options(self, sampling: Sampling, asked: Common, max_tokens: int) -> RequestOptions:
        """Raises InvalidRequest naming the field as the request calls it."""
        try:
            return RequestOptions(
                max_tokens=max_tokens,
                sampling=sampling,
                tenant=self.caller.tenant,
                salt=asked.cache_salt or "",
                priority=asked.priority or 0,
                detached=bool(self.key),
                key=self.key,
            )
        except InvalidRequest as error:
            raise renamed(error) from None

    def name(self, prefix: str, generations: list[Generation]) -> str:
        """The id of the response: the same when it is asked for again."""
        return f"{prefix}-{generations[0].request_id:016x}"


def total(generations: list[Generation]) -> Usage:
    """The counts of all of them together."""
    each = [generation.usage for generation in generations]
    return Usage(
        prompt=sum(usage.prompt for usage in each),
        completion=sum(usage.completion for usage in each),
        cached=sum(usage.cached for usage in each),
        reasoning=sum(usage.reasoning for usage in each),
    )
