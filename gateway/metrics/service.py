"""The catalogue of the service's metrics: name, help text, and how each is read from the shared tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvforge.protocol.layout import BLOCK_KINDS
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
    TENANT_TIERS,
    WAITING,
    WHOLE,
    Distribution,
)

from .snapshot import COUNTER, GAUGE, HISTOGRAM, MICRO, Metric, MetricsSnapshot, Sample, buckets, tokens

STATES = ("connecting", "loading", "ready", "away")
BLOCK_STATES = ("free", "cached", "referenced", "quarantined")
ENDS = ("tenant", "reason")
MISSES = ("tag", "checksum")


def _one(name: str, scale: float = 1) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    return lambda snapshot: [((), snapshot.gauges[name] / scale)]


def _by_tenant(cell: int) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    return lambda snapshot: [((name,), int(cells[cell])) for name, cells, _ in snapshot.tenants]


def _by_worker(column: str) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    at = POOL_COUNTS.index(column)
    return lambda snapshot: [((worker.name,), int(cells[at])) for worker, cells in snapshot.workers()]


def _spread(what: Distribution, scale: float = MICRO) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    return lambda snapshot: [((), buckets(snapshot.all, what, scale))]


def _spread_by_tenant(what: Distribution) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    return lambda snapshot: [((name,), buckets(cells, what, MICRO)) for name, cells, _ in snapshot.tenants]


def _ended(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    return [((name, reason), int(cells[ENDED[reason]])) for name, cells, _ in snapshot.tenants for reason in REASONS]


def _preempted(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    causes = (("blocks", PREEMPTED), ("worker_lost", DISPLACED))
    return [((name, cause), int(cells[cell])) for name, cells, _ in snapshot.tenants for cause, cell in causes]


def _blocks(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    at = {state: POOL_COUNTS.index(state) for state in BLOCK_STATES}
    return [
        ((worker.name, state), int(cells[at[state]])) for worker, cells in snapshot.workers() for state in BLOCK_STATES
    ]


def _kinds(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    kv, *others = BLOCK_KINDS
    samples: list[Sample] = []
    for worker, cells in snapshot.workers():
        count = dict(zip(POOL_COUNTS, cells.tolist(), strict=False))
        found = {kind: count[f"{kind}_blocks"] for kind in others}
        found[kv] = count["blocks"] - count["free"] - sum(found.values())
        samples += [((worker.name, kind), found[kind]) for kind in BLOCK_KINDS]
    return samples


def _tier_blocks(tier: str) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    def blocks(snapshot: MetricsSnapshot) -> Iterable[Sample]:
        samples: list[Sample] = []
        for worker, cells in snapshot.workers():
            count = dict(zip(POOL_COUNTS, cells.tolist(), strict=False))
            found = {state: count[f"{tier}_{state}"] for state in BLOCK_STATES if state != "referenced"}
            found["referenced"] = count[f"{tier}_blocks"] - sum(found.values())
            samples += [((worker.name, state), found[state]) for state in BLOCK_STATES]
        return samples

    return blocks


def _moved_bytes(column: str) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    at = POOL_COUNTS.index(column)
    return lambda snapshot: [
        ((worker.name,), int(cells[at]) * worker.block_bytes) for worker, cells in snapshot.workers()
    ]


def _seconds(column: str) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    at = POOL_COUNTS.index(column)
    return lambda snapshot: [((worker.name,), int(cells[at]) / MICRO) for worker, cells in snapshot.workers()]


def _swaps(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    ways = {"read": POOL_COUNTS.index("host_swapped"), "computed": POOL_COUNTS.index("host_unswapped")}
    return [((worker.name, way), int(cells[at])) for worker, cells in snapshot.workers() for way, at in ways.items()]


def _returns(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    ways = {way: POOL_COUNTS.index(f"host_returns_{way}") for way in ("used", "wasted")}
    return [((worker.name, way), int(cells[at])) for worker, cells in snapshot.workers() for way, at in ways.items()]


def _misses(tier: str) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    at = {reason: POOL_COUNTS.index(f"{tier}_missed_{reason}s") for reason in MISSES}
    return lambda snapshot: [
        ((worker.name, reason), int(cells[at[reason]])) for worker, cells in snapshot.workers() for reason in MISSES
    ]


def _memory(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    return [
        ((worker.name, purpose), size)
        for worker in snapshot.facts.workers
        for purpose, size in worker.device_bytes.items()
    ]


def _states(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    return [((worker.name, state), int(worker.state == state)) for worker in snapshot.facts.workers for state in STATES]


def _generated(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    return [((name,), tokens(cells)) for name, cells, _ in snapshot.tenants]


def _tenant_blocks(tier: str) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    at = TENANT_TIERS.index(tier)
    return lambda snapshot: [((name,), int(blocks[at])) for name, _, blocks in snapshot.tenants]


def _block_bytes(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    return [((worker.name,), worker.block_bytes) for worker, _ in snapshot.workers()]


def _step_times(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    return [((worker.name,), buckets(cells, STEP_TIME, MICRO)) for worker, cells in snapshot.workers()]


_T, _W = ("tenant",), ("worker",)
_GAUGES: tuple[tuple[str, str, Callable[[MetricsSnapshot], Iterable[Sample]], tuple[str, ...]], ...] = (
    ("model_info", "1 for the served model.", lambda snapshot: [((snapshot.facts.model,), 1)], ("model",)),
    (
        "uptime_seconds",
        "Seconds since the service began; recovery from the journal does not reset it.",
        _one("uptime_us", MICRO),
        (),
    ),
    (
        "published_age_seconds",
        "Age of these numbers in seconds. A running coordinator publishes them at least every second.",
        lambda snapshot: [((), snapshot.age_s)],
        (),
    ),
    ("draining", "1 while the coordinator admits no new requests.", _one("draining"), ()),
    ("clients", "Connected clients.", _one("clients"), ()),
    ("journal_bytes", "Bytes in the journal since its last snapshot.", _one("journal_bytes"), ()),
    ("requests_running", "Running requests.", _by_tenant(RUNNING), _T),
    ("requests_waiting", "Queued requests, preempted ones included.", _by_tenant(WAITING), _T),
    ("sequences", "Sequences, those of requests included.", _one("sequences"), ()),
    ("sequence_tokens", "Tokens of all sequences.", _one("sequence_tokens"), ()),
    ("blocks", "Blocks by state: free, cached, referenced, quarantined.", _blocks, ("worker", "state")),
    (
        "blocks_by_kind",
        "Blocks that are not free, by kind: kv, state (recurrent), checkpoint (of a state), window (KV of layers with "
        "a sliding window).",
        _kinds,
        ("worker", "kind"),
    ),
    (
        "host_blocks",
        "Blocks of the worker's host file by state: free, cached, referenced, quarantined.",
        _tier_blocks("host"),
        ("worker", "state"),
    ),
    (
        "disk_blocks",
        "Blocks of the worker's disk tier by state: free, cached, referenced, quarantined.",
        _tier_blocks("disk"),
        ("worker", "state"),
    ),
    ("tenant_blocks", "Blocks that a tenant is charged for, cached ones included.", _tenant_blocks("device"), _T),
    ("tenant_host_blocks", "Blocks of host files that a tenant is charged for.", _tenant_blocks("host"), _T),
    ("tenant_disk_blocks", "Blocks of disk tiers that a tenant is charged for.", _tenant_blocks("disk"), _T),
    ("block_bytes", "Bytes of one block.", _block_bytes, _W),
    ("worker_steps_in_flight", "Steps sent to the worker and not yet answered.", _by_worker("steps_in_flight"), _W),
    ("worker_requests_running", "Requests that run on the worker.", _by_worker("running"), _W),
    (
        "worker_state",
        "1 for the worker's current state: connecting, loading, ready, away.",
        _states,
        ("worker", "state"),
    ),
    ("worker_memory_bytes", "Device memory of the worker by purpose.", _memory, ("worker", "purpose")),
)
_COUNTERS: tuple[tuple[str, str, Callable[[MetricsSnapshot], Iterable[Sample]], tuple[str, ...]], ...] = (
    ("turns", "Iterations of the coordinator's loop.", _one("turns"), ()),
    (
        "coordinator_restarts",
        "Recoveries of the coordinator from its journal.",
        _one("restarts_total"),
        (),
    ),
    ("journal_records", "Records written to the journal.", _one("journal_records_total"), ()),
    ("requests_accepted", "Admitted requests.", _by_tenant(ACCEPTED), _T),
    ("requests_refused", "Requests refused at admission.", _one("requests_refused_total"), ()),
    ("requests_ended", "Ended requests by reason: length, stop, cancelled, expired, failed.", _ended, ENDS),
    ("prompt_tokens", "Prompt tokens of admitted requests.", _by_tenant(PROMPT), _T),
    (
        "prefilled_tokens",
        "Prompt tokens of requests that completed prefill, cached ones included.",
        _by_tenant(PREFILLED),
        _T,
    ),
    ("generated_tokens", "Generated tokens.", _generated, _T),
    ("computed_tokens", "Input tokens of all steps.", _one("computed_tokens_total"), ()),
    (
        "recomputed_tokens",
        "Tokens recomputed after a preemption or the loss of a worker.",
        _by_tenant(RECOMPUTED),
        _T,
    ),
    (
        "prefix_queried_tokens",
        "Tokens looked up in the prefix cache, when a request is first scheduled.",
        _by_tenant(QUERIED),
        _T,
    ),
    ("prefix_hit_tokens", "Tokens found in the prefix cache by these look-ups.", _by_tenant(HIT), _T),
    (
        "preemptions",
        "Running requests that were preempted for lack of blocks or lost their worker.",
        _preempted,
        ("tenant", "cause"),
    ),
    ("streams_paused", "Streams paused because of a slow consumer.", _one("streams_paused_total"), ()),
    (
        "sequences_evicted",
        "Idle client sequences that lost their blocks to eviction.",
        _one("sequences_evicted_total"),
        (),
    ),
    (
        "tenants_forgotten",
        "Tenants evicted from the table in favour of new ones; their counts moved to `other`.",
        _one("tenants_forgotten_total"),
        (),
    ),
    ("blocks_allocated", "Blocks allocated since the worker registered.", _by_worker("allocated"), _W),
    ("blocks_freed", "Blocks freed since the worker registered.", _by_worker("freed"), _W),
    ("host_saved_blocks", "Blocks copied to the worker's host file.", _by_worker("host_saved"), _W),
    ("host_loaded_blocks", "Blocks copied from the worker's host file.", _by_worker("host_loaded"), _W),
    ("host_saved_bytes", "Bytes copied to the worker's host file.", _moved_bytes("host_saved"), _W),
    ("host_loaded_bytes", "Bytes copied from the worker's host file.", _moved_bytes("host_loaded"), _W),
    (
        "host_hit_tokens",
        "Tokens of prefixes that came from the worker's host file; kvforge_prefix_hit_tokens_total includes those of "
        "first look-ups.",
        _by_worker("host_hit_tokens"),
        _W,
    ),
    (
        "host_swaps",
        "Preempted requests of which the worker's host file had blocks, by how they came back: read, computed.",
        _swaps,
        ("worker", "way"),
    ),
    ("host_swapped_bytes", "Bytes that these requests read.", _moved_bytes("host_swapped_blocks"), _W),
    (
        "host_swap_saved_seconds",
        "Seconds that computing what they read would have taken, less the copies, by the worker's measured costs.",
        _seconds("host_swap_saved_us"),
        _W,
    ),
    (
        "host_evicted_blocks",
        "Entries of the worker's host file that gave their block to another.",
        _by_worker("host_evicted"),
        _W,
    ),
    (
        "host_unsaved_blocks",
        "Blocks that the pool evicted, for which the worker's host file had no place.",
        _by_worker("host_unsaved"),
        _W,
    ),
    (
        "host_skipped_blocks",
        "Blocks that the pool evicted and did not copy to the worker's host file: too few of such are wanted again.",
        _by_worker("host_skipped"),
        _W,
    ),
    (
        "host_returns",
        "Idle sequences and pins that came back from the worker's host file before a request needed them.",
        _by_worker("host_returns"),
        _W,
    ),
    (
        "host_returns_ended",
        "Of these, those that a request continued (used), and those that lost their blocks again before (wasted).",
        _returns,
        ("worker", "way"),
    ),
    (
        "host_recomputed_blocks",
        "Blocks that were computed again after kvforge_host_skipped_blocks_total counted them.",
        _by_worker("host_recomputed"),
        _W,
    ),
    (
        "host_misses",
        "Blocks of the worker's host file that did not hold what was expected, by what differed: tag, checksum.",
        _misses("host"),
        ("worker", "reason"),
    ),
    ("disk_recovered_blocks", "Entries that the worker found on its disk.", _by_worker("disk_recovered"), _W),
    ("disk_saved_blocks", "Blocks copied to the worker's disk tier.", _by_worker("disk_saved"), _W),
    ("disk_loaded_blocks", "Blocks copied from the worker's disk tier.", _by_worker("disk_loaded"), _W),
    ("disk_saved_bytes", "Bytes copied to the worker's disk tier.", _moved_bytes("disk_saved"), _W),
    ("disk_loaded_bytes", "Bytes copied from the worker's disk tier.", _moved_bytes("disk_loaded"), _W),
    (
        "disk_evicted_blocks",
        "Entries of the worker's disk tier that gave their block to another.",
        _by_worker("disk_evicted"),
        _W,
    ),
    (
        "disk_unsaved_blocks",
        "Blocks that left the worker's host file before its disk tier could take them.",
        _by_worker("disk_unsaved"),
        _W,
    ),
    (
        "disk_failed_copies",
        "Copies of the worker's disk tier that ended with an error of the device, or for lack of space.",
        _by_worker("disk_failed"),
        _W,
    ),
    ("disk_late_requests", "Requests that stopped waiting for the worker's disk tier.", _by_worker("disk_late"), _W),
    (
        "disk_declined_requests",
        "Requests that computed what the worker's disk tier has, because that takes less time.",
        _by_worker("disk_declined"),
        _W,
    ),
    (
        "disk_misses",
        "Blocks of the worker's disk tier that did not hold what was expected, by what differed: tag, checksum.",
        _misses("disk"),
        ("worker", "reason"),
    ),
    ("steps", "Steps sent to workers.", _one("steps_total"), ()),
    (
        "device_idle_seconds",
        "Seconds that the worker's device had nothing to do between steps, for lack of requests too.",
        _seconds("device_idle_us"),
        _W,
    ),
    ("drafts", "Times that a request had drafts in a step.", _one("drafts_total"), ()),
    ("drafted_tokens", "Drafted tokens that steps verified.", _one("drafted_tokens_total"), ()),
    ("accepted_drafts", "Drafted tokens that became tokens of answers.", _one("accepted_drafts_total"), ()),
    ("workers_registered", "Workers that became ready.", _one("workers_registered_total"), ()),
    (
        "workers_returned",
        "Workers that reconnected with their KV cache intact after a restart of the coordinator.",
        _one("workers_returned_total"),
        (),
    ),
    ("workers_left", "Workers that shut down on request.", _one("workers_left_total"), ()),
    ("workers_lost", "Workers lost to a crash, a hang or a protocol violation.", _one("workers_lost_total"), ()),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[MetricsSnapshot], Iterable[Sample]], tuple[str, ...]], ...] = (
    ("time_to_first_token_seconds", "Seconds from submission to the first token.", _spread_by_tenant(FIRST_TOKEN), _T),
    ("inter_token_seconds", "Seconds between successive tokens of a request.", _spread_by_tenant(GAP), _T),
    (
        "request_seconds",
        "Seconds from submission to the end, of requests that ended with length or stop.",
        _spread_by_tenant(WHOLE),
        _T,
    ),
    (
        "request_queue_seconds",
        "Seconds from submission until a request is first scheduled, counted then.",
        _spread_by_tenant(QUEUE),
        _T,
    ),
    (
        "request_prefill_seconds",
        "Seconds from first scheduling to the first token, of requests that ended with length or stop.",
        _spread(PREFILL),
        (),
    ),
    (
        "request_decode_seconds",
        "Seconds from the first token to the last, of requests that ended with length or stop.",
        _spread(DECODE),
        (),
    ),
    ("request_prompt_tokens", "Prompt tokens of requests that ended with length or stop.", _spread(PROMPT_SIZE, 1), ()),
    (
        "request_generated_tokens",
        "Generated tokens of requests that ended with length or stop.",
        _spread(ANSWER_SIZE, 1),
        (),
    ),
    ("step_seconds", "Duration of a step in seconds, as its worker measured it.", _step_times, _W),
)
SERVICE = (
    *(Metric(f"kvforge_{name}", GAUGE, text, read, labels) for name, text, read, labels in _GAUGES),
    *(Metric(f"kvforge_{name}_total", COUNTER, text, read, labels) for name, text, read, labels in _COUNTERS),
    *(Metric(f"kvforge_{name}", HISTOGRAM, text, read, labels) for name, text, read, labels in _HISTOGRAMS),
)
