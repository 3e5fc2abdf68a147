"""What a caller gets back: plain immutable values, the same for the blocking and the asyncio client."""

from __future__ import annotations

from dataclasses import dataclass

from kvforge.protocol.messages import Timings

from .awaited import Track


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. offset: 0 is the first generated one. logprob: of the chosen token, in nats.

    top: the most likely tokens at its place, as (token id, logprob), where `Sampling.logprobs` asks for them.
    """

    offset: int
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended. Of one that was attached to at an offset: `tokens`, `logprobs` and `top` begin there.

    reason: `length` (max_tokens reached), `stop` (a stop or end-of-sequence token, which is the last token, or a stop
    string, which the last token completed) or `cancelled`. cached_tokens: how many of the prompt's tokens came from
    the prefix cache. timings: microseconds since submission, by the coordinator's clock. logprobs: one for each token,
    in nats. top: for each token what `Token.top` is.
    """

    request_id: int
    tokens: tuple[int, ...]
    reason: str
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Generated text, and the request it came from."""

    text: str
    finished: Finished


def token_at(track: Track, offset: int) -> Token:
    """The token of a stream at an offset that has been received."""
    at = offset - track.start
    return Token(offset, track.tokens[at], track.logprobs[at], track.tops[at])


def finished(track: Track, start: int = 0) -> Finished:
    """The outcome of a request whose end has come, with its tokens from offset `start` on, or as many as are known.

    Raises the error it ended with.
    """
    if (error := track.failure()) is not None:
        raise error
    ended = track.ended
    assert ended is not None, "asked for the outcome of a request that runs"
    at = max(0, start - track.start)
    return Finished(
        request_id=track.request_id,
        tokens=tuple(track.tokens[at:]),
        reason=ended.reason,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        timings=ended.timings,
        logprobs=tuple(track.logprobs[at:]),
        top=tuple(track.tops[at:]),
    )
