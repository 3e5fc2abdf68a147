"""From options to a workload. The same options give the same load: driver processes share one by sharing those."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvforge.protocol.errors import InvalidRequest

from . import draws, lengths
from .arrivals import REQUESTS_MAX, Arrivals
from .content import Content, RandomTokens, Singles
from .draws import FloatArray, IntArray
from .tenants import Tenants
from .workload import Session

Encode = Callable[[str], list[int]]
VOCAB_MAX = (1 << 31) - 1
# A closed loop goes through so many different sessions before it begins again, where nothing else is said.
CLOSED_SESSIONS = 1000
INPUT, OUTPUT = "128", "64"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A load, in plain values (`dataclasses.asdict` is JSON). Errors name an option as the command line spells it.

    arrivals: the process by which sessions arrive, see `arrivals.FORMS`; "": as the trace recorded. closed: so many
    sessions are under way at any time instead, 0: none. requests: so many sessions at most; duration_s: none arrives
    later. rate_scale: arrivals come so many times as fast; length_scale: all lengths times this, at least 1 token.
    input, output: tokens, see `lengths.FORMS`; None: as the trace recorded, or 128 and 64. prefix: tokens that all
    prompts begin with. vocab: token ids are below it. tenant: `NAME` or `NAME:SHARE,...`. context_max: prompt and
    answer fit into so many tokens, see `lengths.fitted`.
    """

    arrivals: str = ""
    closed: int = 0
    requests: int | None = None
    duration_s: float | None = None
    rate_scale: float = 1.0
    length_scale: float = 1.0
    input: str | None = None
    output: str | None = None
    prefix: int = 0
    seed: int = 0
    vocab: int = 32_000
    tenant: str = "default"
    context_max: int | None = None


class Load:
    """A `Workload`. shortened: how many of its requests were cut to fit into the context; requests: of all sessions."""

    def __init__(self, content: Content, arrivals: FloatArray | None, tenants: Tenants, sessions: int) -> None:
        self.arrivals = arrivals
        self.shortened, self.requests = content.shortened, content.requests
        self._content, self._tenants, self._sessions = content, tenants, sessions

    def __len__(self) -> int:
        return self._sessions

    def session(self, index: int) -> Session:
        """Session `index`; beyond the last one they begin again, with fresh tokens."""
        content = self._content
        return Session(turns=content.turns(index), tenant=self._tenants.of(index), kind=content.kind(index))


def build(options: LoadOptions, encode: Encode | None = None) -> Load:  # noqa: ARG001
    """The load of these options. encode: a tokenizer without special tokens, for prompts that are texts.

    Raises InvalidRequest naming the option.
    """
    _check(options)
    tenants = Tenants(options.tenant, options.seed)
    if options.closed:
        arrivals, sessions = None, options.requests or CLOSED_SESSIONS
    elif options.arrivals:
        arrivals = Arrivals.parse(options.arrivals).times(
            options.requests, options.duration_s and options.duration_s * options.rate_scale, seed=options.seed
        )
        arrivals /= options.rate_scale
        sessions = len(arrivals)
    else:
        raise InvalidRequest("arrivals", "say when requests arrive: --arrivals, --closed or --trace")
    return Load(_drawn(options, sessions), arrivals, tenants, sessions)


def _drawn(options: LoadOptions, sessions: int) -> Content:
    """Sessions of one request with drawn lengths."""

    def drawn(name: str, text: str, stream: int) -> IntArray:
        return lengths.parse(name, text).draw(np.random.default_rng((options.seed, stream)), sessions)

    inputs = drawn("input", options.input or INPUT, draws.INPUTS)
    outputs = drawn("output", options.output or OUTPUT, draws.OUTPUTS)
    prompts = RandomTokens(seed=options.seed, vocab=options.vocab, prefix=round(options.prefix * options.length_scale))
    return Singles(inputs, outputs, prompts, length_scale=options.length_scale, context_max=options.context_max)


def _check(options: LoadOptions) -> None:
    """Raises InvalidRequest naming the option."""
    for name, factor in (("rate-scale", options.rate_scale), ("length-scale", options.length_scale)):
        if not (math.isfinite(factor) and factor > 0):
            raise InvalidRequest(name, f"is {factor:g}; it must be above 0")
    for name, value, low, high in (
        ("closed", options.closed, 0, REQUESTS_MAX),
        ("requests", options.requests, 1, REQUESTS_MAX),
        ("prefix", options.prefix, 0, lengths.LENGTH_MAX),
        ("seed", options.seed, 0, (1 << 63) - 1),
        ("vocab", options.vocab, 1, VOCAB_MAX),
        ("context-max", options.context_max, 2, lengths.LENGTH_MAX),
    ):
        if value is not None and not low <= value <= high:
            raise InvalidRequest(name, f"is {value}; it must be {low} to {high}")
    if options.duration_s is not None and not (math.isfinite(options.duration_s) and options.duration_s > 0):
        raise InvalidRequest("duration", f"is {options.duration_s:g}; it must be above 0 seconds")
    if options.closed and options.arrivals:
        raise InvalidRequest("closed", "is a loop without arrivals: leave one of the two out")
