"""A disk is read where that takes less time than computing, by measured costs of both."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvforge.coordinator.core.cache.costs import UNIT, StepCosts
from kvforge.coordinator.core.cache.disk_costs import DECLINED_MAX, MEASURED_MAX, PROBE_BLOCKS, DiskCosts
from kvforge.coordinator.core.clock import Clock
from kvforge.coordinator.core.events import Restarted
from kvforge.coordinator.core.reporting.statistics import pool_row
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.protocol.messages import (
    DISK_FAILED,
    DISK_READ,
    GetStats,
    Step,
    StepResult,
    WorkerHello,
    WorkerReady,
)
from kvforge.protocol.meters import POOL_COUNTS
from tests.coordinator.driver import FakeWorker
from tests.coordinator.test_disk_tier import DiskDriver, DiskWorker
from tests.coordinator.test_disk_windows import DiskWindowDriver, DiskWindowWorker
from tests.coordinator.test_host_tier import SIZE, HostFile
from tests.coordinator.test_windows import PAGES, RING, WINDOW_TOKENS
from tools.simulation.digest import state_digest

BLOCKS, TOKEN_US, WAIT_US = 12, 100, 1_000_000
COMPUTE_US = SIZE * TOKEN_US  # of one block
FAST_US, SLOW_US = COMPUTE_US // 10, 3 * COMPUTE_US
LONG, OTHER = ([by * i % 41 + 1 for i in range(BLOCKS * SIZE + 1)] for by in (7, 9))


class TimedDiskWorker(DiskWorker):
    """A worker that reports how long its steps took."""

    def execute(self, step: Step) -> StepResult:
        """Execute the step."""
        return msgspec.structs.replace(super().execute(step), duration_us=TOKEN_US * int(step.counts.sum()))


class TimedDiskDriver(DiskDriver):
    """A driver. A read from its disk takes `read_us` for each block, one after the other."""

    worker_type = TimedDiskWorker
    read_us, fillers, prompt = 0, 0, LONG

    def ready(self, worker: FakeWorker) -> WorkerReady:
        """Announce a disk that holds all prompts."""
        return msgspec.structs.replace(super().ready(worker), disk_blocks=60 * BLOCKS)

    def answer_order(self, order: list[int]) -> None:
        """Carry an order out, in its time."""
        if order[1] == DISK_READ:
            self.advance(self.read_us)
        super().answer_order(order)

    @property
    def costs(self) -> DiskCosts:
        """The costs of the only disk."""
        return self.disk_copies.costs

    def begin(self, blocks: int, file: HostFile) -> None:
        """Start a worker with so many blocks, and announce its disk."""
        self.files["w"] = file
        self.add_worker(blocks, "w")
        self.turn()
        self.announce()
        self.turn()

    def filler(self) -> list[int]:
        """Return a prompt that is nowhere, as long as the others."""
        self.fillers += 1
        return [(5 * i + self.fillers) % 53 + self.fillers for i in range(len(self.prompt))]

    def forget(self) -> None:
        """Leave what was served on the disk alone: another prompt takes all blocks of the pool."""
        self.serve(self.filler())
        for node_id in sorted(self.tier.cached_nodes(), reverse=True):  # parts before their entries
            self.tier.drop(node_id)

    def fetch(self, prompt: list[int] = LONG) -> int:
        """Serve a prompt that is on the disk alone. Return the blocks that came from there."""
        self.forget()
        before = self.books.loaded_total
        self.serve(prompt)
        return self.books.loaded_total - before


class WindowWorker(TimedDiskWorker, DiskWindowWorker):
    """Such a worker with layers with a window."""


class WindowDriver(TimedDiskDriver, DiskWindowDriver):
    """Such a driver."""

    worker_type = WindowWorker
    prompt = LONG[: 10 * SIZE + 1]


def with_disk(read_us: int) -> TimedDiskDriver:
    """A driver with two prompts on its disk, which has measured steps and no read."""
    driver = TimedDiskDriver(disk_wait_us=WAIT_US)
    driver.read_us = read_us
    driver.begin(BLOCKS + 1, HostFile(4 * BLOCKS))
    for prompt in (LONG, OTHER):
        assert driver.serve(prompt) == 0
    return driver


# behaviour: a request waits for a few blocks, which measure the disk, and computes the rest if that takes less time
def test_a_slow_disk_is_declined_once_it_is_measured() -> None:
    driver = with_disk(SLOW_US)
    assert driver.fetch(LONG) == PROBE_BLOCKS and driver.books.declined_total == 1
    began_us = driver.now_us
    assert [driver.fetch(prompt) for prompt in (OTHER, LONG)] == [0, 0]
    assert driver.now_us == began_us and driver.books.declined_total == 3 and not driver.books.late_total


def test_a_fast_disk_is_read_whole() -> None:
    driver = with_disk(FAST_US)
    assert [driver.fetch(prompt) for prompt in (LONG, OTHER, LONG)] == [BLOCKS] * 3
    assert driver.books.declined_total == 0


def test_a_disk_is_read_while_nothing_is_known_of_computing() -> None:
    driver = with_disk(SLOW_US)
    driver.forget()
    driver.lose(driver.only)
    driver.begin(BLOCKS + 1, HostFile(4 * BLOCKS))
    driver.disk_copies.costs.line.add(8, 8 * SLOW_US)
    assert driver.serve(LONG) == BLOCKS * SIZE
    assert driver.books.loaded_total == BLOCKS and driver.books.declined_total == 0
    assert driver.fetch(OTHER) == 0  # which computed


# behaviour: reads that others wait for come first
def test_reads_ahead_count() -> None:
    driver = with_disk(COMPUTE_US * 2 // 3)
    assert [driver.fetch(prompt) for prompt in (LONG, OTHER)] == [BLOCKS] * 2
    driver.forget()
    driver.silent = True
    first = driver.submit(LONG, 2)
    driver.turn()
    assert len(driver.only.orders) == BLOCKS
    same, other = driver.submit(LONG, 2), driver.submit(OTHER, 2)
    driver.turn()
    limits = [driver.explain(request_id=request).facts.get("limit") for request in (first, same, other)]
    assert limits[:2] == ["disk"] * 2 and driver.request(other).state == "running"
    assert len(driver.only.orders) == BLOCKS and driver.books.declined_total == 1
    driver.silent = False
    driver.run_until_idle()


# behaviour: a disk that became fast is used again
def test_a_declined_disk_is_measured_again() -> None:
    driver = with_disk(SLOW_US)
    driver.fetch(LONG)
    driver.read_us = FAST_US
    fetched = [driver.fetch(LONG) for _ in range(DECLINED_MAX)]
    assert fetched == [0] * (DECLINED_MAX - 1) + [BLOCKS]
    assert driver.books.declined_total == DECLINED_MAX and driver.costs.declined == 0
    assert driver.fetch(OTHER) == BLOCKS


def test_a_disk_that_stays_slow_is_declined_again() -> None:
    driver = with_disk(SLOW_US)
    fetched = [driver.fetch(LONG) for _ in range(2 * DECLINED_MAX)]
    assert fetched == ([PROBE_BLOCKS] + [0] * (DECLINED_MAX - 1)) * 2


# behaviour: a pool with blocks of several kinds has all of a hit from the disk, or a few blocks that measure it
@pytest.mark.parametrize("read_us", [FAST_US // 4, 4 * SLOW_US])
def test_a_hit_with_windows_is_read_whole_or_declined(read_us: int) -> None:
    driver = WindowDriver(disk_wait_us=WAIT_US)
    driver.window, driver.read_us = (WINDOW_TOKENS, PAGES, RING), read_us
    driver.begin(36, HostFile(80))
    assert driver.serve(driver.prompt) == 0
    found = [driver.fetch(driver.prompt) for _ in range(3)]
    if read_us > COMPUTE_US:
        assert found == [PROBE_BLOCKS, 0, 0] and driver.books.declined_total == 3
    else:
        assert found[0] > PROBE_BLOCKS and len(set(found)) == 1 and driver.books.declined_total == 0


# behaviour: the choice, what was measured and the measurement under way are shown, saved and restored
def test_statistics_show_declined_requests() -> None:
    driver = with_disk(SLOW_US)
    driver.fetch(LONG)
    (pool,) = driver.ask(GetStats(rid=driver.rid())).pools
    (group,) = driver.machine.cache.groups.values()
    row = dict(zip(POOL_COUNTS, pool_row(driver.machine.cache, group), strict=True))
    assert pool.disk.declined_total == row["disk_declined"] == 1


def test_a_snapshot_has_the_costs(tmp_path: Path) -> None:
    driver = with_disk(SLOW_US)
    for _ in range(3):
        driver.fetch(LONG)
    driver.costs.line = StepCosts()  # the next load is read, and measured
    driver.forget()
    driver.silent = True
    driver.submit(LONG, 2)
    driver.turn()
    for _ in range(3):
        driver.answer_order(driver.only.orders.pop())
    driver.costs.declined = 7
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    assert state_digest(machine) == state_digest(driver.machine)
    (group,) = machine.cache.groups.values()
    assert group.disk is not None and group.host is not None
    costs, line = group.disk.costs, vars(driver.costs.line)
    assert vars(costs.line) == line and line["token"] > 0
    numbers = (costs.declined, costs.began_us, costs.blocks, costs.due)
    assert numbers == (7, driver.costs.began_us, 2, 4) and costs.began_us > 0
    assert costs._steps is group.costs and costs._copies is group.host.read_costs and costs._clock is machine._clock
    assert group.disk.tier.declined_total == driver.books.declined_total == 3


# behaviour: reads that fail are no measure, nor is the time without a coordinator
def test_reads_that_fail_are_no_measure() -> None:
    driver = with_disk(SLOW_US)
    driver.outcomes[DISK_READ] = (DISK_FAILED, 0)
    assert driver.fetch(LONG) == 0
    assert driver.costs.line.token == 0 and driver.costs.began_us == -1


def test_the_time_without_a_coordinator_is_no_measure() -> None:
    driver = with_disk(FAST_US)
    driver.forget()
    driver.silent = True
    driver.submit(LONG, 2)
    driver.turn()
    driver.apply(Restarted())
    driver.advance(WAIT_US // 2)
    worker = driver.only
    worker.orders.clear()
    worker.number += 1
    driver.report(worker, WorkerHello(rid=9, name="w", pid=1, boot="boot", epoch=worker.epoch))
    driver.turn()
    driver.answer_order(worker.orders.pop())
    assert driver.costs.line.token == 0
    driver.silent = False
    driver.run_until_idle()
    assert driver.fetch(OTHER) == BLOCKS and 0 < driver.costs.line.of(1) <= 2 * FAST_US * UNIT


# behaviour: a disk that let a request wait in vain is slow, and the next request does not wait
def test_a_wait_in_vain_is_a_measure() -> None:
    driver = with_disk(FAST_US)
    driver.forget()
    driver.silent = True
    driver.submit(LONG, 2)
    driver.turn()
    driver.advance(WAIT_US)
    driver.run_until_idle()
    assert driver.books.late_total == 1 and driver.costs.line.of(1) == WAIT_US * UNIT
    driver.silent = False
    driver.work()
    assert not driver.disk_copies.stalled and driver.fetch(OTHER) == 0


# ------------------------------------------------------------------------------------------------- the measurements


def measured(*answers: tuple[int, int]) -> DiskCosts:
    """Costs after answers: microseconds since the one before, and blocks. The last one ends the reads."""
    clock = Clock(1000)
    costs = DiskCosts(clock, StepCosts(), StepCosts(), WAIT_US)
    costs.began()
    left = sum(blocks for _, blocks in answers)
    for us, blocks in answers:
        clock.now_us += us
        left -= blocks
        costs.progressed(blocks, left)
    return costs


def test_one_probe_tells_what_answers_take_from_what_blocks_take() -> None:
    costs = measured((2100, 1), *[(100, 1)] * 7)
    assert abs(costs.line.token - 100 * UNIT) <= UNIT and abs(costs.line.fixed - 2100 * UNIT) <= 8 * UNIT
    assert costs.began_us == -1


def test_blocks_that_come_together_share_their_time() -> None:
    assert measured((800, PROBE_BLOCKS)).line.of(1) == 100 * UNIT


def test_a_disk_that_gets_slower_is_noticed_amid_a_read() -> None:
    costs = measured(*[(10, 1)] * 2 * MEASURED_MAX, *[(1000, 1)] * 2 * MEASURED_MAX, (1, 1))
    assert costs.line.of(1000) > 500 * 1000 * UNIT


def test_reads_that_nothing_waits_for_any_more_are_no_measure_of_later_ones() -> None:
    clock = Clock(1000)
    costs = DiskCosts(clock, StepCosts(), StepCosts(), WAIT_US)
    costs.began()
    clock.now_us += WAIT_US + 1
    costs.began()
    clock.now_us += 50
    costs.progressed(1, 1)
    assert costs.line.of(1) == 50 * UNIT


@pytest.mark.parametrize(
    ("copy_us", "token_us", "found", "ahead", "worth"),
    [
        (0, 0, 20, 90, 20),
        (0, 30, 20, 0, 20),
        (0, 30, 20, 3, 0),
        (0, 30, 20, 2, 20),
        (16, 30, 20, 0, 0),
        (14, 30, 20, 0, 20),
        (0, 20, 20, 0, 0),
    ],
)
def test_the_quicker_way_is_chosen(copy_us: int, token_us: int, found: int, ahead: int, worth: int) -> None:
    copies, steps = StepCosts(), StepCosts()
    costs = DiskCosts(Clock(), copies, steps, WAIT_US)
    costs.line.add(10, 1050)  # 105 us for each block
    if copy_us:
        copies.add(10, 10 * copy_us)
    if token_us:
        steps.add(10, 10 * token_us)
    assert costs.worth(found, 4 * found, ahead) == worth


def test_a_few_blocks_are_no_probe() -> None:
    steps = StepCosts()
    steps.add(10, 10)
    costs = DiskCosts(Clock(), StepCosts(), steps, WAIT_US)
    costs.line.add(10, 1000)
    small = PROBE_BLOCKS - 1
    assert [costs.worth(small, 4 * small, 0) for _ in range(2 * DECLINED_MAX)] == [0] * 2 * DECLINED_MAX
    assert costs.worth(100, 400, 0) == PROBE_BLOCKS and costs.worth(small, 4 * small, 0) == small


def test_a_load_that_is_read_ends_a_row_of_declined_ones() -> None:
    steps = StepCosts()
    steps.add(10, 200)
    costs = DiskCosts(Clock(), StepCosts(), steps, WAIT_US)
    costs.line.add(10, 1000)
    for quicker in (False, True, False):
        tokens = 600 if quicker else 400
        counts = 1 if quicker else DECLINED_MAX
        assert [costs.worth(100, tokens, 0) for _ in range(counts)] == [100 if quicker else 0] * counts
    assert costs.worth(100, 400, 0) == PROBE_BLOCKS
