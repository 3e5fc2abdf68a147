"""The interface of targets: a coordinator over ZeroMQ, a server over HTTP, or the null server of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvforge.protocol.messages import Int32Array

from .outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """A request as it is sent.

    Attributes:
        prompt: [prompt_tokens] int32.
        output_tokens: The requested length of the answer.
        text: The prompt as text without the history, for a server that takes text, or "".
        history: The previous questions and answers of the session as text.
        followed: Whether the session continues with the answer.
        tenant: The tenant.
        temperature: The temperature.
        seed: The seed.
        client: The client of the load that sends it; each has its own connection.
        until: The time limit (CLOCK_MONOTONIC).
    """

    prompt: Int32Array
    output_tokens: int
    text: str = ""
    history: tuple[tuple[str, str], ...] = ()
    followed: bool = False
    tenant: str = "default"
    temperature: float = 0.0
    seed: int = 0
    client: int = 0
    until: float


class Target(Protocol):
    """The server as one driver process sees it. There is no task per token: up to 20,000 tokens arrive per second."""

    async def open(self) -> None:
        """Connect, so that connecting is not part of the first latency. Raises KvforgeError."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...

    def send(
        self, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
    ) -> Callable[[], None]:
        """Send a request without blocking, and record its progress in `outcome` (times less `start`).

        `ended` is called exactly once, when the state of the outcome is one of ENDS. At `ask.until` the request is
        cancelled and TIMED_OUT.

        Returns:
            A function that cancels the request: INTERRUPTED.
        """
        ...
