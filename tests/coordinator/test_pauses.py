"""The coordinator's garbage is collected when it has time, never because an allocation happened to be the 700th."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from coordinator.pauses import TURNS_MAX, TURNS_MIN, Pauses
from coordinator.server import SPIN_CORES_MIN, SPIN_US, spin_us


@pytest.fixture
def pauses() -> Iterator[Pauses]:
    ticks = iter(range(0, 1 << 40, 5000))
    made = Pauses(lambda: next(ticks))
    made.start()
    yield made
    made.stop()


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


def rings() -> int:
    return sum(isinstance(thing, Ring) for thing in gc.get_objects())


def test_nothing_is_collected_by_itself_and_everything_when_idle(pauses: Pauses) -> None:
    assert not gc.isenabled()
    for _ in range(5000):
        Ring()
    assert rings() == 5000
    for _ in range(TURNS_MIN - 1):
        pauses.turn(idle=True)
    assert pauses.collections == 0
    pauses.turn(idle=False)
    assert rings() == 5000
    pauses.turn(idle=True)
    assert (pauses.collections, rings()) == (1, 0)
    assert (pauses.longest_us, pauses.total_us) == (5.0, 5.0)


def test_a_loop_that_is_never_idle_collects_now_and_then(pauses: Pauses) -> None:
    for _ in range(3 * TURNS_MAX):
        pauses.turn(idle=False)
    assert pauses.collections == 3


def test_the_collector_is_as_before_afterwards() -> None:
    made = Pauses(lambda: 0)
    made.start()
    made.stop()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("cores", "chosen"), [(1, 0), (SPIN_CORES_MIN - 1, 0), (SPIN_CORES_MIN, SPIN_US)])
def test_the_loop_spins_only_where_cores_are_free(cores: int, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert spin_us(-1) == chosen
    assert spin_us(70) == 70
    assert spin_us(0) == 0
