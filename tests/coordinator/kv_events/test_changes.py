"""Change events of the prefix indexes: a mirror that applies them holds exactly what a prompt can hit."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.cache import changes as index_changes
from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.changes import Change, Cleared, IndexChanges, Removed, Stored
from kvforge.coordinator.core.cache.prefix_cache import PrefixCache
from kvforge.coordinator.kv_events.format import BATCH_BLOCKS_MAX, Format
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver
from tools.simulation.digest import digest
from tools.simulation.mirror import DECODERS, Mirror

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]


@pytest.fixture(autouse=True, params=["one by one", "together"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are reported in one of two ways, depending on their number; both must be equivalent."""
    if request.param == "together":
        monkeypatch.setattr(index_changes, "FEW", 0)


class Listener:
    """Applies a driver's change events to a mirror, as the stream does."""

    def __init__(self, driver: Driver, encoding: str = "array") -> None:
        self._driver, self.mirror = driver, Mirror(encoding)
        self._format = Format(encoding, driver.machine.cache.hasher.salt("tenant:default"))
        self._changed = driver.machine.cache.record_changes()
        self.take()

    def take(self) -> list[Change]:
        """Take the pending changes and check that the mirror is right."""
        changes = self._changed.pop_changes()
        assert changes is not None
        self.tell(changes)
        self.mirror.check(self._driver.machine)
        return changes

    def tell(self, changes: Iterable[Change]) -> None:
        for payload in self._format.batches(changes, 1.5):
            self.mirror.apply(payload)


def served(driver: Driver, prompt: list[int], max_tokens: int = 1, **fields: object) -> None:
    driver.submit(prompt, max_tokens, **fields)
    driver.run_until_idle()


@pytest.mark.parametrize("encoding", ["array", "map"])
def test_a_block_is_told_when_a_worker_has_computed_it_and_once(make_pool: MakePool, encoding: str) -> None:
    driver, _ = make_pool()
    listener = Listener(driver, encoding)
    driver.submit(PROMPT, 4)
    assert listener.take() == []
    driver.run_until_idle()
    (stored, *_) = listener.take()
    assert isinstance(stored, Stored) and stored.parent is None
    assert stored.tokens == PROMPT[:8]
    served(driver, PROMPT, 1)
    assert listener.take() == []
    served(driver, [*PROMPT[:4], 7, 7, 7, 7, 7], 1)
    (after,) = listener.take()
    assert isinstance(after, Stored) and after.parent == stored.hashes[0]


def test_what_is_evicted_is_removed_and_what_comes_back_is_stored(make_pool: MakePool) -> None:
    driver, _ = make_pool(blocks=8)
    listener = Listener(driver)
    kinds = set[type]()
    for first in [*range(8), *range(8)]:
        served(driver, [first, *PROMPT], 2)
        kinds |= {type(change) for change in listener.take()}
    assert kinds == {Stored, Removed}
    assert driver.machine.cache.groups[0].pool.freed_total > 0


def test_a_chain_that_is_broken_is_removed_with_its_first_block(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    listener = Listener(driver)
    served(driver, PROMPT)
    served(driver, [*PROMPT[:4], 7, 7, 7, 7, 7])
    listener.take()
    pool: BlockPool = driver.machine.cache.groups[0].pool
    first = next(iter(driver.machine.cache.groups[0].index._by_hash.values()))
    pool.unindex(first)
    (removed,) = listener.take()
    assert isinstance(removed, Removed) and len(removed.hashes) == 3
    served(driver, PROMPT)
    served(driver, [*PROMPT[:4], 7, 7, 7, 7, 7])
    listener.take()
    assert len(listener.mirror.blocks[0]) == 3


@pytest.mark.parametrize("alone", [True, False])
def test_what_follows_a_block_that_is_indexed_anew_is_told_again(make_pool: MakePool, alone: bool) -> None:
    driver, _ = make_pool()
    listener = Listener(driver)
    served(driver, PROMPT)
    listener.take()
    cache = driver.machine.cache
    index, store = cache.groups[0].index, cache.store
    values = cache.indexing.hashes(cache.hasher.salt("tenant:default"), np.array(PROMPT, np.int32))
    first = index.find(int(values[0]))
    assert first is not None
    parent, tokens = int(store.parent[first]), store.tokens[first].copy()
    index.remove(first)
    (removed,) = listener.take()
    assert isinstance(removed, Removed) and removed.hashes == values.tolist()
    if alone:
        index.add(first, parent, int(values[0]), tokens)
    else:
        assert index.add_new(np.array([first]), np.array([parent]), values[:1], tokens[None])
    listener.take()
    assert listener.mirror.blocks[0].keys() == set(values.tolist())


def test_tenants_and_salts_are_told_apart(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    listener = Listener(driver)
    served(driver, PROMPT)
    served(driver, PROMPT, tenant="a")
    served(driver, PROMPT, tenant="b")
    served(driver, PROMPT, salt="secret")
    listener.take()
    held = listener.mirror.blocks[0].values()
    assert len(held) == 8
    names = {known.name for known in held}
    assert len(names) == 4 and None in names and not any("secret" in name for name in names if name)


def test_generated_tokens_of_another_kind_are_not_told(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    driver.machine.cache.indexing.kinds = True
    listener = Listener(driver)
    served(driver, PROMPT, 12)
    told = [change.tokens for change in listener.take() if isinstance(change, Stored)]
    assert told == [PROMPT[:8]]
    assert len(driver.machine.cache.groups[0].index) > 2


def test_a_pool_that_is_gone_is_removed_and_the_last_is_cleared(driver: Driver) -> None:
    first, second = driver.add_worker(blocks=16), driver.add_worker(blocks=16)
    listener = Listener(driver)
    for start in range(4):
        driver.submit([start, *PROMPT], 1)
    driver.run_until_idle()
    listener.take()
    assert {rank for rank, held in listener.mirror.blocks.items() if held} == {0, 1}
    driver.lose(first)
    assert [type(change) for change in listener.take()] == [Removed]
    driver.lose(second)
    assert listener.take() == [Cleared(1)]


def test_who_begins_late_is_told_all_there_is(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    for first in range(4):
        served(driver, [first, *PROMPT, *PROMPT], 3, tenant="ab"[first % 2])
        served(driver, PROMPT, 2)
    listener = Listener(driver)
    assert listener.mirror.blocks[0]
    served(driver, [9, *PROMPT])
    listener.take()


def test_too_much_is_not_kept() -> None:
    changes = IndexChanges(8)
    changes.removed([1] * 16)
    assert changes.pop_changes() == []
    changes.removed([1] * 17)
    assert changes.pop_changes() is None


def test_nothing_of_it_is_part_of_the_state(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    before = digest(driver.machine.cache.store)
    driver.machine.cache.record_changes()
    store = driver.machine.cache.store
    assert digest(store) == before
    assert store.changed is not None and deepcopy(store).changed is None


def test_large_changes_are_cut(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    served(driver, PROMPT)
    changed = driver.machine.cache.record_changes()
    (stored,) = (change for change in changed.pop_changes() or () if isinstance(change, Stored))
    count = 2 * BATCH_BLOCKS_MAX + 1
    many = stored._replace(hashes=list(range(count)), tokens=stored.tokens[:4] * count)
    mirror = Mirror()
    payloads = list(Format("array", stored.salt).batches([many, Removed(0, many.hashes)], 1.0))
    for payload in payloads:
        mirror.apply(payload)
    assert len(payloads) == 6 and mirror.blocks == {0: {}}


def test_the_bytes_are_those_that_vllm_would_send(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    served(driver, PROMPT)
    served(driver, PROMPT, tenant="a")
    changes = driver.machine.cache.record_changes().pop_changes() or []
    for encoding in ("array", "map"):
        form = Format(encoding, driver.machine.cache.hasher.salt("tenant:default"))
        for payload in form.batches([*changes, Removed(0, [1 << 63]), Cleared(3)], 1.5):
            assert msgspec.msgpack.encode(DECODERS[encoding].decode(payload)) == payload


def test_removing_costs_nothing_more_where_nobody_listens(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PrefixCache, "_chains")
    driver, _ = make_pool(blocks=8)
    for first in range(8):
        served(driver, [first, *PROMPT], 2)
