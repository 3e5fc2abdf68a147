"""Preemption: a request comes back with KV from the host where copying is measured and takes less time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.cache.blocks import NO_BLOCKS
from kvforge.coordinator.core.cache.placement import Placement
from kvforge.coordinator.core.cache.returns import Return
from kvforge.coordinator.core.reporting.statistics import pool_row
from kvforge.coordinator.core.scheduling.swapping import PROBE_BLOCKS, costs_of_return, decide
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.protocol.messages import GetHealth, Step, StepResult
from kvforge.protocol.meters import POOL_COUNTS
from tests.coordinator.driver import continuation
from tests.coordinator.test_host_tier import FIRST, SECOND, HostDriver, HostFile, HostWorker
from tools.simulation.digest import state_digest

TOKENS = 24
TOKEN_US = 100


class TimedWorker(HostWorker):
    """A worker: a step takes TOKEN_US for each token, a copy `copy_us` for each block; 0: not measured."""

    copy_us = 10

    def execute(self, step: Step) -> StepResult:
        """Execute the step, and report the times."""
        copies = {
            "host_write_us": self.copy_us * (step.host_writes.size // 4),
            "host_read_us": self.copy_us * (step.host_reads.size // 4),
        }
        took_us = TOKEN_US * int(step.counts.sum())
        return msgspec.structs.replace(super().execute(step), duration_us=took_us, **copies)


class TimedDriver(HostDriver):
    """A driver with workers that report times."""

    worker_type = TimedWorker


def crowded(copy_us: int) -> tuple[TimedDriver, TimedWorker]:
    """A driver with a worker that has room for less than two whole sequences, and has measured nothing."""
    driver = TimedDriver()
    driver.files["w"] = HostFile(64)
    worker = driver.add_worker(16, "w")
    assert isinstance(worker, TimedWorker)
    worker.copy_us = copy_us
    return driver, worker


def preempted(driver: TimedDriver) -> list[Return]:
    """Serve two requests that do not fit together, and return how those that were preempted came back."""
    salt = str(driver.machine.requests.accepted_total)  # nothing of earlier calls is found
    requests = [driver.submit(prompt, TOKENS, salt=salt) for prompt in (FIRST, SECOND)]
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in requests] == [continuation(p, TOKENS) for p in (FIRST, SECOND)]
    assert any(driver.request(request).preemptions for request in requests)
    found = [driver.machine.requests.known(request) for request in requests]
    return [request.returns for request in found if request is not None and request.returns is not None]


# behaviour: copying is chosen if both ways are measured and it takes less time
def test_a_cheaper_copy_brings_a_preempted_request_back() -> None:
    driver, _ = crowded(copy_us=10)
    preempted(driver)  # measures
    before = driver.machine.requests.recomputed_tokens_total
    (how,) = preempted(driver)
    assert how.read == how.found > 0 and 0 <= how.copy_us < how.compute_us
    assert driver.machine.requests.recomputed_tokens_total - before < 4 * how.found
    (pool,) = driver.stats().pools
    assert pool.host_swapped_total >= 1


# behaviour: what a swap reads and saves is counted, by the costs that chose it
def test_swaps_are_counted_with_what_they_save() -> None:
    driver, _ = crowded(copy_us=10)
    ways = preempted(driver) + preempted(driver)
    (pool,) = driver.stats().pools
    assert pool.host_swapped_blocks_total == sum(how.read for how in ways)
    measured = [how.compute_us - how.copy_us for how in ways if how.copy_us >= 0]
    assert pool.host_swap_saved_us_total == sum(measured) > 0 and len(measured) < len(ways)
    (group,) = driver.machine.cache.groups.values()
    row = dict(zip(POOL_COUNTS, pool_row(driver.machine.cache, group), strict=True))
    assert (row["host_swapped"], row["host_swapped_blocks"]) == (len(ways), pool.host_swapped_blocks_total)
    assert row["host_swap_saved_us"] == pool.host_swap_saved_us_total and row["host_unswapped"] == 0
    (health,) = driver.ask(GetHealth(rid=driver.rid())).workers
    assert (health.host_swapped_total, health.host_swap_saved_us_total) == (len(ways), sum(measured))


def test_a_dearer_copy_does_not() -> None:
    driver, worker = crowded(copy_us=10_000)
    preempted(driver)
    before, reads = driver.machine.requests.recomputed_tokens_total, len(worker.steps)
    (how,) = preempted(driver)
    assert how.read == 0 < how.found and how.copy_us > how.compute_us > 0
    assert not any(step.host_reads.size for step in worker.steps[reads:])
    assert driver.machine.requests.recomputed_tokens_total - before >= 4 * how.found
    (pool,) = driver.stats().pools
    assert pool.host_unswapped_total >= 1


def test_before_the_first_copy_is_measured_a_few_blocks_are_read() -> None:
    driver, _ = crowded(copy_us=0)
    ways = preempted(driver) + preempted(driver)
    assert ways and all(how.read == min(how.found, PROBE_BLOCKS) and how.copy_us == -1 for how in ways)


@pytest.mark.parametrize(("copies", "steps", "read"), [(0, 0, 0), (3, 0, 0), (0, 3, PROBE_BLOCKS), (3, 3, 20)])
def test_what_is_not_measured_is_not_chosen(copies: int, steps: int, read: int) -> None:
    driver, _ = crowded(copy_us=10)
    (group,) = driver.machine.cache.groups.values()
    assert group.host is not None
    for _ in range(copies):
        group.host.read_costs.add(4, 40)
    for _ in range(steps):
        group.costs.add(16, 16 * TOKEN_US)
    plan = Placement(group, NO_BLOCKS, (-1, 0), 24)
    plan.host = tuple(range(1, 21))
    decided = decide(plan, 4)
    assert decided.host == plan.host[:read] and decided.needed == plan.needed
    expected = Return(20, read, 200 if copies else -1, 80 * TOKEN_US if steps else -1)
    assert decided.returns == expected


# behaviour: the cost of a preemption is that of the cheaper way back
def test_the_cost_of_a_victim_is_that_of_the_cheaper_way_back() -> None:
    driver, _ = crowded(copy_us=10)
    (group,) = driver.machine.cache.groups.values()
    tokens = np.array([0, 3, 4, 40])
    assert costs_of_return(group, tokens, 4).tolist() == tokens.tolist()
    preempted(driver)
    copies, computed = costs_of_return(group, tokens, 4), tokens * group.costs.token
    assert copies[:2].tolist() == computed[:2].tolist() and copies[3] < computed[3]
    assert group.host is not None
    group.host.read_costs.token *= 1000
    assert costs_of_return(group, tokens, 4).tolist() == computed.tolist()


# behaviour: a step that waits for blocks from the host is no measure of what steps cost
@pytest.mark.parametrize("reads", [False, True])
def test_steps_that_read_from_the_host_are_no_measure_of_steps(reads: bool) -> None:
    driver, worker = crowded(copy_us=10)
    driver.serve(FIRST)
    (group,) = driver.machine.cache.groups.values()
    group.drafts = 1
    driver.submit([90], 2)
    driver.turn()
    if reads:
        message = group.sent[0].message
        read = msgspec.structs.replace(message, host_reads=np.array([0, 0, 0, 0], np.int32))
        group.sent[0] = msgspec.structs.replace(group.sent[0], message=read)
    before = vars(group.costs).copy(), vars(group.row_costs.line).copy()
    driver.report(worker, msgspec.structs.replace(worker.execute(worker.inbox[0]), duration_us=1 << 30))
    assert ((vars(group.costs), vars(group.row_costs.line)) == before) is reads


# behaviour: explanations say why
@pytest.mark.parametrize(("copy_us", "words"), [(10, "came back from the host"), (10_000, "was computed again after")])
def test_an_explanation_says_why(copy_us: int, words: str) -> None:
    driver, _ = crowded(copy_us)
    preempted(driver)
    requests = [driver.submit(prompt, TOKENS) for prompt in (FIRST, SECOND)]
    said: list[str] = []
    while any(driver.request(request).state != "finished" for request in requests):
        driver.step()
        for request in requests:
            said += driver.explain(request_id=request).sentences
    (sentence, *_) = [sentence for sentence in said if words in sentence]
    assert "copying them takes" in sentence and "computing them" in sentence


# behaviour: a snapshot keeps what was measured, and what was chosen
def test_a_snapshot_keeps_the_costs(tmp_path: Path) -> None:
    driver, _ = crowded(copy_us=10)
    preempted(driver)
    preempted(driver)
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    assert state_digest(machine) == state_digest(driver.machine)
    (group,), (restored,) = driver.machine.cache.groups.values(), machine.cache.groups.values()
    assert group.host is not None and restored.host is not None
    assert vars(restored.host.read_costs) == vars(group.host.read_costs) and group.host.read_costs.token
