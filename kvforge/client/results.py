"""Results for callers: plain immutable values, the same for both clients."""

from __future__ import annotations

from dataclasses import dataclass

from kvforge.protocol.messages import Timings

from .deprecated import warn_renamed
from .pending import RequestStream
from .prompt_stream import PromptStream


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        offset: Its place; 0 is the first generated token.
        token_id: Its id.
        logprob: The log-probability of the chosen token, in nats.
        top_logprobs: The most likely tokens at its place, as (token id, logprob), if `SamplingParams.logprobs` requests
            them.
    """

    offset: int
    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Return `top_logprobs`. Deprecated: removed in the next version."""
        warn_renamed("Token.top", "top_logprobs")
        return self.top_logprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of a prompt, given those before it.

    Attributes:
        position: Its place in the prompt, from 1: the first token has nothing before it.
        token_id: Its id.
        logprob: Its log-probability, in nats.
        rank: Its place among all tokens ordered by likelihood, from 1.
        top_logprobs: The most likely tokens in its place, as (token id, logprob); the rank of the i-th is i + 1.
    """

    position: int
    token_id: int
    logprob: float
    rank: int
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended. After an attach at an offset, `tokens`, `logprobs` and `top_logprobs` start there.

    Attributes:
        reason: `length` (max_tokens reached), `stop` (the last token is a stop or end-of-sequence token, or completed a
            stop string) or `cancelled`.
        cached_tokens: How many of the prompt's tokens came from the prefix cache.
        timings: Microseconds since submission, by the coordinator's clock.
        logprobs: One for each token, in nats.
        top_logprobs: The `Token.top_logprobs` of each token.
        prompt_logprobs: The tokens of the prompt but the first, if `SamplingParams.prompt_logprobs` requests them.
    """

    request_id: int
    tokens: tuple[int, ...]
    reason: str
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[ScoredToken, ...] = ()

    @property
    def top(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Return `top_logprobs`. Deprecated: removed in the next version."""
        warn_renamed("Finished.top", "top_logprobs")
        return self.top_logprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """Generated text, and the request it came from."""

    text: str
    finished: Finished


def token_at(track: RequestStream, offset: int) -> Token:
    """Return the token of a stream at an offset that has been received."""
    at = offset - track.start
    return Token(offset, track.tokens[at], track.logprobs[at], track.top_logprobs[at])


def finished(track: RequestStream, start: int = 0) -> Finished:
    """Return the outcome of a request that has ended, with its known tokens from offset `start` on.

    Raises:
        KvforgeError: The error that ended the request.
    """
    if (error := track.failure()) is not None:
        raise error
    ended = track.ended
    assert ended is not None, "the request still runs"
    at = max(0, start - track.start)
    return Finished(
        request_id=track.request_id,
        tokens=tuple(track.tokens[at:]),
        reason=ended.reason,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        timings=ended.timings,
        logprobs=tuple(track.logprobs[at:]),
        top_logprobs=tuple(track.top_logprobs[at:]),
        prompt_logprobs=scored_tokens(track.prompt) if track.prompt is not None else (),
    )


def scored_tokens(prompt: PromptStream) -> tuple[ScoredToken, ...]:
    """Return the tokens of a prompt with the log-probabilities that have arrived."""
    rows = zip(prompt.tokens, prompt.logprobs, prompt.ranks, prompt.top_logprobs, strict=True)
    return tuple(ScoredToken(position, *row) for position, row in enumerate(rows, 1))
