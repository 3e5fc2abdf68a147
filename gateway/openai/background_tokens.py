"""The tokens of a background response, which outlive the request that computes them."""

from __future__ import annotations

from collections.abc import Sequence

from kvforge.gateway.generate.answer import Answer
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Ended

from .kept import KeptSequence
from .responses import Responses


class Tokens:
    """The tokens of a background response so far, in the interface of a `Stream`.

    They stay while their request is submitted again, and until it has computed as many.
    """

    def __init__(self) -> None:
        self.request_id = 0
        self.tokens: Sequence[int] = ()
        self.logprobs: Sequence[float] = ()
        self.top_logprobs: Sequence[tuple[tuple[int, float], ...]] = ()
        self.prompt_logprobs: None = None
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None
        self.kept: KeptSequence | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.ended is not None

    def cancel(self) -> None:
        """Do nothing: a reader leaves."""

    def leave(self) -> None:
        """Do nothing: a reader leaves."""

    def finish_at(self, tokens: int) -> None:
        """Do nothing: there are no stop strings."""


def answer_of(work: Responses, tokens: Tokens) -> Answer:
    """Return a reader of a response's tokens, from the first on."""
    wanted = work.wanted[0]
    parser = wanted.parser() if wanted.parser is not None else None
    return Answer(0, tokens, wanted.text(), parser=parser)
