"""Cost of a host tier in the coordinator, for each evicted block, where blocks are never wanted again.

    python -m benchmarks.host_eviction [--rows 64] [--json FILE]

Prompts of random tokens take the blocks of earlier ones: allocated, indexed and released, with the books of the copies
that a step carries. Without a host tier, with one that copies all blocks (`cache.host_learn_blocks = 0`), and with one
that has learned to skip them. The three take turns; the median of a prompt counts. One process, nothing else of
kvforge running, and the garbage collector off, as in the coordinator's loop.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.blocks import Blocks
from kvforge.coordinator.core.cache.hashing import BlockHasher
from kvforge.coordinator.core.cache.host_copies import HostCopies
from kvforge.coordinator.core.cache.host_tiers import HostTiers
from kvforge.coordinator.core.cache.host_writeback import HostWriteback
from kvforge.coordinator.core.cache.pool_indexing import index_run
from kvforge.coordinator.core.cache.prefix_cache import PrefixCache, PrefixStore, root_key
from kvforge.coordinator.core.cache.sequences import Sequences
from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.clock import Clock
from kvforge.coordinator.core.limits import Limits
from kvforge.coordinator.core.waits import Waits

from .report import report

BLOCK_SIZE, BLOCKS_OF_PROMPT, VOCABULARY, SALT = 16, 68, 32_000, 5
WINDOW = 1024
NO_TIER, COPIED, SKIPPED = WAYS = ("no host tier", "all blocks copied", "skipped")


class Pool:
    """A pool with room for `rows` prompts, and a file of twice its blocks."""

    def __init__(self, way: str, rows: int) -> None:
        count = rows * BLOCKS_OF_PROMPT
        limits, clock, waits = Limits(), Clock(0), Waits()
        blocks, tenants = Blocks(count, BLOCK_SIZE, 0), Tenants(limits)
        self._hasher = BlockHasher(BLOCK_SIZE, b"benchmark", count)
        index = PrefixCache(PrefixStore(count, BLOCK_SIZE), blocks, waits, self._hasher)
        self._pool = BlockPool(clock, blocks, tenants, waits, index, 1, 0, count)
        self._sequences, self._tenant, self._step = Sequences(clock, limits, waits, 0), tenants.intern("default"), 0
        self.copies: HostCopies | None = None
        if way != NO_TIER:
            tiers = HostTiers(1, count, tenants, None, WINDOW if way == SKIPPED else 0)
            tier = tiers.attach("file", 2 * count, 1)
            self.copies = self._pool.eviction.host = HostCopies(tier, index, blocks, 0, count)
            self._pool.writeback = HostWriteback(self.copies, 0)

    def prompt_us(self, contents: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> float:
        """Return the microseconds that one block of a prompt takes: [blocks, block size] int32."""
        values, pool = self._hasher.chain(SALT, contents.reshape(-1)), self._pool
        self._step += 1
        begun = perf_counter_ns()
        ids = pool.allocate(self._tenant, len(contents))
        if self.copies is not None:
            self.copies.flush(self._step)
        index_run(pool, ids, root_key(SALT), values, contents)
        if self.copies is not None:
            self.copies.due(self._step)
            self.copies.step_done(self._step, self._sequences)
        pool.release(ids, 0)
        return (perf_counter_ns() - begun) / 1e3 / len(contents)


def measured(rows: int) -> dict[str, float]:
    """Return the median microseconds of a block, by the way in which evicted blocks are handled."""
    pools = {way: Pool(way, rows) for way in WAYS}
    took_us: dict[str, list[float]] = {way: [] for way in WAYS}
    rng = np.random.default_rng(1)
    for number in range(rows * 8):
        contents = rng.integers(0, VOCABULARY, (BLOCKS_OF_PROMPT, BLOCK_SIZE)).astype(np.int32)
        for way, pool in pools.items():
            one = pool.prompt_us(contents)
            if number >= rows * 4:  # the pool, the file and the window are full
                took_us[way].append(one)
    copying = {way: pool.copies.tier.yields.overall.copying for way, pool in pools.items() if pool.copies is not None}
    assert copying == {COPIED: True, SKIPPED: False}, "the tier did not learn"
    return {way: round(statistics.median(times), 2) for way, times in took_us.items()}


def main() -> int:
    """Print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_eviction", description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="prompts that the pool has room for [64]")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    gc.disable()
    results: dict[str, Any] = {"rows": options.rows, "median_us_of_a_block": measured(options.rows)}
    rows = list(results["median_us_of_a_block"].items())
    report(
        "host tier: what an evicted block costs in the coordinator", ("way", "median us"), rows, results, options.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
