"""Naive models of the core's parts: lists and dicts, one obvious statement per rule, slow on purpose."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from kvforge.coordinator.core.cache.hashing import BlockHasher, Hashes


class Refused(Exception):
    """The naive model has no room either."""


class NaivePool:
    """Blocks with holders, an LRU cache, a quarantine, and quotas; tenants are small integers."""

    def __init__(self, count: int, floors: dict[int, int], ceilings: dict[int, int]) -> None:
        self.free = set(range(count))
        self.holders: dict[int, int] = {}
        self.cached: list[int] = []
        self.quarantined: set[int] = set()
        self.queue: list[list[int]] = []
        self.touch: dict[int, int] = {}
        self.owner: dict[int, int] = {}
        self.indexed: set[int] = set()
        self.settled = 0
        self.floors, self.ceilings = floors, ceilings

    def usage(self, tenant: int) -> int:
        return sum(owner == tenant for owner in self.owner.values())

    def evict(self, tenant: int, block: int) -> None:
        self.cached.remove(block)
        self.indexed.discard(block)
        self.to_free(block)

    def to_free(self, block: int) -> None:
        del self.owner[block]
        self.free.add(block)

    def make_room(self, tenant: int, count: int) -> None:
        """Evict until `count` blocks fit.

        A tenant at its ceiling evicts its own blocks; otherwise the least recently used block above every floor goes.
        """
        while self.usage(tenant) + count > self.ceilings.get(tenant, 1 << 60):
            own = [block for block in self.cached if self.owner[block] == tenant]
            if not own:
                raise Refused
            self.evict(tenant, own[0])
        others = [t for t in self.floors if t != tenant]
        while len(self.free) - sum(max(0, self.floors[t] - self.usage(t)) for t in others) < count:
            allowed = [
                block
                for block in self.cached
                if self.owner[block] == tenant or self.usage(self.owner[block]) > self.floors.get(self.owner[block], 0)
            ]
            if not allowed:
                raise Refused
            self.evict(tenant, allowed[0])

    def available(self, tenant: int) -> int:
        for count in range(len(self.free) + len(self.cached), 0, -1):
            try:
                copy.deepcopy(self).make_room(tenant, count)
            except Refused:
                continue
            return count
        return 0

    def allocate(self, tenant: int, ids: list[int]) -> None:
        """Take the blocks that the pool chose; they must be free after making room."""
        self.make_room(tenant, len(ids))
        for block in ids:
            self.free.remove(block)
            self.holders[block] = 1
            self.owner[block] = tenant
            self.touch.setdefault(block, 0)

    def hold(self, block: int) -> None:
        if block in self.cached:
            self.cached.remove(block)
        self.quarantined.discard(block)
        self.holders[block] = self.holders.get(block, 0) + 1

    def release(self, ids: list[int], step: int) -> int:
        dead = []
        for block in ids:
            self.touch[block] = max(self.touch[block], step)
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                dead.append(block)
        waiting = [block for block in dead if self.touch[block] > self.settled]
        if waiting:
            self.quarantined |= set(waiting)
            self.queue.append(waiting)
        self.rest([block for block in dead if block not in waiting])
        return len(dead)

    def rest(self, ids: list[int]) -> None:
        for block in reversed(ids):
            if block in self.indexed:
                self.cached.append(block)
        for block in ids:
            if block not in self.indexed:
                self.to_free(block)

    def settle(self, step: int) -> None:
        self.settled = max(self.settled, step)
        queue, self.queue = self.queue, []
        for group in queue:
            held_back = [block for block in group if block in self.quarantined]
            over = [block for block in held_back if self.touch[block] <= self.settled]
            self.quarantined -= set(over)
            self.rest(over)
            self.queue.append([block for block in held_back if block not in over])


class NaiveTrie:
    """A prefix index without hashes: entries under their parent's key, by their tokens."""

    def __init__(self) -> None:
        self.children: dict[Any, dict[tuple[int, ...], tuple[Any, int]]] = {}

    def add(self, parent: Any, tokens: tuple[int, ...], key: Any, block: int) -> Any:
        return self.children.setdefault(parent, {}).setdefault(tokens, (key, block))[0]

    def remove(self, block: int) -> None:
        for entries in self.children.values():
            for tokens in [tokens for tokens, (_, other) in entries.items() if other == block]:
                del entries[tokens]

    def match(self, root: Any, tokens: list[int], size: int) -> list[int]:
        found, parent = [], root
        for start in range(0, len(tokens) // size * size, size):
            entry = self.children.get(parent, {}).get(tuple(tokens[start : start + size]))
            if entry is None:
                break
            parent = entry[0]
            found.append(entry[1])
        return found


class NaiveBlock:
    """A block with its identity and the names of its holders."""

    def __init__(self, *holders: Any) -> None:
        self.holders = set(holders)


class NaiveSequences:
    """Sequences as lists of tokens over blocks with holder names."""

    def __init__(self, count: int, size: int, length_max: int) -> None:
        self.count, self.size, self.length_max = count, size, length_max
        self.tokens: dict[int, list[int]] = {}
        self.table: dict[int, list[NaiveBlock]] = {}
        self.external: set[NaiveBlock] = set()

    def held(self) -> set[NaiveBlock]:
        return {block for table in self.table.values() for block in table} | self.external

    def need(self, count: int) -> None:
        if count > self.count - len(self.held()):
            raise Refused

    def create(self, tokens: list[int], sequence: int) -> None:
        blocks = -(-len(tokens) // self.size)
        if len(tokens) > self.length_max:
            raise Refused
        self.need(blocks)
        self.tokens[sequence] = list(tokens)
        self.table[sequence] = [NaiveBlock(sequence) for _ in range(blocks)]

    def append(self, pairs: list[tuple[int, list[int]]]) -> None:
        """Append all or nothing; a shared block is copied before a write, except for its last holder."""
        if any(len(self.tokens[sequence]) + len(tokens) > self.length_max for sequence, tokens in pairs):
            raise Refused
        plans, left = [], {}
        for sequence, tokens in pairs:
            length, table = len(self.tokens[sequence]), self.table[sequence]
            holders = left.get(table[-1], len(table[-1].holders)) if length % self.size else 0
            shared = holders > 1
            if shared:
                left[table[-1]] = holders - 1
            more = -(-(length + len(tokens)) // self.size) - len(table)
            plans.append((sequence, tokens, shared, more))
        self.need(sum(shared + more for _, _, shared, more in plans))
        for sequence, tokens, shared, more in plans:
            table = self.table[sequence]
            if shared:
                table[-1].holders.remove(sequence)
                table[-1] = NaiveBlock(sequence)
            table += [NaiveBlock(sequence) for _ in range(more)]
            self.tokens[sequence] += tokens

    def fork(self, sequence: int, child: int) -> None:
        self.tokens[child] = list(self.tokens[sequence])
        self.table[child] = list(self.table[sequence])
        for block in self.table[child]:
            block.holders.add(child)

    def remove(self, sequence: int) -> int:
        del self.tokens[sequence]
        for block in (table := self.table.pop(sequence)):
            block.holders.remove(sequence)
        return sum(not block.holders for block in table)

    def ref(self, block: NaiveBlock, holder: str) -> None:
        if holder in block.holders:
            raise Refused
        block.holders.add(holder)
        self.external.add(block)

    def unref(self, block: NaiveBlock, holder: str) -> None:
        if holder not in block.holders:
            raise Refused
        block.holders.remove(holder)
        if not any(isinstance(name, str) for name in block.holders):
            self.external.discard(block)


class WeakHasher(BlockHasher):
    """Chained hashes with few distinct values, so that most chains collide."""

    distinct = 3

    def extend(self, chains: Hashes, tokens: Any) -> Hashes:
        return (chains * np.uint64(31) + tokens.astype(np.uint64).sum(axis=1)) % np.uint64(self.distinct)

    def chain(self, start: int, tokens: Any) -> Hashes:
        value, values = np.array([start], np.uint64), []
        for i in range(tokens.size // self._block_size):
            value = self.extend(value, tokens[None, i * self._block_size : (i + 1) * self._block_size])
            values.append(int(value[0]))
        return np.array(values, np.uint64)


def live_tokens(cache: Any, group: Any, tenant: int = 0) -> int:
    """Count filled token slots in held blocks, block by block; `statistics.live_tokens` must agree."""
    s, size = cache.sequences, cache.blocks.block_size
    filled: dict[int, int] = {}
    for slot in s.slot_of.values():
        if s.pool[slot] == group.number:
            for column, block in enumerate(s.blocks_of(slot).tolist()):
                inside = min(max(int(s.length[slot]) - column * size, 0), size)
                filled[block] = max(filled.get(block, 0), inside)
    for block in cache.blocks.external:
        if group.pool.base <= block < group.pool.base + group.pool.count and cache.blocks.indexed[block]:
            filled[block] = size
    return sum(count for block, count in filled.items() if not tenant or cache.blocks.owner[block] == tenant)
