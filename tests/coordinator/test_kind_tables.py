"""The kinds and states of blocks, as the shared tables show them after every turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvforge.coordinator.publish import publish
from kvforge.protocol.layout import BLOCK_KINDS, BLOCK_STATES, Geometry
from kvforge.protocol.meters import POOL_COUNTS
from kvforge.protocol.tables import TablesReader, TablesWriter
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver
from tests.coordinator.test_states import stateful
from tests.coordinator.test_windows import windowed

PROMPTS = [[7 * i % 50 + salt for i in range(41)] for salt in (1, 2, 3)]


def tables_of(driver: Driver, folder: Path) -> TablesWriter:
    bounds = driver.machine.limits.bounds
    geometry = Geometry(
        slots=bounds.sequences_max,
        blocks=bounds.blocks_max,
        blocks_per_sequence=bounds.blocks_per_sequence_max,
        block_size=driver.machine.limits.cache.block_size,
        states_per_sequence=bounds.state_blocks_max,
    )
    return TablesWriter(folder / "tables", geometry, "boot")


@pytest.mark.parametrize(
    ("make", "kinds"),
    [(stateful, {"kv", "state", "checkpoint"}), (windowed, {"kv", "window"})],
    ids=["states", "windows"],
)
def test_the_tables_name_the_kind_of_every_block(
    make: Callable[[], tuple[Driver, object]], kinds: set[str], tmp_path: Path
) -> None:
    driver, _ = make()
    cache, tables = driver.machine.cache, tables_of(driver, tmp_path)
    reader, seen = TablesReader(tables.path), set()
    for prompt in (*PROMPTS, PROMPTS[0]):  # the second evicts parts of the first
        driver.submit(prompt, 6)
        for _ in range(20):
            driver.step()
            publish(driver.machine, tables, driver.now_us)
            assert np.array_equal(reader.block_kind, cache.blocks.kind)
            assert np.array_equal(reader.block_state, cache.blocks.state)
            in_use = np.bincount(reader.block_kind[reader.block_owner > 0], minlength=len(BLOCK_KINDS))
            seen |= {BLOCK_KINDS[kind] for kind in np.flatnonzero(in_use)}
    (pool,) = (dict(zip(POOL_COUNTS, row, strict=False)) for row in tables.metrics.pools[:1].tolist())
    assert [pool[f"{kind}_blocks"] for kind in BLOCK_KINDS[1:]] == in_use[1:].tolist()
    assert pool["blocks"] - pool["free"] == in_use.sum()
    assert seen == kinds
    tables.close()


def test_the_tables_show_a_quarantine_and_its_end(make_pool: MakePool, tmp_path: Path) -> None:
    """Its end leaves the count, owner and generation of a block as they were: the prefix index keeps the block."""
    driver, worker = make_pool()
    tables, blocks = tables_of(driver, tmp_path), driver.machine.cache.blocks
    reader = TablesReader(tables.path)
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=4)
    driver.turn()
    first = int(driver.machine.cache.sequences.table[worker.steps[0].slots[0], 0])
    driver.answer(worker)
    driver.cancel(request)  # while the next step, which reads the block, is in flight
    publish(driver.machine, tables, driver.now_us)
    before = blocks.refcount[first], blocks.owner[first], blocks.generation[first]
    assert BLOCK_STATES[reader.block_state[first]] == driver.block(first).state == "quarantined"
    driver.run_until_idle()
    publish(driver.machine, tables, driver.now_us)
    assert (blocks.refcount[first], blocks.owner[first], blocks.generation[first]) == before
    assert BLOCK_STATES[reader.block_state[first]] == driver.block(first).state == "cached"
    tables.close()


def test_a_row_shows_the_states_that_it_got_after_its_window_blocks(tmp_path: Path) -> None:
    """In one turn a row leaves a model with windows, and begins with the states of another one in the same columns."""
    driver, _ = windowed()
    tables, cache = tables_of(driver, tmp_path), driver.machine.cache
    driver.submit(PROMPTS[0], 6)
    driver.step()
    publish(driver.machine, tables, driver.now_us)
    s, (group,), slot = cache.sequences, cache.groups.values(), np.array([0])
    cache.windows.put(group, slot, np.array([0]), np.array([7, 8]))
    s.states[0, :2] = 5, 6
    s.changed_rows.append(slot)
    s.changed_states.append(0)
    publish(driver.machine, tables, driver.now_us)
    assert tables.state_table[0].tolist() == s.states[0].tolist()
    tables.close()
