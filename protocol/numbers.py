"""The numbers in the shared tables: gauges, and what is counted by tenant and by pool (`meters`).

All of them are of one instant. A counter is odd while they are written; a reader that found it odd, or another one
after it had copied them, copies them again.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import DeadlineExceeded
from .layout import GAUGES, PAGE_BYTES
from .messages import Int64Array
from .meters import POOL_COUNTS, Facts

READ_WAIT_S = 1.0
SPINS_MAX = 32
COUNTS = struct.Struct(f"<{len(POOL_COUNTS)}q")
VALUES = struct.Struct(f"<q{len(GAUGES)}q")  # when they were written, and what they are

Views = dict[str, npt.NDArray[Any]]
Copied = TypeVar("Copied")


class Numbers(NamedTuple):
    """Everything, of one instant.

    tenants: [TENANT_ROWS + 1, TENANT_CELLS] int64; tenant_blocks: [TENANT_ROWS + 1] int64, the blocks that each is
    charged for; pools: [pools, POOL_CELLS] int64. age_s: how long ago the coordinator wrote them; it does so every
    second at least.
    """

    gauges: dict[str, int]
    tenants: Int64Array
    tenant_blocks: Int64Array
    pools: Int64Array
    facts: Facts
    age_s: float


class NumbersWriter:
    """The coordinator's side. Arrays are as in `Numbers`, and written between begin() and finish()."""

    def __init__(self, memory: mmap.mmap, views: Views) -> None:
        self._memory, self._version = memory, views["gauges"][:1]
        self.tenants: Int64Array = views["tenants"]
        self.tenant_blocks: Int64Array = views["tenant_blocks"]
        self.pools: Int64Array = views["pool_counts"]
        self._pools = [row.data for row in self.pools]
        self._facts: npt.NDArray[np.uint8] = views["facts"]
        self._number = 0
        self.facts(Facts())
        self.finish([0] * len(GAUGES))

    def begin(self) -> None:
        """From here on they are being written, until finish()."""
        if not self._number & 1:
            self._number += 1
            self._version[0] = self._number

    def pool(self, number: int, counts: Sequence[int], times: Int64Array) -> None:
        """A pool's row. counts: in the order of meters.POOL_COUNTS; times: the cells of its steps."""
        COUNTS.pack_into(self._pools[number], 0, *counts)
        self.pools[number, len(POOL_COUNTS) :] = times

    def facts(self, facts: Facts) -> None:
        """What is no number; of more workers than there is room for, only the names and the states."""
        self.begin()
        data = msgspec.msgpack.encode(facts)
        if len(data) > self._facts.size - 8:
            bare = [msgspec.structs.replace(worker, device_bytes={}) for worker in facts.workers]
            data = msgspec.msgpack.encode(msgspec.structs.replace(facts, workers=bare))
        whole = len(data).to_bytes(8, "little") + data
        self._facts[: len(whole)] = np.frombuffer(whole, np.uint8)

    def finish(self, gauges: Sequence[int]) -> None:
        """The gauges, in the order of layout.GAUGES; all is written now."""
        self.begin()
        VALUES.pack_into(self._memory, PAGE_BYTES + 8, time.monotonic_ns(), *gauges)  # numpy would make an array first
        self._number += 1
        self._version[0] = self._number


class NumbersReader:
    """Everyone else's side."""

    def __init__(self, views: Views) -> None:
        self._gauges: Int64Array = views["gauges"]
        self._rest = [views[name] for name in ("tenants", "tenant_blocks", "pool_counts")]
        self._facts: npt.NDArray[np.uint8] = views["facts"]

    def gauges(self) -> dict[str, int]:
        """One consistent set of the coordinator's gauges. Raises DeadlineExceeded."""
        values = self._whole(lambda: self._gauges[2:].tolist())
        return dict(zip(GAUGES, values, strict=True))

    def all(self) -> Numbers:
        """Every number, of one instant. Raises DeadlineExceeded."""
        (written_ns, *gauges), tenants, blocks, pools, facts = self._whole(self._copy)
        age_s = max(0.0, (time.monotonic_ns() - written_ns) / 1e9)
        named = dict(zip(GAUGES, gauges, strict=True))
        return Numbers(named, tenants, blocks, pools, msgspec.msgpack.decode(facts, type=Facts), age_s)

    def _copy(self) -> tuple[list[int], Int64Array, Int64Array, Int64Array, bytes]:
        size = int.from_bytes(self._facts[:8].tobytes(), "little")
        tenants, blocks, pools = (array.copy() for array in self._rest)
        return self._gauges[1:].tolist(), tenants, blocks, pools, self._facts[8 : 8 + size].tobytes()

    def _whole(self, copy: Callable[[], Copied]) -> Copied:
        for _ in attempts():
            version = int(self._gauges[0])
            if version & 1 == 0:
                copied = copy()
                if int(self._gauges[0]) == version:
                    return copied
        raise DeadlineExceeded("the gauges of the shared tables are being written without end")


def attempts() -> Iterator[None]:
    """Tries again at once while the writer is at work, then lets it have the core, until READ_WAIT_S is over."""
    deadline = time.monotonic() + READ_WAIT_S
    for attempt in itertools.count():
        yield
        if attempt >= SPINS_MAX:
            if time.monotonic() >= deadline:
                return
            os.sched_yield()
