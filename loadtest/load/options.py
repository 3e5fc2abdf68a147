"""The options of a load, in plain values, and their check."""

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
    """A load, in plain values (`dataclasses.asdict` is JSON). Errors name an option as the command line spells it.

    trace: see `traces.find`; "": none. arrivals: the process by which sessions arrive, see `arrivals.FORMS`; "": as the
    trace recorded (a trace of sessions records no arrivals: `build.SESSIONS`). closed: so many sessions are under way
    at any time instead, 0: none. requests: so many sessions at most; duration_s: none arrives later. rate_scale:
    arrivals come so many times as fast; think_scale: pauses inside sessions times this; length_scale: all lengths times
    this, at least 1 token. input, output: tokens, see `lengths.FORMS`; None: as the trace recorded or the question is
    long, or 128 and 64. prompts: one of PROMPTS. prefix: tokens that all prompts begin with (one shorter is the
    beginning of it). vocab: token ids are below it. tenant: `NAME` or `NAME:SHARE,...`. context_max: prompt and answer
    fit into so many tokens, see `lengths.fitted`.
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
        """What one option alone tells. Raises InvalidRequest naming it."""
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
            raise InvalidRequest("closed", "is a loop without arrivals: leave one of the two out")
        if self.prompts not in PROMPTS:
            raise InvalidRequest("prompts", f"{self.prompts!r} is none of {', '.join(PROMPTS)}")
        if self.prefix and self.prompts in QUESTIONS:
            raise InvalidRequest("prefix", f"cannot stand before the questions of {self.prompts}")
