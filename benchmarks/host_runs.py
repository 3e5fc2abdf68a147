"""How many neighbouring host blocks a copy of the host tier has, under a mixed load, and what the books cost.

    python -m benchmarks.host_runs [--file 8192] [--turns 3000] [--json FILE]

The cache of the coordinator without a machine around it: conversations of random tokens begin and go on, decode side
by side, and leave. Their lengths are between 4 and 512 blocks, evenly by magnitude; a turn adds 1 to 64 blocks of
prompt and 8 to 64 of answer. Half of the turns go on with one of the last conversations. The pool has a quarter of the
blocks of the file. Two loads:

- evicted: blocks are copied when the pool evicts them.
- written back: also up to eight blocks that a sequence filled, in steps that carry no other copies.

A worker makes a copy for each run of neighbouring host blocks inside a buffer of eight blocks and a locked piece of
sixteen, as with 2 MiB blocks. The blocks of a copy are averaged over a fresh file (the first half of its blocks), and
from when the file had been written ten times over. "random" is what the same copies have with host blocks at random
places. "wanted" is the share of the blocks of a prompt that pool or file had, where they could have it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

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

BLOCK_SIZE, VOCABULARY, SALT = 16, 32_000, 5
BUFFER_BLOCKS, PIECE_BLOCKS = 8, 16
ROWS, LONGEST, TURN_MOST, ANSWER, AGAIN = 16, 512, 64, (8, 64), 128
STEPS_OF_BLOCK = 4  # steps of the benchmark in which a row fills a block: a quarter of the real number
FRESH, AGED = 0.5, 10.0  # blocks written, in files
Contents = npt.NDArray[np.int32]


class Row:
    """A conversation that decodes: its blocks on the device, its contents, and how many of these it has filled."""

    def __init__(self, ids: npt.NDArray[np.int64], contents: Contents, filled: int, chain: int) -> None:
        self.ids, self.contents, self.filled, self.chain = ids, contents, filled, chain


class Load:
    """Rows over one pool and one file."""

    def __init__(self, file_blocks: int, writeback: int) -> None:
        count = file_blocks // 4
        limits, clock, waits = Limits(), Clock(0), Waits()
        blocks, tenants = Blocks(count, BLOCK_SIZE, 0), Tenants(limits)
        self._hasher = BlockHasher(BLOCK_SIZE, b"benchmark", count)
        self._index = PrefixCache(PrefixStore(count, BLOCK_SIZE), blocks, waits, self._hasher)
        self._pool = BlockPool(clock, blocks, tenants, waits, self._index, 1, 0, count)
        tier = HostTiers(1, count, tenants).attach("file", file_blocks, 1, new=True)
        self._copies = self._pool.eviction.host = HostCopies(tier, self._index, blocks, 0, count)
        self._pool.writeback = HostWriteback(self._copies, writeback)
        self._sequences, self._tenant, self._step = Sequences(clock, limits, waits, 0), tenants.intern("default"), 0
        self._rng = np.random.default_rng(1)
        self._rows: list[Row] = []
        self._before: list[Contents] = []
        self._copied: dict[str, list[tuple[int, int, int]]] = {"to host": [], "from host": []}
        self.found = self.possible = self.books_ns = 0
        self.tier = tier

    def begin_row(self) -> bool:
        """Start a turn, if the pool has room for it."""
        rng = self._rng
        again = bool(self._before) and rng.random() < 0.5
        known = self._before[int(rng.integers(len(self._before)))] if again else np.zeros((0, BLOCK_SIZE), np.int32)
        new = int(rng.integers(1, TURN_MOST + 1)) if again else int(4 * (LONGEST / 4) ** rng.random())
        contents = np.concatenate([known, self._random(new)])[: 2 * LONGEST]
        values, tokens, pool = self._hasher.chain(SALT, contents.reshape(-1)), contents.reshape(-1), self._pool
        hits = self._index.match(SALT, tokens, values).astype(np.int64)
        answer = int(rng.integers(*ANSWER))
        if pool.available(self._tenant, hits) < len(contents) - hits.size + ROWS * ANSWER[1]:
            return False
        begun = perf_counter_ns()
        nodes = self._copies.match(SALT, tokens, values, hits.size, len(contents))
        self._copies.hold(nodes)
        pool.hold(hits)
        fresh = pool.allocate(self._tenant, len(contents) - hits.size)
        at = hits.size + len(nodes)
        if nodes:
            self._copies.load(len(self._rows), nodes, fresh[: len(nodes)].tolist(), 0)
            self._copies.forget(len(self._rows))
        self.books_ns += perf_counter_ns() - begun
        parent = int(self._index.keys(hits[-1:])[0]) if hits.size else root_key(SALT)
        chain = index_run(pool, fresh, parent, values[hits.size :], contents[hits.size :])
        if again:
            self.found, self.possible = self.found + min(at, len(known)), self.possible + len(known)
        self._rows.append(
            Row(np.concatenate([hits, fresh]), np.concatenate([contents, self._random(answer)]), len(contents), chain)
        )
        return True

    def _random(self, blocks: int) -> Contents:
        return self._rng.integers(0, VOCABULARY, (blocks, BLOCK_SIZE)).astype(np.int32)

    def step(self) -> None:
        """Fill blocks of some rows, send the copies, and end the step before the next one begins."""
        pool, copies = self._pool, self._copies
        self._step += 1
        for row in list(self._rows):
            if self._rng.random() < 1 / STEPS_OF_BLOCK:
                self._grow(row)
        begun = perf_counter_ns()
        if pool.writeback is not None:
            pool.writeback.order(pool.parts)
        carried = copies.flush(self._step)
        copies.step_done(self._step, self._sequences)
        self.books_ns += perf_counter_ns() - begun
        for way, numbers in zip(self._copied, carried[:2], strict=True):
            if numbers.size:
                hosts = numbers.reshape(-1, 4)[:, 1]
                elsewhere = self._rng.permutation(self.tier.total)[: hosts.size]
                one = (hosts.size, copies_of(hosts), copies_of(elsewhere))
                self._copied[way].append(one)

    def _grow(self, row: Row) -> None:
        """Fill one block of a row, or end it."""
        pool = self._pool
        if row.filled == len(row.contents):
            pool.release(row.ids, 0)
            self._before = [*self._before, row.contents][-AGAIN:]
            self._rows.remove(row)
            return
        begun = perf_counter_ns()
        ids = pool.allocate(self._tenant, 1)
        self.books_ns += perf_counter_ns() - begun
        contents = row.contents[row.filled]
        value = self._hasher.chain(SALT, row.contents[: row.filled + 1].reshape(-1))[-1:]
        row.chain = index_run(pool, ids, row.chain, value, contents[None])
        row.ids, row.filled = np.concatenate([row.ids, ids]), row.filled + 1

    def run(self, turns: int) -> dict[str, Any]:
        """Run so many turns; return the blocks of a copy by direction and age of the file, and the costs."""
        begun = 0
        marks: dict[str, int] = {}
        while begun < turns:
            while len(self._rows) < ROWS and begun < turns and self.begin_row():
                begun += 1
            self.step()
            written = self.tier.saved_total / self.tier.total
            for name, files in (("fresh", FRESH), ("aged", AGED)):
                if written >= files and name not in marks:
                    marks[name] = self._step
                    marks[f"{name} to host"] = len(self._copied["to host"])
                    marks[f"{name} from host"] = len(self._copied["from host"])
        if "aged" not in marks:
            raise SystemExit(f"the file was written {written:.1f} times over, not {AGED}: more --turns")
        found: dict[str, Any] = {}
        for way, copied in self._copied.items():
            ages = {"fresh": copied[: marks[f"fresh {way}"]], "aged": copied[marks[f"aged {way}"] :]}
            for age, rows in ages.items():
                blocks, ours, elsewhere = np.array(rows, np.int64).reshape(-1, 3).sum(0).tolist()
                found[f"{way}, {age}"] = {
                    "blocks": blocks,
                    "of a copy": round(blocks / max(1, ours), 2),
                    "random": round(blocks / max(1, elsewhere), 2),
                }
        return found | {
            "wanted": round(self.found / self.possible, 4),
            "files_written": round(written, 1),
            "us_of_a_block": round(self.books_ns / 1e3 / (self.tier.saved_total + self.tier.loaded_total), 2),
        }


def aged_places(count: int) -> list[int]:
    """Return host blocks as the coordinator gives them in a file of 2 * count blocks that was written ten times over.

    Chains of 4 to 512 blocks, or at most a quarter of the file, are written one after the other; one of the last is
    used again before every third. The places are those of the last `count` blocks, each chain by host blocks, as steps
    carry them.
    """
    tier, rng = HostTiers(1, 4 * count).new("file", 2 * count), np.random.default_rng(3)
    most = max(5, min(LONGEST, count // 2))
    chains: list[list[int]] = []
    places: list[int] = []
    while tier.saved_total < AGED * tier.total + count:
        blocks, nodes, parent = int(4 * (most / 4) ** rng.random()), list[int](), -1 - len(chains)
        for place in range(blocks):
            value = len(chains) << 20 | place
            node = tier.add(parent, value, value.to_bytes(4 * BLOCK_SIZE, "little"))
            assert node is not None
            nodes.append(node)
            parent = node
        if len(chains) % 3 == 2:
            for node in reversed(chains[-1 - int(rng.integers(min(8, len(chains))))]):
                if node in tier.nodes:
                    tier.use(node)
        assert tier.give_blocks(nodes[::-1], [0] * blocks, backwards=True) == blocks
        for node in reversed(nodes):
            tier.written(node)
        chains.append(nodes)
        places += sorted(tier.nodes[node].block for node in nodes)
    last = dict.fromkeys(reversed(places))  # the latest chain of a block
    return list(last)[:count][::-1]


def copies_of(hosts: npt.NDArray[np.integer[Any]]) -> int:
    """Return how many copies a worker makes for host blocks in this order, [n]."""
    apart = np.diff(hosts, prepend=-2) != 1
    apart[::BUFFER_BLOCKS] = True
    apart |= hosts % PIECE_BLOCKS == 0
    return int(np.count_nonzero(apart))


def main() -> int:
    """Print the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=int, default=8192, help="blocks of the file [8192]")
    parser.add_argument("--turns", type=int, default=3000, help="turns of conversations [3000]")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    gc.disable()
    results: dict[str, Any] = {"file_blocks": options.file, "turns": options.turns}
    rows: list[tuple[str, ...]] = []
    for name, writeback in (("evicted", 0), ("written back", 8)):
        one = results[name] = Load(options.file, writeback).run(options.turns)
        for key, value in one.items():
            if isinstance(value, dict):
                rows.append((f"{name}, {key}", str(value["blocks"]), str(value["of a copy"]), str(value["random"])))
            else:
                rows.append((f"{name}, {key.replace('_', ' ')}", "", str(value), ""))
    report(
        "host tier: neighbouring blocks that one copy moves",
        ("load", "blocks", "blocks of a copy", "random places"),
        rows,
        results,
        options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
