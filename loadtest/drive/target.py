"""What a driver sends to: a coordinator over ZeroMQ, an OpenAI-compatible server over HTTP, a null server of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvforge.protocol.messages import Int32Array

from .outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as it is sent. prompt: [prompt_tokens] int32; text: the same for a server that takes text, or "";
    without what was said before, which `history` has: questions and answers. followed: the session goes on with what
    is answered.

    client: which of the load's clients it comes from; each has a connection of its own. until: on CLOCK_MONOTONIC.
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
    """One per driver process. Nothing is a task per token: 20,000 of them come a second."""

    async def open(self) -> None:
        """Connects everything, so that making connections is no part of the first latency. Raises KvforgeError."""
        ...

    async def close(self) -> None:
        """Gives everything back."""
        ...

    def send(self, ask: Ask, outcome: Outcome, start: float, ended: Callable[[Outcome], None]) -> Callable[[], None]:
        """Sends now and returns at once; what comes is written into the outcome (times less `start`).

        `ended` is called exactly once, when the outcome's state is one of ENDS; at `ask.until` it is TIMED_OUT, and the
        request was cancelled. What is returned gives it up: INTERRUPTED.
        """
        ...
