"""The metric families of one scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from kvforge.gateway.storage.totals import StorageTotals
from kvforge.protocol.service_metrics import ServiceMetrics

from .service import SERVICE
from .shared import (
    LINES_ANSWERED,
    LINES_FAILED,
    LINES_RUNNING,
    OPEN,
    OTHER_STATUS,
    PINS,
    PINS_REFUSED,
    RECEIVED,
    SECONDS,
    SENT,
    Counts,
)
from .snapshot import COUNTER, GAUGE, HISTOGRAM, Buckets, Metric, MetricsSnapshot
from .vllm import VLLM

UP = "kvforge_up"
GATEWAY = {
    UP: (GAUGE, "1 while the coordinator's process runs; the other metrics of the service are present only then.", ()),
    "kvforge_http_requests_total": (COUNTER, "Requests by path and status; 0 is any other status.", ("path", "status")),
    "kvforge_http_request_seconds": (
        HISTOGRAM,
        "Seconds from the head of a request to the end of its response.",
        ("path",),
    ),
    "kvforge_http_requests_open": (GAUGE, "Requests in progress, open streams included.", ()),
    "kvforge_http_ignored_fields_total": (
        COUNTER,
        "Fields and tools of requests that were ignored, as x-kvforge-ignored lists them.",
        ("path",),
    ),
    "kvforge_http_pins_total": (
        COUNTER,
        "Prefixes that `cache_control` with a ttl asked to pin, by outcome: pinned, refused.",
        ("outcome",),
    ),
    "kvforge_http_received_bytes_total": (COUNTER, "Bytes of request bodies.", ()),
    "kvforge_http_sent_bytes_total": (COUNTER, "Bytes of response bodies.", ()),
    "kvforge_batch_requests_total": (COUNTER, "Requests of batches by outcome: answered, failed.", ("outcome",)),
    "kvforge_batch_requests_running": (GAUGE, "Requests of batches that run.", ()),
    "kvforge_storage_up": (GAUGE, "1 while the database of stored objects answers.", ()),
    "kvforge_storage_documents": (GAUGE, "Stored objects of all tenants, such as responses and conversations.", ()),
    "kvforge_storage_bytes": (GAUGE, "Bytes of the stored objects.", ()),
    "kvforge_storage_in_progress": (GAUGE, "Stored objects in progress, such as background responses.", ()),
}


class Exposition:
    """Collector for one scrape, in the interface of prometheus_client's registries.

    Args:
        metrics: The coordinator's metrics; None while it does not run.
        counts: The gateway's own counts, if any.
        names: Whether the caller may see the names of tenants.
        serves: Whether this gateway reads a coordinator's tables at all.
        stored: The numbers of the storage, if there is one.
    """

    def __init__(
        self,
        metrics: ServiceMetrics | None,
        counts: Counts | None,
        *,
        names: bool,
        serves: bool = True,
        stored: StorageTotals | None = None,
    ) -> None:

        self._metrics, self._counts, self._names, self._serves = metrics, counts, names, serves
        self._stored = stored

    def collect(self) -> Iterator[Family]:
        """Yield every metric family, in a fixed order."""
        if self._serves:
            yield _family(UP, *GATEWAY[UP], samples=[((), float(self._metrics is not None))])
        if self._metrics is not None:
            snapshot = MetricsSnapshot(self._metrics, names=self._names)
            for metric in (*SERVICE, *(VLLM if snapshot.facts.model else ())):
                yield _read(metric, snapshot)
        if self._counts is not None:
            yield from _own(self._counts)
        if (stored := self._stored) is not None:
            yield _gauge("kvforge_storage_up", stored.up)
            if stored.up:
                yield _gauge("kvforge_storage_documents", stored.documents)
                yield _gauge("kvforge_storage_bytes", stored.size_bytes)
                yield _gauge("kvforge_storage_in_progress", stored.in_progress)


def names_of(metric: Metric | str, kind: str = "") -> tuple[str, ...]:
    """Return the series names of a metric; a histogram has three."""
    name, kind = (metric, kind) if isinstance(metric, str) else (metric.name, metric.kind)
    return tuple(name + end for end in ("_bucket", "_count", "_sum")) if kind == HISTOGRAM else (name,)


def _read(metric: Metric, snapshot: MetricsSnapshot) -> Family:
    return _family(metric.name, metric.kind, metric.text, metric.labels, metric.read(snapshot))


def _family(
    name: str, kind: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float | Buckets]]
) -> Family:
    if kind == HISTOGRAM:
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for values, found in samples:
            assert isinstance(found, Buckets), "a histogram has buckets"
            histogram.add_metric(values, found.cumulative, found.total)
        return histogram
    family = (GaugeMetricFamily if kind == GAUGE else CounterMetricFamily)(name, text, labels=labels)
    for values, value in samples:
        assert not isinstance(value, Buckets), "only a histogram has buckets"
        family.add_metric(values, value)
    return family


def _gauge(name: str, value: float) -> Family:
    return _family(name, *GATEWAY[name], samples=[((), float(value))])


def _own(counts: Counts) -> Iterator[Family]:
    total = counts.total()
    bounds = [*map(str, SECONDS), "+Inf"]
    requests: list[tuple[tuple[str, ...], float | Buckets]] = []
    seconds: list[tuple[tuple[str, ...], float | Buckets]] = []
    ignored: list[tuple[tuple[str, ...], float | Buckets]] = []
    for path in counts.paths:
        statuses = counts.by_status(total, path)
        requests += [
            ((path, str(status) if status != OTHER_STATUS else "0"), count) for status, count in statuses.items()
        ]
        if statuses:
            ignored.append(((path,), counts.ignored_fields(total, path)))
            cumulative, all_s = counts.seconds(total, path)
            seconds.append(((path,), Buckets(list(zip(bounds, cumulative, strict=True)), all_s)))
    values: dict[str, list[tuple[tuple[str, ...], float | Buckets]]] = {
        "kvforge_http_requests_total": requests,
        "kvforge_http_request_seconds": seconds,
        "kvforge_http_requests_open": [((), int(total[OPEN]))],
        "kvforge_http_ignored_fields_total": ignored,
        "kvforge_http_pins_total": [
            (("pinned",), int(total[PINS])),
            (("refused",), int(total[PINS_REFUSED])),
        ],
        "kvforge_http_received_bytes_total": [((), int(total[RECEIVED]))],
        "kvforge_http_sent_bytes_total": [((), int(total[SENT]))],
        "kvforge_batch_requests_total": [
            (("answered",), int(total[LINES_ANSWERED])),
            (("failed",), int(total[LINES_FAILED])),
        ],
        "kvforge_batch_requests_running": [((), int(total[LINES_RUNNING]))],
    }
    for name, samples in values.items():
        yield _family(name, *GATEWAY[name], samples=samples)
