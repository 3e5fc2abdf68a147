"""Every metric of the service: its name, what it means, and where in the shared tables it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvforge.protocol.meters import (
    ACCEPTED,
    ANSWER_SIZE,
    DECODE,
    DISPLACED,
    ENDED,
    FIRST_TOKEN,
    GAP,
    HIT,
    POOL_COUNTS,
    PREEMPTED,
    PREFILL,
    PREFILLED,
    PROMPT,
    PROMPT_SIZE,
    QUERIED,
    QUEUE,
    REASONS,
    RECOMPUTED,
    RUNNING,
    STEP_TIME,
    WAITING,
    WHOLE,
    Distribution,
)

from .told import COUNTER, GAUGE, HISTOGRAM, MICRO, Metric, Sample, Told, buckets, tokens

STATES = ("connecting", "loading", "ready", "away")
BLOCK_STATES = ("free", "cached", "referenced", "quarantined")
ENDS = ("tenant", "reason")


def _one(name: str, scale: float = 1) -> Callable[[Told], Iterable[Sample]]:
    return lambda told: [((), told.gauges[name] / scale)]


def _by_tenant(cell: int) -> Callable[[Told], Iterable[Sample]]:
    return lambda told: [((name,), int(cells[cell])) for name, cells, _ in told.tenants]


def _by_worker(column: str) -> Callable[[Told], Iterable[Sample]]:
    at = POOL_COUNTS.index(column)
    return lambda told: [((worker.name,), int(cells[at])) for worker, cells in told.workers()]


def _spread(what: Distribution, scale: float = MICRO) -> Callable[[Told], Iterable[Sample]]:
    return lambda told: [((), buckets(told.all, what, scale))]


def _spread_by_tenant(what: Distribution) -> Callable[[Told], Iterable[Sample]]:
    return lambda told: [((name,), buckets(cells, what, MICRO)) for name, cells, _ in told.tenants]


def _ended(told: Told) -> Iterable[Sample]:
    return [((name, reason), int(cells[ENDED[reason]])) for name, cells, _ in told.tenants for reason in REASONS]


def _preempted(told: Told) -> Iterable[Sample]:
    causes = (("blocks", PREEMPTED), ("worker_lost", DISPLACED))
    return [((name, cause), int(cells[cell])) for name, cells, _ in told.tenants for cause, cell in causes]


def _blocks(told: Told) -> Iterable[Sample]:
    at = {state: POOL_COUNTS.index(state) for state in BLOCK_STATES}
    return [((worker.name, state), int(cells[at[state]])) for worker, cells in told.workers() for state in BLOCK_STATES]


def _memory(told: Told) -> Iterable[Sample]:
    return [
        ((worker.name, purpose), size) for worker in told.facts.workers for purpose, size in worker.device_bytes.items()
    ]


def _states(told: Told) -> Iterable[Sample]:
    return [((worker.name, state), int(worker.state == state)) for worker in told.facts.workers for state in STATES]


def _generated(told: Told) -> Iterable[Sample]:
    return [((name,), tokens(cells)) for name, cells, _ in told.tenants]


def _tenant_blocks(told: Told) -> Iterable[Sample]:
    return [((name,), blocks) for name, _, blocks in told.tenants]


def _block_bytes(told: Told) -> Iterable[Sample]:
    return [((worker.name,), worker.block_bytes) for worker, _ in told.workers()]


def _step_times(told: Told) -> Iterable[Sample]:
    return [((worker.name,), buckets(cells, STEP_TIME, MICRO)) for worker, cells in told.workers()]


_T, _W = ("tenant",), ("worker",)
_GAUGES: tuple[tuple[str, str, Callable[[Told], Iterable[Sample]], tuple[str, ...]], ...] = (
    ("model_info", "1 for the model that is served.", lambda told: [((told.facts.model,), 1)], ("model",)),
    (
        "uptime_seconds",
        "Since the service began: a restart that goes on with its journal is part of it.",
        _one("uptime_us", MICRO),
        (),
    ),
    (
        "published_age_seconds",
        "How old these numbers are. A coordinator at work writes them every second at least.",
        lambda told: [((), told.age_s)],
        (),
    ),
    ("draining", "1 while nothing more is admitted.", _one("draining"), ()),
    ("clients", "Connections of clients.", _one("clients"), ()),
    ("journal_bytes", "What the journal holds since its last snapshot.", _one("journal_bytes"), ()),
    ("requests_running", "Requests that hold a row.", _by_tenant(RUNNING), _T),
    ("requests_waiting", "Requests that wait for their turn, preempted ones too.", _by_tenant(WAITING), _T),
    ("sequences", "Sequences, those of requests too.", _one("sequences"), ()),
    ("sequence_tokens", "Their tokens.", _one("sequence_tokens"), ()),
    ("blocks", "Blocks by state: free, cached, referenced, quarantined.", _blocks, ("worker", "state")),
    ("tenant_blocks", "Blocks that a tenant is charged for, its cached ones too.", _tenant_blocks, _T),
    ("block_bytes", "Bytes of one block.", _block_bytes, _W),
    ("worker_steps_in_flight", "Steps that were sent and not answered.", _by_worker("steps_in_flight"), _W),
    ("worker_requests_running", "Requests that run there.", _by_worker("running"), _W),
    (
        "worker_state",
        "1 for the state that a worker is in: connecting, loading, ready, away.",
        _states,
        ("worker", "state"),
    ),
    ("worker_memory_bytes", "Memory of its device by purpose.", _memory, ("worker", "purpose")),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Told], Iterable[Sample]], tuple[str, ...]], ...] = (
    ("turns", "Turns of the coordinator's loop.", _one("turns"), ()),
    (
        "coordinator_restarts",
        "How often a coordinator went on with the journal of the one before.",
        _one("restarts_total"),
        (),
    ),
    ("journal_records", "Records that were written.", _one("journal_records_total"), ()),
    ("requests_accepted", "Requests that were admitted.", _by_tenant(ACCEPTED), _T),
    ("requests_refused", "Requests that were refused at once.", _one("requests_refused_total"), ()),
    ("requests_ended", "Requests that ended, by reason: length, stop, cancelled, expired, failed.", _ended, ENDS),
    ("prompt_tokens", "Tokens of the prompts of admitted requests.", _by_tenant(PROMPT), _T),
    (
        "prefilled_tokens",
        "Tokens of the prompts of requests that have their first token, cached ones too.",
        _by_tenant(PREFILLED),
        _T,
    ),
    ("generated_tokens", "Tokens that were generated.", _generated, _T),
    ("computed_tokens", "Tokens that steps were fed.", _one("computed_tokens_total"), ()),
    (
        "recomputed_tokens",
        "Tokens whose KV was computed again, after a preemption or with another worker.",
        _by_tenant(RECOMPUTED),
        _T,
    ),
    (
        "prefix_queried_tokens",
        "Tokens that were looked for in the prefix cache, when a request first ran.",
        _by_tenant(QUERIED),
        _T,
    ),
    ("prefix_hit_tokens", "Tokens of these that were found.", _by_tenant(HIT), _T),
    (
        "preemptions",
        "Running requests that wait again: others needed their blocks, or their worker was lost.",
        _preempted,
        ("tenant", "cause"),
    ),
    ("streams_paused", "Streams that stopped because their client did not read.", _one("streams_paused_total"), ()),
    (
        "sequences_evicted",
        "Idle sequences of clients whose blocks were taken away.",
        _one("sequences_evicted_total"),
        (),
    ),
    (
        "tenants_forgotten",
        "Tenants that gave way to new ones; what was counted of them is in `other`.",
        _one("tenants_forgotten_total"),
        (),
    ),
    ("blocks_allocated", "Blocks that were handed out since the worker registered.", _by_worker("allocated"), _W),
    ("blocks_freed", "Blocks that came back.", _by_worker("freed"), _W),
    ("steps", "Steps that were sent to workers.", _one("steps_total"), ()),
    ("workers_registered", "Workers that became ready.", _one("workers_registered_total"), ()),
    (
        "workers_returned",
        "Workers that came back to the KV that they held, after a restart of the coordinator.",
        _one("workers_returned_total"),
        (),
    ),
    ("workers_left", "Workers that ended as they were told to.", _one("workers_left_total"), ()),
    ("workers_lost", "Workers that died, hung or broke the rules.", _one("workers_lost_total"), ()),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Told], Iterable[Sample]], tuple[str, ...]], ...] = (
    ("time_to_first_token_seconds", "From submission to the first token.", _spread_by_tenant(FIRST_TOKEN), _T),
    ("inter_token_seconds", "From each token of a request to its next one.", _spread_by_tenant(GAP), _T),
    (
        "request_seconds",
        "From submission to the end, of requests that ended with length or stop.",
        _spread_by_tenant(WHOLE),
        _T,
    ),
    (
        "request_queue_seconds",
        "From submission until a request first runs, counted then.",
        _spread_by_tenant(QUEUE),
        _T,
    ),
    (
        "request_prefill_seconds",
        "From then until its first token, of requests that ended with length or stop.",
        _spread(PREFILL),
        (),
    ),
    ("request_decode_seconds", "From the first token to the last one, of the same.", _spread(DECODE), ()),
    ("request_prompt_tokens", "Tokens of prompts, of the same.", _spread(PROMPT_SIZE, 1), ()),
    ("request_generated_tokens", "Tokens of answers, of the same.", _spread(ANSWER_SIZE, 1), ()),
    ("step_seconds", "How long a step took, as its worker measured it.", _step_times, _W),
)
SERVICE = (
    *(Metric(f"kvforge_{name}", GAUGE, text, read, labels) for name, text, read, labels in _GAUGES),
    *(Metric(f"kvforge_{name}_total", COUNTER, text, read, labels) for name, text, read, labels in _COUNTERS),
    *(Metric(f"kvforge_{name}", HISTOGRAM, text, read, labels) for name, text, read, labels in _HISTOGRAMS),
)
