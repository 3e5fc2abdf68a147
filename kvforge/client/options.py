"""The options of a request beside its prompt, checked at construction."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvforge.protocol.messages import Int32Array, Submit

from .arguments import check_request, check_submit, milliseconds
from .sampling import SamplingParams

MAX_TOKENS = 256
RECONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of `Client.submit`, which documents them, and four of the gateway.

    Attributes:
        continues: The kept sequence that the prompt may begin with, 0 for none.
        keep_s: How long the sequence of each answer is kept for the next turn, in seconds; 0: it is not.
        pins: Leading parts of the prompt to pin for later requests, as (tokens, seconds after their last use).
        ahead: Compute the prompt for later requests, while nothing else is to be done.

    Raises:
        InvalidRequest: Names the wrong option.
    """

    max_tokens: int = MAX_TOKENS
    sampling: SamplingParams | None = None
    tenant: str = "default"
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    first_token_s: float | None = None
    detached: bool = False
    idempotency_key: str = ""
    retry_s: float | None = None
    continues: int = 0
    keep_s: float = 0.0
    pins: tuple[tuple[int, float], ...] = ()
    ahead: bool = False
    _submit: Submit = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_submit", self._checked())
        milliseconds("retry_s", self.retry_s)

    @property
    def kept(self) -> bool:
        """Return whether the request outlives its readers, because it can be attached to again."""
        return self.detached or bool(self.idempotency_key)

    def command(self, rid: int, prompt: Int32Array, sequence_id: int, count: int) -> Submit:
        """Return the message to send.

        Args:
            rid: The number of the command.
            prompt: [prompt_tokens] int32.
            sequence_id: The sequence to continue, 0 for none.
            count: The number of answers.
        """
        return msgspec.structs.replace(self._submit, rid=rid, prompt=prompt, sequence_id=sequence_id, count=count)

    def _checked(self) -> Submit:
        """Return the part of the message that is the same for every prompt."""
        sampling = self.sampling if self.sampling is not None else SamplingParams()
        max_tokens = check_submit(self.max_tokens, sampling, self.tenant, self.cache_salt)
        priority, detached = check_request(self.priority, self.detached, self.idempotency_key)
        return Submit(
            rid=0,
            max_tokens=max_tokens,
            sampling=sampling.message(),
            model_defaults=sampling.unnamed,
            tenant=self.tenant,
            salt=self.cache_salt,
            priority=priority,
            deadline_ms=milliseconds("deadline_s", self.deadline_s),
            first_token_ms=milliseconds("first_token_s", self.first_token_s),
            detached=detached,
            key=self.idempotency_key,
            continues=self.continues,
            keep_ms=milliseconds("keep_s", self.keep_s or None),
            pins=tuple((tokens, milliseconds("pins", seconds)) for tokens, seconds in self.pins),
            ahead=self.ahead,
        )
