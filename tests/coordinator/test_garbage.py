"""Garbage collection runs when the coordinator is idle, never triggered by an allocation count."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FrameType

import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.host.garbage import TURNS_MAX, TURNS_MIN, GarbageCollector
from kvforge.coordinator.server import SPIN_CORES_MIN, SPIN_US, spin_us
from tests.coordinator.driver import Driver


@pytest.fixture
def garbage() -> Iterator[GarbageCollector]:
    ticks = iter(range(0, 1 << 40, 5000))
    made = GarbageCollector(lambda: next(ticks))
    made.start()
    yield made
    made.stop()


class Ring:
    """A reference cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.me = self


def rings() -> int:
    return sum(isinstance(thing, Ring) for thing in gc.get_objects())


def test_nothing_is_collected_by_itself_and_everything_when_idle(garbage: GarbageCollector) -> None:
    assert not gc.isenabled()
    for _ in range(5000):
        Ring()
    assert rings() == 5000
    for _ in range(TURNS_MIN - 1):
        garbage.turn(idle=True)
    assert garbage.collections == 0
    garbage.turn(idle=False)
    assert rings() == 5000
    garbage.turn(idle=True)
    assert (garbage.collections, rings()) == (1, 0)
    assert (garbage.longest_us, garbage.total_us) == (5.0, 5.0)


def test_a_loop_that_is_never_idle_collects_now_and_then(garbage: GarbageCollector) -> None:
    for _ in range(3 * TURNS_MAX):
        garbage.turn(idle=False)
    assert garbage.collections == 3


@pytest.mark.parametrize("frozen", [0, 5])
def test_the_collector_is_as_before_afterwards(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thaw would let each later collection of a process that froze its modules walk them all."""
    thaws = list[bool]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "unfreeze", lambda: thaws.append(True))
    made = GarbageCollector(lambda: 0)
    made.start()
    assert not gc.isenabled()
    made.stop()
    assert gc.isenabled() and thaws == [True] * (not frozen)


@pytest.mark.parametrize(("cores", "chosen"), [(1, 0), (SPIN_CORES_MIN - 1, 0), (SPIN_CORES_MIN, SPIN_US)])
def test_the_loop_spins_only_where_cores_are_free(cores: int, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert spin_us(-1) == chosen
    assert spin_us(70) == 70
    assert spin_us(0) == 0


def test_the_core_leaves_nothing_to_the_collector() -> None:
    """A stored exception keeps its traceback's frames, and all their local variables, alive."""
    driver = Driver(step_rows_max=8, queue_max=1000, quotas={"b": Quota(ceiling=12)})
    driver.add_worker(24)
    driver.add_worker(20)
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        for i in range(60):
            driver.submit([i % 7] * (1 + i % 19), max_tokens=1 + i % 11, tenant="ab"[i % 2], count=1 + 2 * (i % 3 == 0))
            driver.step()
        driver.run_until_idle(2000)
        gc.collect()
        kinds = {type(thing) for thing in gc.garbage}
        ours = {kind.__name__ for kind in kinds if kind.__module__.startswith("kvforge")}
        frames = [thing.f_code.co_name for thing in gc.garbage if isinstance(thing, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert (ours, frames) == (set(), [])
