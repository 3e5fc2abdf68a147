"""The numbers of one instant, as a caller may see them, and what a metric is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.meters import FIRST_TOKEN, GAP, OTHERS, Distribution, WorkerFacts
from kvforge.protocol.numbers import Numbers

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
OTHER = "other"
MICRO = 1e6
Cells = npt.NDArray[np.int64]


class Buckets(NamedTuple):
    """A histogram: values up to each bound, and the sum of all."""

    cumulative: list[tuple[str, float]]
    total: float


Sample = tuple[tuple[str, ...], float | Buckets]


class Told:
    """The numbers of one instant, as a caller may see them. tenants: (name, cells, blocks) of each; one without a name
    for all together where names are not for the caller."""

    def __init__(self, numbers: Numbers, *, names: bool) -> None:
        self.gauges, self.facts, self.age_s, self.pools = numbers.gauges, numbers.facts, numbers.age_s, numbers.pools
        self.all: Cells = numbers.tenants.sum(axis=0)
        rows: dict[str, list[int]] = {}
        if names:
            for row, name in enumerate(numbers.facts.tenants, 1):
                rows.setdefault(name, []).append(row)
            if numbers.tenants[OTHERS].any() or numbers.tenant_blocks[OTHERS]:
                rows.setdefault(OTHER, []).append(OTHERS)
        else:
            rows[""] = list(range(len(numbers.tenants)))
        self.tenants = [
            (name, numbers.tenants[own].sum(axis=0), int(numbers.tenant_blocks[own].sum()))
            for name, own in rows.items()
        ]

    def workers(self) -> Iterator[tuple[WorkerFacts, Cells]]:
        """Those that have a pool, with its row."""
        for worker in self.facts.workers:
            if worker.pool >= 0:
                yield worker, self.pools[worker.pool]


@dataclass(frozen=True, slots=True)
class Metric:
    """kind: gauge, counter or histogram. text: what it means. read: its samples. same: of one that is vLLM's, ours."""

    name: str
    kind: str
    text: str
    read: Callable[[Told], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    same: str = ""


def buckets(cells: Cells, what: Distribution, scale: float) -> Buckets:
    """What a row has of a distribution. scale: how many of its units are one of the metric's."""
    counts = np.cumsum(cells[what.start : what.total]).tolist()
    bounds = [*(str(bound / scale) for bound in what.bounds), "+Inf"]
    return Buckets(list(zip(bounds, counts, strict=True)), int(cells[what.total]) / scale)


def tokens(cells: Cells) -> int:
    """Each token is the first of its request, or comes some time after another one."""
    return sum(int(cells[what.start : what.total].sum()) for what in (FIRST_TOKEN, GAP))


def usage(told: Told) -> float:
    """The part of all blocks that could not be handed out now."""
    blocks = told.gauges["blocks_total"]
    used = told.gauges["blocks_referenced"] + told.gauges["blocks_quarantined"]
    return used / blocks if blocks else 0.0
