"""From options to a workload.

Equal options give equal loads, so driver processes share a load by sharing its options.
"""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import InvalidRequest

from . import draws, lengths, recorded, servegen, traces
from .agents import Agents
from .agents import read as read_agents
from .arrivals import REQUESTS_MAX, Arrivals
from .blocks import Blocks
from .content import BlockPrompts, Content, Prompts, RandomTokens, SingleTurnSessions
from .draws import FloatArray, IntArray
from .files import lines
from .options import RANDOM, LoadOptions
from .recorded import MOONCAKE_BLOCK, Recorded
from .tenants import Tenants
from .texts import QUESTIONS, Encode, Passages, Questions, encoder
from .workload import Session

__all__ = ["Load", "LoadOptions", "build"]

# The default number of distinct sessions of a closed loop before it repeats them.
CLOSED_SESSIONS = 1000
INPUT, OUTPUT = "128", "64"
# The default arrivals of a trace of sessions, which records none.
SESSIONS = "poisson:0.1"


class Load:
    """A `Workload`.

    Attributes:
        arrivals: [sessions] seconds, or None for a closed loop.
        shortened: The number of requests that were truncated to fit the context.
        requests: The number of requests of all sessions.
    """

    def __init__(self, content: Content, arrivals: FloatArray | None, tenants: Tenants, sessions: int) -> None:
        self.arrivals = arrivals
        self.shortened, self.requests = content.shortened, content.requests
        self._content, self._tenants, self._sessions = content, tenants, sessions

    def __len__(self) -> int:
        return self._sessions

    def session(self, index: int) -> Session:
        """Return session `index`; beyond the last one they repeat with fresh tokens."""
        content = self._content
        return Session(turns=content.turns(index), tenant=self._tenants.of(index), kind=content.kind(index))


def build(options: LoadOptions, encode: Encode | None = None) -> Load:
    """Build the load of these options.

    Args:
        options: The options.
        encode: A tokenizer without special tokens, for text prompts; without one each word is a token.

    Raises:
        InvalidRequest: Names the option.
    """
    options.check()
    tenants = Tenants(options.tenant, options.seed)
    if options.trace:
        with traces.find(options.trace) as trace:
            if trace.format == traces.CLAUDE_CODE:
                agents = _agents(options, trace)
                return Load(agents, agents.times, tenants, len(agents))
            rows, arrivals = _rows(options, trace)
        sessions = len(rows) if arrivals is None else len(arrivals)
        if options.closed and options.requests:
            sessions = options.requests
        return Load(_recorded(options, rows, sessions, encode), arrivals, tenants, sessions)
    if not (options.arrivals or options.closed):
        raise InvalidRequest("arrivals", "is missing: give --arrivals, --closed or --trace")
    arrivals = _arrivals(options, options.arrivals) if options.arrivals else None
    sessions = len(arrivals) if arrivals is not None else options.requests or CLOSED_SESSIONS
    return Load(_drawn(options, sessions, encode), arrivals, tenants, sessions)


def _arrivals(options: LoadOptions, process: str) -> FloatArray:
    """Draw the arrivals, [sessions] s. `rate_scale` applies to a process as to a trace."""
    end_s = None if options.duration_s is None else options.duration_s * options.rate_scale
    return Arrivals.parse(process).times(options.requests, end_s, seed=options.seed) / options.rate_scale


def _agents(options: LoadOptions, trace: traces.Trace) -> Agents:
    _no_lengths(options, trace.format)
    _no_prompts(options, trace.format)
    return Agents(
        read_agents(trace.file, trace.lines()),
        None if options.closed else _arrivals(options, options.arrivals or SESSIONS),
        count=options.requests,
        end_s=options.duration_s,
        seed=options.seed,
        vocab=options.vocab,
        length_scale=options.length_scale,
        think_scale=options.think_scale,
        context_max=options.context_max,
    )


def _rows(options: LoadOptions, trace: traces.Trace) -> tuple[Recorded, FloatArray | None]:
    """Return the trace's requests and their arrivals: the recorded ones, or those of the given process."""
    arrivals = _arrivals(options, options.arrivals) if options.arrivals else None
    if trace.format == traces.SERVEGEN:
        rows = _servegen(options, trace, arrivals)
    elif trace.format == traces.AZURE:
        rows = recorded.azure(trace.file, trace.lines())
    else:
        rows = recorded.mooncake(trace.file, trace.lines(), seed=options.seed)
    if arrivals is not None or options.closed:
        return rows, arrivals
    times = rows.times / options.rate_scale
    count = len(times) if options.duration_s is None else int(np.searchsorted(times, options.duration_s))
    count = min(count, options.requests or count)
    if not 1 <= count <= REQUESTS_MAX:
        raise InvalidRequest("duration", f"of this trace contains {count} requests (must be 1 to {REQUESTS_MAX})")
    return rows, times[:count]


def _servegen(options: LoadOptions, trace: traces.Trace, arrivals: FloatArray | None) -> Recorded:
    count, end_s = options.requests, options.duration_s
    if arrivals is not None:
        count, end_s = len(arrivals), None
    elif options.closed:
        count, end_s = options.requests or CLOSED_SESSIONS, None
    elif end_s is not None:
        end_s *= options.rate_scale
    elif count is None:
        raise InvalidRequest(
            "duration", f"is missing: {trace.file} contains rates, not requests; give --duration or --requests"
        )
    beside = trace.lengths()
    counted = servegen.ClientLengths(beside.name, lines(beside)) if beside is not None else None
    windows = servegen.rates(trace.file, trace.lines())
    return servegen.requests(windows, counted, seed=options.seed, end_s=end_s, count=count)


def _recorded(options: LoadOptions, rows: Recorded, sessions: int, encode: Encode | None) -> SingleTurnSessions:
    """Return sessions of the trace's requests, repeated if necessary."""
    if rows.inputs is not None and rows.outputs is not None:
        _no_lengths(options, options.trace)
        inputs, outputs = np.resize(rows.inputs, sessions), np.resize(rows.outputs, sessions)
    else:
        inputs, outputs = _lengths(options, sessions)
    if rows.blocks:
        _no_prompts(options, options.trace)
        blocks = Blocks(MOONCAKE_BLOCK, seed=options.seed, vocab=options.vocab, scale=options.length_scale)
        prompts: Prompts = BlockPrompts(blocks, rows.blocks)
    elif options.prompts in QUESTIONS:
        raise InvalidRequest("prompts", f"{options.prompts} has its own lengths and cannot be combined with a trace")
    else:
        prompts = _prompts(options, encode)
    return SingleTurnSessions(
        inputs,
        outputs,
        prompts,
        length_scale=options.length_scale,
        context_max=options.context_max,
        kinds=rows.kinds,
    )


def _drawn(options: LoadOptions, sessions: int, encode: Encode | None) -> Content:
    """Return sessions with drawn lengths, or of questions."""
    inputs, outputs = _lengths(options, sessions)
    if options.prompts in QUESTIONS:
        return Questions(
            options.prompts,
            encoder(encode, options.vocab),
            inputs if options.input else None,
            outputs,
            seed=options.seed,
            length_scale=options.length_scale,
            context_max=options.context_max,
        )
    return SingleTurnSessions(
        inputs,
        outputs,
        _prompts(options, encode),
        length_scale=options.length_scale,
        context_max=options.context_max,
    )


def _lengths(options: LoadOptions, sessions: int) -> tuple[IntArray, IntArray]:
    """Draw the lengths of input and output, [sessions] int64."""

    def drawn(name: str, text: str, stream: int) -> IntArray:
        return lengths.parse(name, text).draw(np.random.default_rng((options.seed, stream)), sessions)

    return (
        drawn("input", options.input or INPUT, draws.INPUTS),
        drawn("output", options.output or OUTPUT, draws.OUTPUTS),
    )


def _prompts(options: LoadOptions, encode: Encode | None) -> Prompts:
    prefix = int(options.prefix * options.length_scale + 0.5)
    if options.prompts == RANDOM:
        return RandomTokens(seed=options.seed, vocab=options.vocab, prefix=prefix)
    return Passages(options.prompts, encoder(encode, options.vocab), seed=options.seed, prefix=prefix)


def _no_lengths(options: LoadOptions, trace: str) -> None:
    for name, given in (("input", options.input), ("output", options.output)):
        if given:
            raise InvalidRequest(name, f"the trace {trace} has its own lengths: use --length-scale to change them")


def _no_prompts(options: LoadOptions, trace: str) -> None:
    for name, given in (("prompts", options.prompts != RANDOM), ("prefix", options.prefix > 0)):
        if given:
            raise InvalidRequest(name, f"the trace {trace} has its own prompts with recorded prefixes")
