"""The options of a load as plain values, and their validation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvforge.protocol.errors import InvalidRequest

from .arrivals import REQUESTS_MAX
from .lengths import LENGTH_MAX
from .texts import PASSAGES, QUESTIONS

VOCAB_MAX = (1 << 31) - 1
RANDOM = "random"
PROMPTS = (RANDOM, *PASSAGES, *QUESTIONS)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A load as plain values; it converts to JSON with `dataclasses.asdict`.

    Errors name options as the command line does.

    Attributes:
        trace: See `traces.find`; "" for none.
        arrivals: The arrival process, see `arrivals.FORMS`; "" for the recorded arrivals (for a trace of sessions:
            `build.SESSIONS`).
        closed: The number of concurrent sessions of a closed loop; 0 for an open loop.
        requests: The maximum number of sessions.
        duration_s: No session arrives later.
        rate_scale: The factor of the arrival rate.
        think_scale: The factor of pauses within sessions.
        length_scale: The factor of all lengths, at least 1 token each.
        input, output: Tokens, see `lengths.FORMS`; None for the recorded lengths or those of the questions, else 128
            and 64.
        prompts: One of PROMPTS.
        prefix: The number of leading tokens that all prompts share; a shorter prompt is a part of the prefix.
        seed: The seed.
        vocab: Token ids are below it.
        tenant: `NAME` or `NAME:SHARE,...`.
        context_max: The limit of prompt and answer together, see `lengths.fitted`.
    """

    trace: str = ""
    arrivals: str = ""
    closed: int = 0
    requests: int | None = None
    duration_s: float | None = None
    rate_scale: float = 1.0
    think_scale: float = 1.0
    length_scale: float = 1.0
    input: str | None = None
    output: str | None = None
    prompts: str = RANDOM
    prefix: int = 0
    seed: int = 0
    vocab: int = 32_000
    tenant: str = "default"
    context_max: int | None = None

    def check(self) -> None:
        """Validate each option on its own.

        Raises:
            InvalidRequest: Names the option.
        """
        for name, factor in (("rate-scale", self.rate_scale), ("length-scale", self.length_scale)):
            if not (math.isfinite(factor) and factor > 0):
                raise InvalidRequest(name, f"is {factor:g}; it must be above 0")
        if not (math.isfinite(self.think_scale) and self.think_scale >= 0):
            raise InvalidRequest("think-scale", f"is {self.think_scale:g}; it must be 0 or more")
        for name, value, low, high in (
            ("closed", self.closed, 0, REQUESTS_MAX),
            ("requests", self.requests, 1, REQUESTS_MAX),
            ("prefix", self.prefix, 0, LENGTH_MAX),
            ("seed", self.seed, 0, (1 << 63) - 1),
            ("vocab", self.vocab, 1, VOCAB_MAX),
            ("context-max", self.context_max, 2, LENGTH_MAX),
        ):
            if value is not None and not low <= value <= high:
                raise InvalidRequest(name, f"is {value}; it must be {low} to {high}")
        if self.duration_s is not None and not (math.isfinite(self.duration_s) and self.duration_s > 0):
            raise InvalidRequest("duration", f"is {self.duration_s:g}; it must be above 0 seconds")
        if self.closed and self.arrivals:
            raise InvalidRequest("closed", "cannot be combined with --arrivals")
        if self.prompts not in PROMPTS:
            raise InvalidRequest("prompts", f"is {self.prompts!r} (expected one of {', '.join(PROMPTS)})")
        if self.prefix and self.prompts in QUESTIONS:
            raise InvalidRequest("prefix", f"cannot be combined with the questions of {self.prompts}")
