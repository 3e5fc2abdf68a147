"""vLLM's names and labels for metrics of identical meaning. The label `engine` is always 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvforge.protocol.meters import (
    ANSWER_SIZE,
    DECODE,
    ENDED,
    FIRST_TOKEN,
    GAP,
    HIT,
    POOL_COUNTS,
    PREEMPTED,
    PREFILL,
    PREFILLED,
    PROMPT_SIZE,
    QUERIED,
    QUEUE,
    RUNNING,
    WAITING,
    WHOLE,
    Distribution,
)

from .snapshot import COUNTER, GAUGE, HISTOGRAM, MICRO, Metric, MetricsSnapshot, Sample, buckets, tokens, usage

LABELS = ("model_name", "engine")
# vLLM's `abort` is a cancelled request. Its `error` has no exact counterpart in `failed` or `expired`.
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort"}


def _labels(snapshot: MetricsSnapshot) -> tuple[str, str]:
    return snapshot.facts.model, "0"


def _count(cell: int) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    return lambda snapshot: [(_labels(snapshot), int(snapshot.all[cell]))]


def _gauge(name: str) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    return lambda snapshot: [(_labels(snapshot), snapshot.gauges[name])]


def _spread(what: Distribution, scale: float = MICRO) -> Callable[[MetricsSnapshot], Iterable[Sample]]:
    return lambda snapshot: [(_labels(snapshot), buckets(snapshot.all, what, scale))]


def _moved(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    """Bytes between pools and host files."""
    return [
        (
            (*_labels(snapshot), direction),
            sum(int(cells[POOL_COUNTS.index(column)]) * worker.block_bytes for worker, cells in snapshot.workers()),
        )
        for direction, column in (("GPU_to_CPU", "host_saved"), ("CPU_to_GPU", "host_loaded"))
    ]


def _found(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    at = POOL_COUNTS.index("host_hit_tokens")
    return [(_labels(snapshot), sum(int(cells[at]) for _, cells in snapshot.workers()))]


def _success(snapshot: MetricsSnapshot) -> Iterable[Sample]:
    return [((*_labels(snapshot), theirs), int(snapshot.all[ENDED[ours]])) for ours, theirs in FINISHED.items()]


def _metric(name: str, kind: str, same: str, read: Callable[[MetricsSnapshot], Iterable[Sample]], *more: str) -> Metric:
    return Metric(f"vllm:{name}", kind, f"The same as {same}.", read, (*LABELS, *more), same)


VLLM = (
    _metric("num_requests_running", GAUGE, "kvforge_requests_running", _count(RUNNING)),
    _metric("num_requests_waiting", GAUGE, "kvforge_requests_waiting", _count(WAITING)),
    _metric(
        "kv_cache_usage_perc",
        GAUGE,
        "kvforge_blocks",
        lambda snapshot: [(_labels(snapshot), usage(snapshot))],
    ),
    _metric("prefix_cache_queries_total", COUNTER, "kvforge_prefix_queried_tokens_total", _count(QUERIED)),
    _metric("prefix_cache_hits_total", COUNTER, "kvforge_prefix_hit_tokens_total", _count(HIT)),
    _metric("external_prefix_cache_hits_total", COUNTER, "kvforge_host_hit_tokens_total", _found),
    _metric(
        "kv_offload_total_bytes_total",
        COUNTER,
        "kvforge_host_saved_bytes_total and kvforge_host_loaded_bytes_total",
        _moved,
        "transfer_type",
    ),
    _metric("num_preemptions_total", COUNTER, "kvforge_preemptions_total", _count(PREEMPTED)),
    _metric("spec_decode_num_drafts_total", COUNTER, "kvforge_drafts_total", _gauge("drafts_total")),
    _metric(
        "spec_decode_num_draft_tokens_total",
        COUNTER,
        "kvforge_drafted_tokens_total",
        _gauge("drafted_tokens_total"),
    ),
    _metric(
        "spec_decode_num_accepted_tokens_total",
        COUNTER,
        "kvforge_accepted_drafts_total",
        _gauge("accepted_drafts_total"),
    ),
    _metric("prompt_tokens_total", COUNTER, "kvforge_prefilled_tokens_total", _count(PREFILLED)),
    _metric(
        "generation_tokens_total",
        COUNTER,
        "kvforge_generated_tokens_total",
        lambda snapshot: [(_labels(snapshot), tokens(snapshot.all))],
    ),
    _metric("request_success_total", COUNTER, "kvforge_requests_ended_total", _success, "finished_reason"),
    _metric("time_to_first_token_seconds", HISTOGRAM, "kvforge_time_to_first_token_seconds", _spread(FIRST_TOKEN)),
    _metric("inter_token_latency_seconds", HISTOGRAM, "kvforge_inter_token_seconds", _spread(GAP)),
    _metric("e2e_request_latency_seconds", HISTOGRAM, "kvforge_request_seconds", _spread(WHOLE)),
    _metric("request_queue_time_seconds", HISTOGRAM, "kvforge_request_queue_seconds", _spread(QUEUE)),
    _metric("request_prefill_time_seconds", HISTOGRAM, "kvforge_request_prefill_seconds", _spread(PREFILL)),
    _metric("request_decode_time_seconds", HISTOGRAM, "kvforge_request_decode_seconds", _spread(DECODE)),
    _metric("request_prompt_tokens", HISTOGRAM, "kvforge_request_prompt_tokens", _spread(PROMPT_SIZE, 1)),
    _metric("request_generation_tokens", HISTOGRAM, "kvforge_request_generated_tokens", _spread(ANSWER_SIZE, 1)),
)
