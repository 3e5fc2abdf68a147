"""Counters: zero at first, always exact, consistent with each other and with the published gauges."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.reporting import statistics
from kvforge.coordinator.publish import publish
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.layout import GAUGES, Geometry
from kvforge.protocol.messages import GetHealth, RequestStats, WorkerHello
from kvforge.protocol.meters import (
    ACCEPTED,
    DISPLACED,
    ENDED,
    FIRST_TOKEN,
    GAP,
    HIT,
    PREEMPTED,
    PROMPT,
    RECOMPUTED,
    RUNNING,
    WAITING,
    WHOLE,
)
from kvforge.protocol.tables import TablesWriter
from tests.coordinator import naive
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import BYTES_PER_BLOCK, Driver, FakeWorker, model_info

ZERO = RequestStats(**dict.fromkeys(RequestStats.__struct_fields__, 0))


def check_agreement(driver: Driver) -> None:
    """Check a snapshot against itself, the machine's state, and the published gauges."""
    stats, cache = driver.stats(), driver.machine.cache
    gauges = dict(zip(GAUGES, driver.machine.gauges(driver.now_us), strict=True))
    for pool in stats.pools:
        assert pool.free + pool.cached + pool.referenced + pool.quarantined == pool.blocks
        assert pool.allocated_total - pool.freed_total == pool.blocks - pool.free
        assert pool.referenced <= pool.referenced_peak
        assert {info.worker for info in map(driver.block, (pool.base, pool.base + pool.blocks - 1))} == {pool.worker}
        assert pool.live_tokens <= pool.referenced * pool.block_size
    for name in ("free", "cached", "referenced", "quarantined"):
        assert gauges[f"blocks_{name}"] == sum(getattr(pool, name) for pool in stats.pools), name
    assert gauges["blocks_total"] == sum(pool.blocks for pool in stats.pools)
    assert sum(row.blocks for row in stats.tenants) == sum(pool.blocks - pool.free for pool in stats.pools)
    assert sum(row.bytes for row in stats.tenants) == BYTES_PER_BLOCK * sum(row.blocks for row in stats.tenants)
    assert stats.sequences == gauges["sequences"] == len(cache.sequences.slot_of)
    requests = stats.requests
    assert (requests.pending, requests.running) == (gauges["requests_pending"], gauges["requests_running"])
    ended = requests.finished_total + requests.failed_total + requests.cancelled_total + requests.expired_total
    assert requests.accepted_total == ended + requests.pending + requests.running
    assert gauges["generated_tokens_total"] == requests.generated_tokens_total
    assert sum(row.prefix_hit_tokens_total for row in stats.tenants) >= requests.cached_tokens_total
    check_meters(cache.tenants.meters.rows.sum(axis=0), requests)


def check_meters(cells: np.ndarray, requests: RequestStats) -> None:
    """Check that the counts by tenant add up to the totals."""
    told = {
        RUNNING: requests.running,
        WAITING: requests.pending,
        ACCEPTED: requests.accepted_total,
        PROMPT: requests.prompt_tokens_total,
        HIT: requests.cached_tokens_total,
        RECOMPUTED: requests.recomputed_tokens_total,
        ENDED["failed"]: requests.failed_total,
        ENDED["cancelled"]: requests.cancelled_total,
        ENDED["expired"]: requests.expired_total,
    }
    assert {cell: int(cells[cell]) for cell in told} == told
    assert cells[PREEMPTED] + cells[DISPLACED] == requests.preemptions_total
    assert cells[ENDED["stop"]] + cells[ENDED["length"]] == requests.finished_total
    tokens = sum(int(cells[what.start : what.total].sum()) for what in (FIRST_TOKEN, GAP))
    assert tokens == requests.generated_tokens_total
    assert cells[WHOLE.start : WHOLE.total].sum() == requests.finished_total


def test_steps_are_counted_beyond_the_worker_that_ran_them(driver: Driver) -> None:
    """Monitors take differences: a total that fell would show as a negative rate."""
    counts = []
    for _ in range(2):
        worker = driver.add_worker(9, "one")
        driver.submit([1, 2, 3], max_tokens=4)
        driver.run_until_idle()
        driver.lose(worker)
        gauges = dict(zip(GAUGES, driver.machine.gauges(driver.now_us), strict=True))
        counts.append(gauges["steps_total"])
    assert counts == [4, 8]


# behaviour 5
def test_fresh_statistics_are_zero_and_totals_match_the_configuration(driver: Driver) -> None:
    stats = driver.stats()
    assert (stats.requests, stats.pools, stats.tenants, stats.sequences, stats.uptime_us) == (ZERO, (), (), 0, 0)
    driver.add_worker(7, "one")
    driver.add_worker(9, "two")
    one, two = driver.stats().pools
    assert [(pool.worker, pool.blocks, pool.free, pool.block_size) for pool in (one, two)] == [
        ("one", 7, 7, 4),
        ("two", 9, 9, 4),
    ]
    for pool in (one, two):
        assert pool.bytes_per_block == BYTES_PER_BLOCK
        zeros = "cached referenced quarantined referenced_peak allocated_total freed_total live_tokens sequences steps"
        assert [getattr(pool, name) for name in zeros.split()] == [0] * 9
    assert driver.stats().requests == ZERO


def test_what_each_workers_device_memory_is_for_is_told_from_its_ready_to_its_end(driver: Driver) -> None:
    held = {"one": {"weights": 70, "pool": 30}, "two": {"pool": 1 << 40, "other": 5}}
    for number, (name, device_bytes) in enumerate(held.items(), 8):
        worker = FakeWorker(driver.machine, number, name, 4, model_info())
        driver.workers.append(worker)
        driver.report(worker, WorkerHello(rid=1, name=name, pid=1))
        assert driver.ask(GetHealth(rid=1)).workers[-1].device_bytes == {}
        ready = msgspec.structs.replace(driver.ready(worker), device_bytes=device_bytes, kernels={"decode": name})
        driver.report(worker, ready)
    assert {worker.name: worker.device_bytes for worker in driver.ask(GetHealth(rid=1)).workers} == held
    assert [worker.kernels for worker in driver.ask(GetHealth(rid=1)).workers] == [{"decode": "one"}, {"decode": "two"}]
    driver.lose(driver.workers[0])
    assert {worker.name: worker.device_bytes for worker in driver.ask(GetHealth(rid=1)).workers} == {"two": held["two"]}
    driver.add_worker(4, "one")  # its successor reports no kind
    assert driver.ask(GetHealth(rid=1)).workers[-1].device_bytes == {}


# behaviour 17
def test_peak_current_and_totals(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    one, two = driver.create(range(9)), driver.create(range(5))
    driver.remove(one)
    pool = driver.stats().pools[0]
    assert (pool.referenced, pool.referenced_peak, pool.allocated_total, pool.freed_total) == (2, 5, 5, 3)
    assert pool.sequences == 1
    assert driver.info(two).bytes == 2 * BYTES_PER_BLOCK
    assert driver.stats().tenants[0].bytes == 2 * BYTES_PER_BLOCK


# behaviours 8 and 17
def test_live_tokens_are_slot_accurate_and_a_shared_slot_counts_once(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create(range(6))
    assert driver.stats().pools[0].live_tokens == 6
    first, second = driver.fork(sequence, 2)
    assert driver.stats().pools[0].live_tokens == 6
    driver.append((first, [1]))  # copies the block with 2 tokens, adds one
    assert driver.stats().pools[0].live_tokens == 6 + 3
    driver.append((second, [1, 2, 3]))  # 2 + 3 tokens of its own, in two blocks
    assert driver.stats().pools[0].live_tokens == 6 + 3 + 5
    driver.remove(sequence)
    assert driver.stats().pools[0].live_tokens == 4 + 3 + 5
    driver.remove(first, second)
    assert driver.stats().pools[0].live_tokens == 0


def test_a_cached_block_is_not_live_and_a_named_holder_makes_it_so(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    driver.submit(range(6), max_tokens=1)
    driver.run_until_idle()
    assert driver.stats().pools[0].live_tokens == 0
    (block,) = [block for block in range(16) if driver.block(block).state == "cached"]
    driver.ref(block, "me")
    assert driver.stats().pools[0].live_tokens == 4


# behaviour 36
def test_every_number_of_a_snapshot_agrees_with_the_others_at_any_moment(make_pool: MakePool) -> None:
    driver, worker = make_pool(8)
    check_agreement(driver)
    sequence = driver.create(range(6), tenant="c")
    driver.fork(sequence)
    requests = [driver.submit([i, *range(i)], max_tokens=6, tenant="ab"[i % 2]) for i in range(8)]
    for i in range(60):
        driver.advance(1000)
        driver.turn()
        check_agreement(driver)
        if worker.inbox:
            driver.answer(worker)
            check_agreement(driver)
        if i == 5:
            driver.cancel(requests[7])
            check_agreement(driver)
    driver.run_until_idle()
    check_agreement(driver)
    totals = driver.stats().requests
    assert (totals.finished_total, totals.cancelled_total, totals.accepted_total) == (7, 1, 8)
    generated = sum(driver.request(r).generated_tokens for r in requests)
    assert totals.generated_tokens_total == generated == sum(len(driver.streamed.get(r, [])) for r in requests)
    assert totals.prompt_tokens_total == sum(1 + i for i in range(8))


# behaviour 36
def test_computed_tokens_are_the_tokens_that_were_fed(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    for _ in range(2):
        driver.submit(range(9), max_tokens=3)
        driver.run_until_idle()
    totals = driver.stats().requests
    assert totals.computed_tokens_total == sum(step.tokens.size for step in worker.steps) == (9 + 2) + (1 + 2)
    assert (totals.cached_tokens_total, totals.recomputed_tokens_total) == (8, 0)
    assert driver.stats().pools[0].steps == len(worker.steps) == 6


def test_uptime_clients_and_refusals_are_counted(driver: Driver) -> None:
    driver.create(client=1)
    driver.create(client=2)
    driver.advance(5_000)
    assert (driver.stats().uptime_us, driver.stats().clients) == (5_000, 2)
    driver.gone(2)
    assert driver.stats().clients == 1


# behaviours 19 and 36 (in the core: the published gauges match its state)
def test_the_published_tables_are_the_state_after_every_turn(make_pool: MakePool, tmp_path: Path) -> None:
    driver, worker = make_pool(8)
    limits, cache = driver.machine.limits, driver.machine.cache
    geometry = Geometry(
        slots=limits.bounds.sequences_max,
        blocks=limits.bounds.blocks_max,
        blocks_per_sequence=limits.bounds.blocks_per_sequence_max,
        block_size=limits.cache.block_size,
    )
    tables = TablesWriter(tmp_path / "tables", geometry, "boot")
    sequences = [driver.create(range(5))]
    for i in range(30):
        if i % 3 == 0:
            driver.submit([i, *range(i % 7)], max_tokens=5)
        if i % 5 == 1:
            sequences += driver.fork(sequences[-1])
            driver.append((sequences[-1], [i]))
        if i % 10 == 9:
            driver.remove(*sequences[:-1])
            sequences = sequences[-1:]
        if i == 20:
            driver.lose(worker)
            worker = driver.add_worker(6)
        driver.turn()
        publish(driver.machine, tables, driver.now_us)
        s = cache.sequences
        assert np.array_equal(tables.row_length, s.length)
        assert np.array_equal(tables.row_blocks, s.used)
        assert np.array_equal(tables.row_sequence, s.id)
        inside = np.arange(limits.bounds.blocks_per_sequence_max) < s.used[:, None]
        assert np.array_equal(tables.block_table[inside], s.table[inside])
        assert np.array_equal(tables.block_refcount, cache.blocks.refcount)
        assert np.array_equal(tables.block_generation, cache.blocks.generation)
        assert np.array_equal(tables.block_owner, cache.blocks.owner)
        assert np.array_equal(tables.block_state, cache.blocks.state)
        if worker.inbox:
            driver.answer(worker)
    tables.close()


@pytest.mark.parametrize("seed", range(6))
def test_live_tokens_are_what_counting_block_by_block_says(make_pool: MakePool, seed: int) -> None:
    driver, worker = make_pool(40, steps_in_flight_max=2)
    other = driver.add_worker(20)
    random = Random(seed)
    cache = driver.machine.cache
    sequences: list[int] = []
    seen = set()
    for i in range(80):
        action = random.choice(("create", "fork", "append", "remove", "submit", "ref", "step", "step", "answer"))
        tenant = random.choice("ab")
        with suppress(KvforgeError):
            if action == "create":
                sequences.append(driver.create(range(random.randint(0, 11)), tenant=tenant, salt="s"))
            elif action == "submit":
                on = random.choice([0, 0, *sequences])
                driver.submit(range(random.randint(1, 9)), 3, tenant=tenant, sequence_id=on, salt="" if on else "s")
            elif action == "ref":
                driver.ref(random.randrange(60), f"h{i}", tenant=tenant)
            elif action == "step":
                driver.turn()
            elif action == "answer":
                for busy in [one for one in (worker, other) if one.inbox]:
                    driver.answer(busy)
            elif sequences:
                one = random.choice(sequences)
                if action == "fork":
                    sequences += driver.fork(one, random.randint(1, 2))
                elif action == "append":
                    driver.append((one, range(random.randint(1, 5))))
                else:
                    driver.remove(one)
                    sequences.remove(one)
        for group in cache.groups.values():
            for index in range(len(cache.tenants.names)):
                live = statistics.live_tokens(cache, group, index)
                assert live == naive.live_tokens(cache, group, index), f"after {i} {action}"
                seen.add(live)
    assert len(seen) > 10


def test_statistics_of_tenants_are_those_of_their_pools(make_pool: MakePool) -> None:
    driver, _ = make_pool(8, quotas={"a": Quota(floor=1, ceiling=6, weight=2.0)})
    driver.create(range(6), tenant="b")
    driver.advance(1_000_000)
    driver.create(range(3), tenant="a")
    driver.submit([1], tenant="b")
    driver.advance(500_000)
    a, b = driver.stats().tenants
    assert (a.tenant, a.blocks, a.bytes, a.floor, a.ceiling, a.weight, a.pending) == ("a", 1, 4096, 1, 6, 2.0, 0)
    assert (b.tenant, b.blocks, b.bytes, b.floor, b.ceiling, b.weight, b.pending) == ("b", 2, 8192, 0, 0, 1.0, 1)
    assert (a.byte_seconds, b.byte_seconds) == (4096 * 0.5, 8192 * 1.5)
