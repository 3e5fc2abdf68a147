"""Random commands against naive models: the pool, the prefix index, sequences, and everything together."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvforge.coordinator.core.cache import kv_cache_manager
from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.blocks import CACHED, FREE, QUARANTINED, REFERENCED, Blocks
from kvforge.coordinator.core.cache.hashing import BlockHasher
from kvforge.coordinator.core.cache.pool_indexing import index_block, index_run
from kvforge.coordinator.core.cache.pool_invariants import check_pool
from kvforge.coordinator.core.cache.prefix_cache import PrefixCache, PrefixStore, root_key
from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.clock import Clock
from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.waits import Waits
from kvforge.protocol.errors import (
    AlreadyHolder,
    CapacityExceeded,
    KvforgeError,
    NotAHolder,
    QuotaExceeded,
    SequenceBusy,
)
from kvforge.protocol.messages import Cancel, Fork, RefBlock, UnrefBlock
from tests import amount
from tests.coordinator.driver import Driver, FakeWorker, continuation
from tests.coordinator.naive import NaiveBlock, NaivePool, NaiveSequences, NaiveTrie, Refused, WeakHasher
from tests.coordinator.test_pool import Flags
from tools.simulation.digest import digest, refusal_digest
from tools.simulation.limits import make_limits

TENANTS = st.sampled_from([1, 2, 3])


def run(examples: int, steps: int) -> settings:
    """Settings that run the same examples every time, fewer in `make test`."""
    return settings(
        derandomize=True,
        deadline=None,
        max_examples=amount.examples(examples),
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


# --------------------------------------------------------------------------------------------------------------- pool


# behaviours 13, 14, 16 and 22
class PoolMachine(RuleBasedStateMachine):
    """Pool against NaivePool: states, owners, eviction order, and the capacity of each tenant."""

    quotas: ClassVar[dict[str, Quota]] = {}
    count = 8

    def __init__(self) -> None:
        super().__init__()
        tenants = Tenants(make_limits(quotas=self.quotas, tenants_max=4))
        floors, ceilings = {}, {}
        for name in "abc":
            index = tenants.intern(name)
            quota = self.quotas.get(name, Quota())
            floors[index] = quota.floor
            if quota.ceiling:
                ceilings[index] = quota.ceiling
        blocks = Blocks(self.count, 4)
        self.pool = BlockPool(Clock(), blocks, tenants, Waits(), Flags(blocks), 1, 0, self.count)
        self.model = NaivePool(self.count, floors, ceilings)
        self.step = 0

    def some(self, data: st.DataObject, among: Any) -> list[int]:
        """Distinct blocks of a set."""
        return data.draw(st.lists(st.sampled_from(sorted(among)), min_size=1, max_size=4, unique=True))

    @rule(tenant=TENANTS, count=st.integers(0, 5))
    def allocate(self, tenant: int, count: int) -> None:
        before = digest(self.pool)
        try:
            ids = self.pool.allocate(tenant, count).tolist()
        except CapacityExceeded as error:
            assert digest(self.pool) == before
            assert count > self.model.available(tenant)
            usage, ceiling = self.model.usage(tenant), self.model.ceilings.get(tenant, 1 << 60)
            own = sum(self.model.owner[block] == tenant for block in self.model.cached)
            assert isinstance(error, QuotaExceeded) == (usage - own + count > ceiling)
            return
        assert len(set(ids)) == count
        self.model.allocate(tenant, ids)

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        usable = self.model.indexed & (set(self.model.cached) | self.model.quarantined) | set(self.model.holders)
        ids = self.some(data, usable)
        self.pool.hold(np.array(ids, np.int64))
        for block in ids:
            self.model.hold(block)

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data(), later=st.integers(-1, 2))
    def release(self, data: st.DataObject, later: int) -> None:
        ids = self.some(data, self.model.holders)
        step = max(0, self.step + later)
        assert self.pool.release(np.array(ids, np.int64), step) == self.model.release(ids, step)

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        for block in self.some(data, self.model.holders):
            self.pool.blocks.indexed[block] = True
            self.model.indexed.add(block)

    @rule(steps=st.integers(0, 2))
    def settle(self, steps: int) -> None:
        self.step += steps
        self.pool.step_done(self.step)
        self.model.settle(self.step)

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data())
    def drop_cached(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.model.cached))
        self.pool.unindex(block)
        self.model.evict(0, block)

    @invariant()
    def agrees(self) -> None:
        pool, model = self.pool, self.model
        check_pool(pool)
        states = pool.blocks.state.tolist()
        assert {b for b, state in enumerate(states) if state == FREE} == model.free
        assert {b for b, state in enumerate(states) if state == QUARANTINED} == model.quarantined
        assert {b for b, state in enumerate(states) if state == CACHED} == set(model.cached)
        assert {b: int(pool.blocks.refcount[b]) for b, state in enumerate(states) if state == REFERENCED} == (
            model.holders
        )
        recent = [np.stack(pool.recent.items(tenant)) for tenant in pool.recent.counts]
        ids, stamps = np.concatenate([np.zeros((2, 0), np.int64), *recent], axis=1)
        assert ids[np.argsort(stamps)].tolist() == model.cached
        assert {b: int(pool.blocks.owner[b]) for b in range(self.count) if b not in model.free} == model.owner
        for tenant in (1, 2, 3):
            assert pool.available(tenant) == model.available(tenant)


class QuotaPoolMachine(PoolMachine):
    quotas: ClassVar[dict[str, Quota]] = {"a": Quota(floor=2, ceiling=4), "b": Quota(ceiling=5), "c": Quota(floor=1)}


TestPool = PoolMachine.TestCase
TestPool.settings = run(60, 30)
TestPoolWithQuotas = QuotaPoolMachine.TestCase
TestPoolWithQuotas.settings = run(100, 30)


# ------------------------------------------------------------------------------------------------------------- prefix

SIZE = 2
BLOCK_TOKENS = st.tuples(st.integers(0, 1), st.integers(0, 1))
PATHS = st.lists(BLOCK_TOKENS, min_size=1, max_size=4)
SALTS = st.sampled_from([11, 12])


class PrefixMachine(RuleBasedStateMachine):
    """PrefixCache against a trie without hashes: hits are always exact, and the longest ones if no hashes collide."""

    hasher_class: type[BlockHasher] = BlockHasher
    exact = True

    def __init__(self) -> None:
        super().__init__()
        blocks = Blocks(10, SIZE)
        tenants = Tenants(make_limits(tenants_max=1))
        tenants.intern("a")
        self.hasher = self.hasher_class(SIZE, b"key", 16)
        self.trie = trie = NaiveTrie()

        class Watched(PrefixCache):
            def remove(self, block: int) -> None:
                trie.remove(block)
                super().remove(block)

        waits = Waits()
        self.index = Watched(PrefixStore(10, SIZE), blocks, waits, self.hasher)
        self.pool = BlockPool(Clock(), blocks, tenants, waits, self.index, 1, 0, 10)
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.held: list[int] = []

    @rule(salt=SALTS, path=PATHS, at_once=st.booleans())
    def run_a_sequence(self, salt: int, path: list[tuple[int, int]], at_once: bool) -> None:
        """Act like a request: take the hit, fill the rest, have it acknowledged, and release everything."""
        tokens = np.array(path, np.int32).ravel()
        hashes = self.hasher.chain(salt, tokens)
        hits = self.index.match(salt, tokens, hashes).tolist()
        self.check_hits(salt, tokens, hits)
        self.pool.hold(np.array(hits, np.int64))
        try:
            fresh = self.pool.allocate(1, len(path) - len(hits)).tolist()
        except CapacityExceeded:
            self.pool.release(np.array(hits, np.int64), 0)
            return
        ids = hits + fresh
        parent = self.index.key(hits[-1]) if hits else root_key(salt)
        at_once = at_once and self.exact and bool(fresh)
        if at_once:
            contents = tokens.reshape(-1, SIZE)[len(hits) :]
            last = index_run(self.pool, np.array(fresh), parent, hashes[len(hits) :], contents)
            assert last == self._indexed_as(int(hashes[-1]))
        for i in range(len(hits), len(path)):
            self.content[ids[i]] = (salt, tuple(tokens[: (i + 1) * SIZE].tolist()))
            if at_once:
                key = self._indexed_as(int(hashes[i]))
            else:
                key = index_block(self.pool, ids[i], parent, int(hashes[i]), tokens[i * SIZE : (i + 1) * SIZE])
            assert self.trie.add(parent, path[i], key, ids[i]) == key
            parent = key
        self.pool.release(np.array(ids, np.int64), 0)

    def _indexed_as(self, value: int) -> int:
        block = self.index.find(value)
        assert block is not None
        return self.index.key(block)

    def check_hits(self, salt: int, tokens: np.ndarray, hits: list[int]) -> None:
        for i, block in enumerate(hits):
            assert self.content[block] == (salt, tuple(tokens[: (i + 1) * SIZE].tolist())), "a hit with wrong tokens"
        expected = self.trie.match(root_key(salt), tokens.tolist(), SIZE)
        assert hits == expected[: len(hits)]
        assert not self.exact or hits == expected

    @rule(salt=SALTS, path=PATHS)
    def look_up(self, salt: int, path: list[tuple[int, int]]) -> None:
        tokens = np.array(path, np.int32).ravel()
        self.check_hits(salt, tokens, self.index.match(salt, tokens, self.hasher.chain(salt, tokens)).tolist())

    @rule(salt=SALTS, path=PATHS, rest=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def look_up_a_part_of_a_block(self, salt: int, path: list[tuple[int, int]], rest: list[int]) -> None:
        tokens = np.array(path, np.int32).ravel()
        hits = self.index.match(salt, tokens, self.hasher.chain(salt, tokens)).tolist()
        parent = self.index.key(hits[-1]) if hits else root_key(salt)
        block, common = self.index.match_partial(parent, np.array(rest, np.int32))
        siblings = self.trie.children.get(parent, {})
        lengths = [
            next((i for i, (a, b) in enumerate(zip(own, rest, strict=False)) if a != b), min(SIZE, len(rest)))
            for own in siblings
        ]
        assert common == max(lengths, default=0)
        if common:
            before = tuple(tokens[: len(hits) * SIZE].tolist())
            assert self.content[block][0] == salt
            assert self.content[block][1][: len(before) + common] == before + tuple(rest[:common])

    @rule(count=st.integers(1, 10))
    def pressure(self, count: int) -> None:
        """Allocate blocks for another request, which evicts the oldest cached ones."""
        if count <= self.pool.available(1):
            self.held += self.pool.allocate(1, count).tolist()

    @precondition(lambda self: self.held)
    @rule()
    def relief(self) -> None:
        self.pool.release(np.array(self.held, np.int64), 0)
        self.held.clear()

    @invariant()
    def holds(self) -> None:
        check_pool(self.pool)
        assert len(self.index) == sum(map(len, self.trie.children.values()))


class CollidingPrefixMachine(PrefixMachine):
    hasher_class = WeakHasher
    exact = False


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = run(60, 30)
TestPrefixWithCollisions = CollidingPrefixMachine.TestCase
TestPrefixWithCollisions.settings = run(60, 30)


# ---------------------------------------------------------------------------------------------------------- sequences

TOKENS = st.lists(st.integers(0, 999), max_size=9)
SOME_TOKENS = st.lists(st.integers(0, 999), min_size=1, max_size=6)


# behaviours 6 to 9, 12, 13 and 15
class SequencesMachine(RuleBasedStateMachine):
    """Client sequences against NaiveSequences: accepted commands, every token, and the sharing of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(policy="none", sequences_max=6, blocks_per_sequence_max=4)
        self.driver.add_worker(10)
        self.model = NaiveSequences(10, 4, 16)

    def pick(self, data: st.DataObject) -> int:
        """A sequence."""
        return data.draw(st.sampled_from(sorted(self.model.tokens)))

    def pick_block(self, data: st.DataObject) -> tuple[int, NaiveBlock]:
        """A block that a sequence holds: the core's and the model's."""
        sequence = data.draw(st.sampled_from([s for s in sorted(self.model.table) if self.model.table[s]]))
        at = data.draw(st.integers(0, len(self.model.table[sequence]) - 1))
        return self.driver.blocks_of(sequence)[at], self.model.table[sequence][at]

    @precondition(lambda self: len(self.model.tokens) < 6)
    @rule(tokens=TOKENS)
    def create(self, tokens: list[int]) -> None:
        try:
            self.model.create(tokens, -1)
        except Refused:
            self.driver.refused(self.driver.create_message(tokens), CapacityExceeded)
            return
        sequence = self.driver.create(tokens)
        self.model.tokens[sequence], self.model.table[sequence] = self.model.tokens.pop(-1), self.model.table.pop(-1)
        for block in self.model.table[sequence]:
            block.holders = {sequence}

    @precondition(lambda self: self.model.tokens)
    @rule(data=st.data(), count=st.integers(1, 3))
    def append(self, data: st.DataObject, count: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model.tokens)), min_size=1, max_size=3, unique=True))
        pairs = [(sequence, data.draw(SOME_TOKENS)) for sequence in chosen]
        try:
            self.model.append(pairs)
        except Refused:
            self.driver.refused(self.driver.append_message(*pairs), CapacityExceeded)
            return
        assert self.driver.append(*pairs) == [len(self.model.tokens[sequence]) for sequence in chosen]

    @precondition(lambda self: self.model.tokens)
    @rule(data=st.data(), count=st.integers(1, 2))
    def fork(self, data: st.DataObject, count: int) -> None:
        sequence = self.pick(data)
        if len(self.model.tokens) + count > 6:
            self.driver.refused(Fork(rid=1, sequence_id=sequence, count=count), CapacityExceeded)
            return
        for child in self.driver.fork(sequence, count):
            self.model.fork(sequence, child)

    @precondition(lambda self: self.model.tokens)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        assert self.driver.remove(sequence) == self.model.remove(sequence)

    @precondition(lambda self: any(self.model.table.values()))
    @rule(data=st.data(), holder=st.sampled_from("xyz"))
    def ref(self, data: st.DataObject, holder: str) -> None:
        block, naive = self.pick_block(data)
        try:
            self.model.ref(naive, holder)
        except Refused:
            self.driver.refused(RefBlock(rid=1, block_id=block, holder=holder), AlreadyHolder)
            return
        assert self.driver.ref(block, holder).refcount == len(naive.holders)

    @precondition(lambda self: any(self.model.table.values()))
    @rule(data=st.data(), holder=st.sampled_from("xyz"))
    def unref(self, data: st.DataObject, holder: str) -> None:
        block, naive = self.pick_block(data)
        try:
            self.model.unref(naive, holder)
        except Refused:
            self.driver.refused(UnrefBlock(rid=1, block_id=block, holder=holder), NotAHolder)
            return
        assert self.driver.unref(block, holder).refcount == len(naive.holders)

    @invariant()
    def agrees(self) -> None:
        driver, model = self.driver, self.model
        s, blocks = driver.machine.cache.sequences, driver.machine.cache.blocks
        names: dict[NaiveBlock, int] = {}
        for sequence, tokens in model.tokens.items():
            assert s.text(s.slot_of[sequence]).tolist() == tokens
            table = driver.blocks_of(sequence)
            assert len(table) == len(model.table[sequence])
            for block, naive in zip(table, model.table[sequence], strict=True):
                assert names.setdefault(naive, block) == block, "block sharing differs from the model"
                assert blocks.refcount[block] == len(naive.holders)
        assert len(set(names.values())) == len(names)
        pool = driver.machine.cache.groups[0].pool
        assert pool.referenced == len(model.held())
        assert pool.free == 10 - pool.referenced

    def teardown(self) -> None:
        for sequence in list(self.model.tokens):
            self.driver.remove(sequence)
        self.driver.gone(1)
        assert self.driver.free() == 10


TestSequences = SequencesMachine.TestCase
TestSequences.settings = run(80, 30)


# --------------------------------------------------------------------------------------------------------- everything


# behaviours 12, 20, 22, 28, 29, 31, 32 and 35
class EverythingMachine(RuleBasedStateMachine):
    """Requests and sequences on pools that are too small, with workers that are late, crash and return.

    The model holds a list of tokens per sequence and the continuation of each prompt.
    """

    sequences: dict[int, list[int]]

    @initialize(
        in_flight=st.integers(1, 3),
        budget=st.sampled_from([3, 8, 32]),
        quotas=st.booleans(),
        pools=st.lists(st.integers(6, 14), min_size=1, max_size=2),
    )
    def start(self, in_flight: int, budget: int, quotas: bool, pools: list[int]) -> None:
        limits: dict[str, Any] = {"quotas": {"a": Quota(floor=2), "b": Quota(ceiling=6)}} if quotas else {}
        self.driver = Driver(
            crashes_max=1000,
            steps_in_flight_max=in_flight,
            step_tokens_max=budget,
            sequences_max=8,
            partial_tokens_min=2,
            **limits,
        )
        for blocks in pools:
            self.driver.add_worker(blocks)
        self.sequences = {}
        self.running: dict[int, int] = {}
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.pins: list[tuple[int, str]] = []

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.sequences)))

    def tell(self, message: Any) -> Any:
        """Return the reply, or None for a refusal, which must change nothing."""
        self.driver.come(1)
        before = refusal_digest(self.driver.machine)
        try:
            return self.driver.ask(message)
        except KvforgeError:
            assert refusal_digest(self.driver.machine) == before
            return None

    @rule(tokens=st.lists(st.integers(0, 2), max_size=10), tenant=st.sampled_from("abc"))
    def create(self, tokens: list[int], tenant: str) -> None:
        reply = self.tell(self.driver.create_message(tokens, tenant=tenant))
        if reply is not None:
            self.sequences[reply.sequence_id] = tokens

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        count=st.integers(1, 8),
        tenant=st.sampled_from("abc"),
    )
    def submit(self, prompt: list[int], count: int, tenant: str) -> None:
        reply = self.tell(self.driver.submit_message(prompt, count, tenant=tenant))
        if reply is not None:
            self.prompts[reply.request_id] = (prompt, count)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=3), count=st.integers(1, 6))
    def continue_sequence(self, data: st.DataObject, more: list[int], count: int) -> None:
        sequence = self.pick(data)
        busy = sequence in self.running.values()
        reply = self.tell(self.driver.submit_message(more, count, sequence_id=sequence))
        assert not (busy and reply)
        if reply is not None:
            self.sequences[sequence] = self.sequences[sequence] + more
            self.prompts[reply.request_id] = (self.sequences[sequence], count)
            self.running[reply.request_id] = sequence

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = self.pick(data)
        message = self.driver.append_message((sequence, tokens))
        if sequence in self.running.values():
            self.driver.refused(message, SequenceBusy)
        elif self.tell(message) is not None:
            self.sequences[sequence] = self.sequences[sequence] + tokens

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        reply = self.tell(Fork(rid=1, sequence_id=sequence))
        if reply is not None:
            s = self.driver.machine.cache.sequences
            self.sequences[int(reply.sequence_ids[0])] = s.text(s.slot_of[sequence]).tolist()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.driver.remove(sequence)
        for request in [request for request, other in self.running.items() if other == sequence]:
            assert self.driver.request(request).state == "cancelled"
            del self.running[request]
        del self.sequences[sequence]

    @precondition(lambda self: self.driver.machine.requests.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.driver.machine.requests.live)))
        assert self.tell(Cancel(rid=1, request_id=request)) is not None
        assert self.driver.request(request).state == "cancelled"
        self.observe()

    @precondition(lambda self: len(self.pins) < 3)
    @rule(block=st.integers(0, 27), holder=st.sampled_from("xy"))
    def ref(self, block: int, holder: str) -> None:
        if self.tell(RefBlock(rid=1, block_id=block, holder=holder)) is not None:
            self.pins.append((block, holder))

    @precondition(lambda self: self.pins)
    @rule()
    def unref(self) -> None:
        block, holder = self.pins.pop()
        self.tell(UnrefBlock(rid=1, block_id=block, holder=holder))

    @rule()
    def turn(self) -> None:
        self.driver.advance(1000)
        self.driver.turn()

    @rule(data=st.data(), count=st.integers(1, 4))
    def work(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.driver.turn()
            able = [worker for worker in self.driver.workers if worker.inbox]
            if able:
                self.driver.answer(data.draw(st.sampled_from(able)))
                self.observe()

    @precondition(lambda self: self.driver.workers)
    @rule(data=st.data())
    def lose_a_worker_and_start_another(self, data: st.DataObject) -> None:
        worker: FakeWorker = data.draw(st.sampled_from(self.driver.workers))
        self.driver.lose(worker)
        self.driver.turn()
        self.driver.add_worker(worker.blocks)

    def observe(self) -> None:
        """Check each finished request's answer, and the tokens of its sequence."""
        for request, sequence in list(self.running.items()):
            info = self.driver.request(request)
            if info.reason:
                self.sequences[sequence] = self.sequences[sequence] + info.tokens.tolist()
                del self.running[request]

    @invariant()
    def agrees(self) -> None:
        s = self.driver.machine.cache.sequences
        for sequence, tokens in self.sequences.items():
            known = s.text(s.slot_of[sequence]).tolist()
            assert known[: len(tokens)] == tokens
            assert len(known) == len(tokens) or sequence in self.running.values()
        for request, tokens in self.driver.streamed.items():
            prompt, count = self.prompts[request]
            assert tokens == continuation(prompt, count)[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "sequences"):
            return
        driver = self.driver
        for block, holder in self.pins:
            self.tell(UnrefBlock(rid=1, block_id=block, holder=holder))
        if not driver.machine.cache.sequences.slots_free:  # else requests may wait for a slot
            for sequence in set(self.sequences) - set(self.running.values()):
                driver.remove(sequence)
        driver.run_until_idle(300)
        for request, (prompt, count) in self.prompts.items():
            info = driver.request(request)
            assert info.state in ("finished", "cancelled") or info.error.code in ("invalid_request", "quota_exceeded")
            if info.state == "finished":
                assert info.tokens.tolist() == driver.streamed[request] == continuation(prompt, count)
        driver.gone(1)
        driver.run_until_idle()
        assert driver.free_or_cached() == sum(worker.blocks for worker in driver.workers)
        assert not driver.machine.cache.sequences.slot_of


TestEverything = EverythingMachine.TestCase
TestEverything.settings = run(80, 40)


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every cache hash into three values."""
    monkeypatch.setattr(kv_cache_manager, "BlockHasher", WeakHasher)


@pytest.mark.usefixtures("colliding")
class TestEverythingWithCollisions(EverythingMachine.TestCase):
    settings = run(30, 40)
