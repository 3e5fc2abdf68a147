"""One snapshot of the metrics, filtered for a caller, and the definition of a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.meters import FIRST_TOKEN, GAP, OTHERS, Distribution, WorkerInfo
from kvforge.protocol.service_metrics import ServiceMetrics

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
OTHER = "other"
MICRO = 1e6
Cells = npt.NDArray[np.int64]


class Buckets(NamedTuple):
    """A histogram: cumulative counts by upper bound, and the sum of all values."""

    cumulative: list[tuple[str, float]]
    total: float


Sample = tuple[tuple[str, ...], float | Buckets]


class MetricsSnapshot:
    """One snapshot of the metrics, as a caller may see it.

    Attributes:
        tenants: (name, cells, blocks by tier) of each tenant; a single entry with an empty name if `names` is False.
    """

    def __init__(self, metrics: ServiceMetrics, *, names: bool) -> None:
        self.gauges, self.facts, self.age_s, self.pools = metrics.gauges, metrics.facts, metrics.age_s, metrics.pools
        self.all: Cells = metrics.tenants.sum(axis=0)
        rows: dict[str, list[int]] = {}
        if names:
            for row, name in enumerate(metrics.facts.tenants, 1):
                rows.setdefault(name, []).append(row)
            if metrics.tenants[OTHERS].any() or metrics.tenant_blocks[OTHERS].any():
                rows.setdefault(OTHER, []).append(OTHERS)
        else:
            rows[""] = list(range(len(metrics.tenants)))
        self.tenants = [
            (name, metrics.tenants[own].sum(axis=0), metrics.tenant_blocks[own].sum(axis=0))
            for name, own in rows.items()
        ]

    def workers(self) -> Iterator[tuple[WorkerInfo, Cells]]:
        """Yield each worker that has a pool, with the pool's row."""
        for worker in self.facts.workers:
            if worker.pool >= 0:
                yield worker, self.pools[worker.pool]


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric.

    Attributes:
        name: The name in Prometheus.
        kind: gauge, counter or histogram.
        text: The help text.
        read: Returns its samples.
        labels: The names of its labels.
        same: Our metric that a vLLM name stands for.
    """

    name: str
    kind: str
    text: str
    read: Callable[[MetricsSnapshot], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    same: str = ""


def buckets(cells: Cells, what: Distribution, scale: float) -> Buckets:
    """Return a distribution of a row.

    Args:
        cells: The row.
        what: The distribution.
        scale: Recorded units per unit of the metric.
    """
    counts = np.cumsum(cells[what.start : what.total]).tolist()
    bounds = [*(str(bound / scale) for bound in what.bounds), "+Inf"]
    return Buckets(list(zip(bounds, counts, strict=True)), int(cells[what.total]) / scale)


def tokens(cells: Cells) -> int:
    """Return the generated tokens of a row: a token is either the first of its request or follows a gap."""
    return sum(int(cells[what.start : what.total].sum()) for what in (FIRST_TOKEN, GAP))


def usage(snapshot: MetricsSnapshot) -> float:
    """Return the share of blocks that are not available for allocation."""
    blocks = snapshot.gauges["blocks_total"]
    used = snapshot.gauges["blocks_referenced"] + snapshot.gauges["blocks_quarantined"]
    return used / blocks if blocks else 0.0
