"""Metrics by tenant and pool: exact in every way of counting, and kept when tenants and pools come and go."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.cache.meters import FEW, Meters
from kvforge.coordinator.core.events import Restarted
from kvforge.coordinator.publish import METRICS_US, all_changed, publish
from kvforge.protocol.layout import GAUGES, Geometry
from kvforge.protocol.messages import WorkerHello
from kvforge.protocol.meters import (
    DECODE,
    DISPLACED,
    ENDED,
    FIRST_TOKEN,
    GAP,
    OTHERS,
    POOL_COUNTS,
    PREEMPTED,
    PROMPT,
    QUEUE,
    REASONS,
    STEP_TIME,
    TENANT_COUNTS,
    TENANT_ROWS,
    TENANT_TIMES,
    WHOLE,
    Distribution,
)
from kvforge.protocol.service_metrics import ServiceMetrics
from kvforge.protocol.tables import TablesReader, TablesWriter
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import GREEDY, Driver, FakeWorker, continuation, model_info


def row(driver: Driver, tenant: str) -> np.ndarray:
    tenants = driver.machine.cache.tenants
    found: np.ndarray = tenants.meters.rows[tenants.peek(tenant)]
    return found


def counts(cells: np.ndarray, what: Distribution) -> list[int]:
    found: list[int] = cells[what.start : what.total].tolist()
    return found


def counted(values: list[int], what: Distribution) -> list[int]:
    buckets = Counter(bisect_left(what.bounds, value) for value in values)
    return [buckets[i] for i in range(len(what.bounds) + 1)]


def test_the_cells_of_a_row_follow_each_other_and_their_bounds_rise() -> None:
    assert TENANT_TIMES[0].start == len(TENANT_COUNTS)
    assert [a.end for a in TENANT_TIMES[:-1]] == [b.start for b in TENANT_TIMES[1:]]
    for what in (*TENANT_TIMES, STEP_TIME):
        assert list(what.bounds) == sorted(set(what.bounds))


@pytest.mark.parametrize("seed", range(4))
def test_every_time_between_two_tokens_is_counted_once_whoever_joins_leaves_or_is_preempted(seed: int) -> None:
    """Most steps are counted once for all rows; the tokens of each request give the expected value."""
    random, driver = Random(seed), Driver()
    worker = driver.add_worker(10)
    came: dict[int, list[int]] = {}
    tenant_of: dict[int, str] = {}

    def look() -> None:
        for request in came:
            found = driver.machine.requests.find(request)
            have = driver.machine.admission.generated(found)
            came[request] += [driver.now_us] * (have - len(came[request]))

    for turn in range(150):
        driver.advance(random.choice((900, 1_000, 30_000)))
        if turn < 60 and random.random() < 0.3:
            tenant = random.choice("ab")
            prompt = [random.randrange(50) for _ in range(random.randrange(1, 9))]
            request = driver.submit(prompt, max_tokens=random.randrange(1, 24), tenant=tenant)
            came[request], tenant_of[request] = [], tenant
        if turn == 40:
            driver.lose(worker)
            worker = driver.add_worker(9)
        driver.turn()
        if worker.inbox:
            driver.answer(worker)
        look()
    for _ in range(1000):
        driver.advance(1_000)
        driver.turn()
        if worker.inbox:
            driver.answer(worker)
        look()
    assert not driver.machine.busy
    assert driver.machine.requests.preemptions_total > 0, "no request was preempted"
    for tenant in "ab":
        mine = [times for request, times in came.items() if tenant_of[request] == tenant]
        gaps = [after - before for times in mine for before, after in pairwise(times)]
        cells = row(driver, tenant)
        assert counts(cells, GAP) == counted(gaps, GAP)
        assert cells[GAP.total] == sum(gaps)
        assert sum(counts(cells, FIRST_TOKEN)) == sum(bool(times) for times in mine)


def test_times_of_a_request_from_its_submission_to_its_end(make_pool: MakePool) -> None:
    driver, worker = make_pool(step_rows_max=1)
    first, second = driver.submit([1, 2, 3], max_tokens=1, tenant="a"), driver.submit([4], max_tokens=3, tenant="b")
    driver.turn()
    driver.advance(12_000)
    driver.answer(worker)
    driver.turn()
    driver.advance(8_000)
    driver.step()
    driver.run_until_idle()
    assert [driver.request(request).state for request in (first, second)] == ["finished"] * 2
    spent = {"a": (0, 12_000, 12_000, 0), "b": (12_000, 20_000, 20_000, 0)}
    for tenant, times in spent.items():
        cells = row(driver, tenant)
        for what, value in zip((QUEUE, FIRST_TOKEN, WHOLE, DECODE), times, strict=True):
            assert (counts(cells, what), int(cells[what.total])) == (counted([value], what), value), what.name


def test_a_request_that_did_not_end_as_it_should_says_nothing_of_how_long_one_takes(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    worker.poison.add(9)
    driver.submit([9], max_tokens=3, tenant="a")
    cancelled = driver.submit([5], max_tokens=30, tenant="a")
    driver.submit([6], max_tokens=30, tenant="a", deadline_ms=5)
    driver.step()
    driver.cancel(cancelled)
    driver.advance(6_000)
    driver.run_until_idle()
    stop = continuation([7], 2)[-1]
    stopping = msgspec.structs.replace(GREEDY, stop_tokens=(stop,))
    driver.submit([7], max_tokens=30, tenant="a", sampling=stopping)
    driver.submit([8], max_tokens=2, tenant="a")
    driver.run_until_idle()
    cells = row(driver, "a")
    assert {reason: int(cells[ENDED[reason]]) for reason in REASONS} == dict.fromkeys(REASONS, 1)
    assert sum(counts(cells, WHOLE)) == 2


def test_what_others_took_is_told_from_what_was_lost_with_a_worker(make_pool: MakePool) -> None:
    driver, worker = make_pool(4)
    driver.submit([1] * 6, max_tokens=9, tenant="a")
    driver.submit([2] * 6, max_tokens=9, tenant="a")
    for _ in range(9):
        if not row(driver, "a")[PREEMPTED]:
            driver.step()
    driver.lose(worker)
    assert row(driver, "a")[DISPLACED] == 1
    driver.add_worker(16)
    driver.run_until_idle()
    stats = driver.stats().requests
    assert row(driver, "a")[PREEMPTED] + row(driver, "a")[DISPLACED] == stats.preemptions_total


def test_a_tenant_that_is_forgotten_counts_among_the_others(make_pool: MakePool) -> None:
    driver, _ = make_pool(16, tenants_max=2)
    for name in "abcd":
        driver.submit([1, 2], max_tokens=1, tenant=name)
        driver.run_until_idle()
    rows = driver.machine.cache.tenants.meters.rows
    assert driver.machine.cache.tenants.names[1:] == ["c", "d"]
    assert rows[:, PROMPT].tolist() == [4, 2, 2]
    assert sum(counts(rows[OTHERS], WHOLE)) == 2


def test_tenants_beyond_the_rows_count_among_the_others() -> None:
    meters = Meters(TENANT_ROWS + 10)
    meters.count(TENANT_ROWS, PROMPT, 3)
    for tenant in (TENANT_ROWS + 1, TENANT_ROWS + 10):
        meters.count(tenant, PROMPT)
        meters.observe(tenant, QUEUE, 1)
    meters.observe_gaps(np.array([TENANT_ROWS + 1, 1, 1]), np.array([5, 70, -1]))
    meters.forget(TENANT_ROWS + 1)
    assert meters.changed == {OTHERS, 1, TENANT_ROWS}
    assert (meters.rows[OTHERS, PROMPT], meters.rows[TENANT_ROWS, PROMPT], meters.rows[OTHERS, QUEUE.total]) == (
        2,
        3,
        2,
    )
    assert [meters.rows[row, GAP.total] for row in (OTHERS, 1)] == [5, 70]


@pytest.mark.parametrize("one_gap", [True, False])
def test_gaps_of_many_rows_are_counted_as_those_of_few(one_gap: bool) -> None:
    tenants = np.array([TENANT_ROWS + 1, 1, 2, *range(1, 2 * FEW)])
    gaps_us = np.arange(tenants.size) * 700 - 1
    together, apart = Meters(TENANT_ROWS + 10), Meters(TENANT_ROWS + 10)
    together.observe_gaps(tenants, 4_000 if one_gap else gaps_us)
    for i in range(0, tenants.size, FEW):
        apart.observe_gaps(tenants[i : i + FEW], 4_000 if one_gap else gaps_us[i : i + FEW])
    assert tenants.size > FEW
    assert together.rows.any()
    assert (together.rows == apart.rows).all()
    assert together.changed == apart.changed


def test_workers_that_come_and_go_and_restarts_are_counted(make_pool: MakePool) -> None:
    driver, worker = make_pool(8)
    other = driver.add_worker(4)
    driver.lose(other)
    driver.workers.clear()
    driver.apply(Restarted())
    driver.workers.append(worker)
    worker.number = 77
    hello = WorkerHello(rid=1, name=worker.name, pid=1, boot="boot", epoch=worker.epoch)
    driver.report(worker, hello)
    gauges = dict(zip(GAUGES, driver.machine.gauges(driver.now_us, (123, 4)), strict=True))
    names = ("registered", "returned", "left", "lost")
    assert [gauges[f"workers_{name}_total"] for name in names] == [2, 1, 0, 1]
    assert [gauges[name] for name in ("restarts_total", "journal_bytes", "journal_records_total")] == [1, 123, 4]


def published(driver: Driver, folder: Path) -> tuple[TablesWriter, TablesReader]:
    bounds = driver.machine.limits.bounds
    geometry = Geometry(
        slots=bounds.sequences_max, blocks=bounds.blocks_max, blocks_per_sequence=8, block_size=4, pools=2
    )
    tables = TablesWriter(folder / "tables", geometry, "boot", lambda tables: publish(driver.machine, tables, 0))
    return tables, TablesReader(tables.path)


def check(driver: Driver, numbers: ServiceMetrics) -> None:
    cache = driver.machine.cache
    rows = cache.tenants.meters.rows
    assert np.array_equal(numbers.tenants[: len(rows)], rows)
    usage = sum(group.pool.usage for group in cache.groups.values())
    assert np.array_equal(numbers.tenant_blocks[: len(rows), 0], usage)
    assert not numbers.tenant_blocks[:, 1:].any(), "no worker has a host file"
    assert numbers.facts.tenants == tuple(cache.tenants.names[1:])
    for number, group in cache.groups.items():
        told = dict(zip(POOL_COUNTS, numbers.pools[number].tolist(), strict=False))
        pool = group.pool
        assert [told[name] for name in POOL_COUNTS[:5]] == [
            pool.count,
            pool.free,
            pool.cached,
            pool.referenced,
            pool.quarantined,
        ]
        assert numbers.pools[number, STEP_TIME.start :].tolist() == group.step_times
        assert told["steps"] == group.steps_total


def test_what_is_published_is_what_was_counted(make_pool: MakePool, tmp_path: Path) -> None:
    driver, worker = make_pool(16)
    tables, reader = published(driver, tmp_path)
    for i in range(20):
        driver.submit([i, 1, 2], max_tokens=4, tenant="abc"[i % 3])
        driver.advance(METRICS_US)
        driver.turn()
        while worker.inbox:
            driver.report(worker, msgspec.structs.replace(worker.execute(worker.inbox.popleft()), duration_us=1500))
        publish(driver.machine, tables, driver.now_us)
        check(driver, reader.metrics())
    driver.run_until_idle()
    publish(driver.machine, tables, driver.now_us)  # no further event: published at once
    numbers = reader.metrics()
    check(driver, numbers)
    assert numbers.gauges == reader.gauges()
    assert numbers.facts.model == "m" and numbers.age_s < 60
    (told,) = numbers.facts.workers
    assert (told.name, told.state, told.pool, told.kv_dtype) == (worker.name, "ready", 0, "float32")
    tables.close()


def test_while_much_is_asked_they_are_published_every_few_milliseconds(make_pool: MakePool, tmp_path: Path) -> None:
    driver, _ = make_pool(16)
    tables, reader = published(driver, tmp_path)
    driver.submit([1], max_tokens=2, tenant="a")
    seen = []
    for _ in range(4):
        driver.advance(METRICS_US // 2)
        driver.submit([1], max_tokens=2, tenant="a")
        publish(driver.machine, tables, driver.now_us)
        seen.append(int(reader.metrics().tenants[1, TENANT_COUNTS.index("accepted")]))
    assert seen == [2, 2, 4, 4]
    tables.close()


def test_new_tables_get_everything(make_pool: MakePool, tmp_path: Path) -> None:
    driver, _ = make_pool(16)
    driver.submit([1, 2], max_tokens=2, tenant="a")
    driver.run_until_idle()
    tables, _ = published(driver, tmp_path)
    tables.close()
    all_changed(driver.machine)
    tables, reader = published(driver, tmp_path)
    check(driver, reader.metrics())
    tables.close()


def test_there_is_room_for_the_longest_names_that_may_be(make_pool: MakePool, tmp_path: Path) -> None:
    driver, _ = make_pool(4, tenants_max=TENANT_ROWS, pools_max=2, sequences_max=TENANT_ROWS)
    tables, reader = published(driver, tmp_path)
    wide = "\U0001d4d0"  # four bytes
    for i in range(TENANT_ROWS):
        driver.create(tenant=f"{i:02d}" + wide * 126)
    driver.lose(driver.workers[0])
    for number, name in ((8, "8"), (9, "9")):
        worker = FakeWorker(driver.machine, number, name + wide * 1000, 4, model_info(wide * 1000))
        driver.workers.append(worker)
        driver.report(worker, WorkerHello(rid=1, name=worker.name, pid=1 << 62))
        memory = {f"{i:02d}" + wide * 30: (1 << 63) - 1 for i in range(16)}
        ready = msgspec.structs.replace(driver.ready(worker), device_bytes=memory, kv_dtype=wide * 1000)
        driver.report(worker, ready)
    publish(driver.machine, tables, driver.now_us)
    facts = reader.metrics().facts
    lengths = [(len(told.name), len(told.kv_dtype), len(told.device_bytes)) for told in facts.workers]
    assert lengths == [(128, 128, 16)] * 2
    assert (len(facts.model), len(facts.tenants)) == (128, TENANT_ROWS)
    tables.close()
