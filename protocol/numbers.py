"""The numbers in the shared tables: what is counted by tenant and pool (`meters`), and the gauges of the same moment.

A counter is odd while they are written; a reader that found it odd, or another one after it had copied them, copies
them again.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from . import steady_clock
from .errors import DeadlineExceeded
from .layout import GAUGES
from .messages import Int64Array
from .meters import POOL_COUNTS, Facts

READ_WAIT_S = 1.0
SPINS_MAX = 32
LENGTH_BYTES = 8
NEVER_US = -(1 << 62)
Views = dict[str, npt.NDArray[Any]]
Copied = TypeVar("Copied")


class Numbers(NamedTuple):
    """Everything, of one instant.

    tenants: [TENANT_ROWS + 1, TENANT_CELLS] int64; tenant_blocks: [TENANT_ROWS + 1] int64, the blocks that each is
    charged for; pools: [pools, POOL_CELLS] int64. age_s: how long ago the coordinator wrote them, which it does every
    second at least.
    """

    gauges: dict[str, int]
    tenants: Int64Array
    tenant_blocks: Int64Array
    pools: Int64Array
    facts: Facts
    age_s: float


class NumbersWriter:
    """The coordinator's side. Arrays are as in `Numbers`, and written between begin() and finish().

    written_us: when that was last, on the coordinator's clock.
    """

    def __init__(self, views: Views) -> None:
        self._head: Int64Array = views["numbers"]
        self.tenants: Int64Array = views["tenants"]
        self.tenant_blocks: Int64Array = views["tenant_blocks"]
        self.pools: Int64Array = views["pool_counts"]
        self._facts: npt.NDArray[np.uint8] = views["facts"]
        self.begin()
        self.facts(Facts())
        self.finish(NEVER_US, [0] * len(GAUGES))

    def begin(self) -> None:
        """From here on they are being written, until finish()."""
        self._head[0] += 1

    def pool(self, number: int, counts: Sequence[int], times: Sequence[int]) -> None:
        """A pool's row. counts: in the order of meters.POOL_COUNTS; times: the cells of its steps."""
        row = self.pools[number]
        row[: len(POOL_COUNTS)] = counts
        row[len(POOL_COUNTS) :] = times

    def facts(self, facts: Facts) -> None:
        """What is no number. There is room for as many workers as pools, whatever they may say of themselves."""
        data = msgspec.msgpack.encode(facts)
        whole = len(data).to_bytes(LENGTH_BYTES, "little") + data
        assert len(whole) <= self._facts.size, "facts are longer than they may be"
        self._facts[: len(whole)] = np.frombuffer(whole, np.uint8)

    def finish(self, now_us: int, gauges: Sequence[int]) -> None:
        """All is written. gauges: in the order of layout.GAUGES."""
        self._head[1] = time.monotonic_ns()
        self._head[2:] = gauges
        self.written_us = now_us
        self._head[0] += 1


class NumbersReader:
    """Everyone else's side."""

    def __init__(self, views: Views) -> None:
        self._head: Int64Array = views["numbers"]
        self._rest = [views[name] for name in ("tenants", "tenant_blocks", "pool_counts")]
        self._facts: npt.NDArray[np.uint8] = views["facts"]

    def all(self) -> Numbers:
        """Every number, of one instant. Raises DeadlineExceeded."""
        looked_ns = time.monotonic_ns()  # before the copy: a reader that stands still after it makes nothing older
        (written_ns, *gauges), tenants, blocks, pools, facts = undisturbed(self._head, self._copy)
        age_s = max(0.0, (looked_ns - written_ns) / 1e9)
        named = dict(zip(GAUGES, gauges, strict=True))
        return Numbers(named, tenants, blocks, pools, msgspec.msgpack.decode(facts, type=Facts), age_s)

    def _copy(self) -> tuple[list[int], Int64Array, Int64Array, Int64Array, bytes]:
        size = int.from_bytes(self._facts[:LENGTH_BYTES].tobytes(), "little")
        tenants, blocks, pools = (array.copy() for array in self._rest)
        facts = self._facts[LENGTH_BYTES : LENGTH_BYTES + size].tobytes()
        return self._head[1:].tolist(), tenants, blocks, pools, facts


def undisturbed(version: Int64Array, copy: Callable[[], Copied]) -> Copied:
    """A copy of what nobody was writing meanwhile. version: [1 or more], of which the first is odd during a write.

    Raises DeadlineExceeded where the writer ended, or hangs, in the middle of it.
    """
    for _ in attempts():
        before = int(version[0])
        if before & 1 == 0:
            copied = copy()
            if int(version[0]) == before:
                return copied
    raise DeadlineExceeded("the gauges of the shared tables are being written without end")


def attempts() -> Iterator[None]:
    """Tries again at once while the writer is at work, then lets it have the core, until READ_WAIT_S is over."""
    deadline = steady_clock.monotonic() + READ_WAIT_S
    for attempt in itertools.count():
        yield
        if attempt >= SPINS_MAX:
            if steady_clock.monotonic() >= deadline:
                return
            os.sched_yield()
