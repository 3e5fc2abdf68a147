"""Cost of write-back in the coordinator, for each block of a long sequence and a full host file.

    python -m benchmarks.host_writeback [--tokens 32768] [--json FILE]

A sequence fills its blocks one after the other, and each is ordered to the host as it comes (`HostWriteback.order`,
`HostCopies.flush`, `HostCopies.step_done`). The file has twice its blocks, all with entries of others. One
process, nothing else of kvforge running, and the garbage collector off, as in the coordinator's loop.
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

BLOCK_SIZE = 16
SHARES = 4  # of the sequence that are reported


def measured(tokens: int) -> dict[str, Any]:
    """Return the median microseconds of a block, for each part of the sequence."""
    count = tokens // BLOCK_SIZE
    limits, clock, waits = Limits(), Clock(0), Waits()
    blocks, tenants = Blocks(count, BLOCK_SIZE, 0), Tenants(limits)
    hasher = BlockHasher(BLOCK_SIZE, b"benchmark", count)
    index = PrefixCache(PrefixStore(count, BLOCK_SIZE), blocks, waits, hasher)
    pool = BlockPool(clock, blocks, tenants, waits, index, 1, 0, count)
    tier = HostTiers(1, count, tenants).attach("file", 2 * count, 1)
    copies = HostCopies(tier, index, blocks, 0, count)
    pool.eviction.host, pool.writeback = copies, HostWriteback(copies, 1)
    sequences = Sequences(clock, limits, waits, 0)
    for value in range(2 * count):  # entries of others, each of one block
        node = tier.add(root_key(7), (1 << 63) + value, value.to_bytes(4 * BLOCK_SIZE, "little"))
        assert node is not None and tier.give_block(node)
        tier.written(node)
    ids = pool.allocate(tenants.intern("default"), count)
    contents = np.random.default_rng(1).integers(0, 1000, (count, BLOCK_SIZE)).astype(np.int32)
    values = hasher.chain(5, contents.reshape(-1))
    parent, took_us = root_key(5), np.zeros(count)
    for number in range(count):
        parent = index_run(pool, ids[number : number + 1], parent, values[number : number + 1], contents[number, None])
        begun = perf_counter_ns()
        pool.writeback.order(pool.parts)
        copies.flush(number + 1)
        copies.step_done(number + 1, sequences)
        took_us[number] = (perf_counter_ns() - begun) / 1e3
    assert tier.saved_total == 3 * count, "a block was not written back"
    parts = np.array_split(took_us, SHARES)
    ends = np.cumsum([part.size for part in parts]) * BLOCK_SIZE
    return {
        "blocks": count,
        "median_us_by_tokens_before": {
            int(end): round(statistics.median(part.tolist()), 1) for end, part in zip(ends, parts, strict=True)
        },
        "total_ms": round(float(took_us.sum()) / 1e3, 1),
    }


def main() -> int:
    """Print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_writeback", description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the sequence [32768]")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    gc.disable()
    results = measured(options.tokens)
    rows = [(end, took_us) for end, took_us in results["median_us_by_tokens_before"].items()]
    rows.append(("total, ms", results["total_ms"]))
    title = "write-back of a long sequence: what each block costs in the coordinator"
    report(title, ("up to token", "median us of a block"), rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
