"""What can be said about a request beside its prompt, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import Int32Array, Sampling, Submit

from .arguments import check_request, check_submit, milliseconds

MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of `Client.submit`, which says what each means. Raises InvalidRequest naming the wrong one."""

    max_tokens: int = MAX_TOKENS
    sampling: Sampling | None = None
    tenant: str = "default"
    salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    first_token_s: float | None = None
    detached: bool = False
    key: str = ""
    retry_s: float | None = None

    def __post_init__(self) -> None:
        check_submit(self.max_tokens, self.chosen_sampling, self.tenant)
        check_request(self.priority, self.detached, self.key)
        for field in ("deadline_s", "first_token_s", "retry_s"):
            milliseconds(field, getattr(self, field))

    @property
    def chosen_sampling(self) -> Sampling:
        """`sampling`, or the defaults."""
        return self.sampling if self.sampling is not None else Sampling()

    def command(self, rid: int, prompt: Int32Array, sequence_id: int, count: int) -> Submit:
        """What is sent. prompt: [prompt_tokens]; sequence_id: 0 for none."""
        return Submit(
            rid=rid,
            max_tokens=self.max_tokens,
            sampling=self.chosen_sampling,
            tenant=self.tenant,
            sequence_id=sequence_id,
            salt=self.salt,
            count=count,
            priority=self.priority,
            deadline_ms=milliseconds("deadline_s", self.deadline_s),
            first_token_ms=milliseconds("first_token_s", self.first_token_s),
            detached=self.detached,
            key=self.key,
            prompt=prompt,
        )
