"""Snapshots and digests leave nothing out: a change of any number of the core shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.requests.request import RUNNING, Request
from kvforge.coordinator.core.waits import Wait
from tools.simulation.attributes import WATCHERS
from tools.simulation.attributes import attributes as known
from tools.simulation.coordinators import SimulatedCoordinator
from tools.simulation.runner import drawn
from tools.simulation.snapshots import Snapshots
from tools.simulation.state_equality import equality_digest
from tools.simulation.world import World

EVENTS_MAX = 1500
NO_STATE = SimulatedCoordinator | FunctionType | BuiltinFunctionType | type
# A refusal is counted, makes its sender known, and takes time; snapshots leave these out.
NOT_SAID = {("RequestTable", "refused_total"), ("Clock", "now_us")}
# Missing after a recovery, and left out of a likeness.
DERIVED = {("RunningRows", "readers_changed"), ("Deadlines", "first_us")}


class Enough(Exception):
    """The world has reached the state that the test needs."""


# A world without recurrent states and one with them; two more of each kind are soak tests.
MORE = [pytest.param(world, marks=pytest.mark.soak) for world in ((5, 0.0), (9, 1.0))]


@pytest.fixture(params=[(3, 0.0), (1, 1.0), *MORE])
def busy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Machine, Snapshots]]:
    """A busy machine with running rows and waiting requests; its snapshots were set up at the start."""
    seed, states = request.param
    settings, drawer = drawn(seed, states)
    world = World(settings, str(seed), tmp_path)
    machine = world.coordinator.machine
    snapshots = Snapshots(machine)
    snapshots.capture()

    def note(*_: object) -> None:
        running = any(group.running and group.sent for group in machine.cache.groups.values())
        if running and machine.admission.waiting and world.events > EVENTS_MAX // 3:
            raise Enough

    world.note = note  # type: ignore[method-assign]
    try:
        with pytest.raises(Enough):
            world.run(drawer.actions(), EVENTS_MAX)
        yield machine, snapshots
    finally:
        world.close()


def objects(machine: Machine) -> list[Any]:
    """Return all reachable objects, found by attributes and items instead of pickle; without finished requests."""
    found: dict[int, Any] = {}
    ended = set(map(id, machine.requests.finished.values()))
    stack: list[Any] = [machine]
    while stack:
        value = stack.pop()
        if id(value) in found or id(value) in ended or isinstance(value, NO_STATE):
            continue
        found[id(value)] = value
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            stack += value
        elif isinstance(value, MethodType):
            stack.append(value.__self__)
        elif isinstance(value, msgspec.Struct):
            stack += [getattr(value, name) for name in value.__struct_fields__]
        else:
            stack += [value for _, value in attributes(value)]
    return list(found.values())


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes that can be set."""
    if isinstance(value, Request):
        return [(name, getattr(value, name)) for name in Request.__slots__]
    return list(getattr(value, "__dict__", {}).items())


def test_all_parts_of_a_class_have_the_same_attributes(busy: tuple[Machine, Snapshots]) -> None:
    machine, _ = busy
    parts = [part for part in objects(machine) if type(part).__module__.startswith("kvforge.coordinator.")]
    with_dictionary = [part for part in parts if hasattr(part, "__dict__")]
    for part in with_dictionary:
        assert vars(part).keys() - WATCHERS == known(part).keys(), type(part).__name__
    assert len(with_dictionary) > 20


@pytest.mark.parametrize("renewed", [False, True])
def test_a_snapshot_shows_every_change_of_a_number(busy: tuple[Machine, Snapshots], renewed: bool) -> None:
    machine, snapshots = busy
    if renewed:
        snapshots.renew()
    every_change_shows(machine, snapshots.capture, NOT_SAID)


def test_an_equality_digest_shows_every_change_of_a_number(busy: tuple[Machine, Snapshots]) -> None:
    machine, _ = busy
    machine.cache.store.changed = None  # events not yet sent to mirrors are not part of the state
    every_change_shows(machine, lambda: equality_digest(machine), DERIVED)


def test_the_order_of_a_set_is_no_difference(busy: tuple[Machine, Snapshots]) -> None:
    machine, _ = busy
    machine.streams._paused[7] = {0, 8}
    before = equality_digest(machine)
    machine.streams._paused[7] = {8, 0}
    assert list(machine.streams._paused[7]) == [8, 0]
    assert equality_digest(machine) == before
    machine.streams._paused[7] = {16, 8}
    assert equality_digest(machine) != before


def every_change_shows(machine: Machine, said: Callable[[], Any], not_said: set[tuple[str, str]]) -> None:
    """Change each number and each array of the machine and back; `said` returns the state."""
    before = said()
    arrays = numbers = 0
    for value in objects(machine):
        if isinstance(value, np.ndarray) and value.size and value.flags.writeable:
            arrays += 1
            last = value[(slice(-1, None),) * value.ndim]
            kept = last.copy()
            last[...] = np.frombuffer(bytes(byte ^ 1 for byte in kept.tobytes()), kept.dtype).reshape(kept.shape)
            assert said() != before, f"{value!r}"
            last[...] = kept
        for name, number in attributes(value):
            if type(number) not in (int, float, bool) or (type(value).__name__, name) in not_said:
                continue
            numbers += 1
            setattr(value, name, number + 1)
            assert said() != before, f"{type(value).__name__}.{name}"
            setattr(value, name, number)
    assert said() == before
    assert (arrays, numbers) > (50, 200)


def test_a_snapshot_shows_an_array_that_takes_anothers_place(busy: tuple[Machine, Snapshots]) -> None:
    machine, snapshots = busy
    before = snapshots.capture()
    blocks = machine.cache.blocks
    refcount = blocks.refcount
    blocks.refcount = refcount.copy()
    assert snapshots.capture() != before
    blocks.refcount = refcount
    assert snapshots.capture() == before


@pytest.mark.parametrize("set_up_now", [False, True])
def test_an_equal_wait_in_the_place_of_another_is_no_change(busy: tuple[Machine, Snapshots], set_up_now: bool) -> None:
    """A turn that plans nothing stalls its rows anew, also where the first snapshot found them stalled."""
    machine, snapshots = busy
    request = next(each for each in machine.requests.live.values() if each.state == RUNNING)
    request.wait = Wait("tenant ceiling", (), 1, 1, 1, "its ceiling is 13")
    if set_up_now:
        snapshots = Snapshots(machine)
    before = snapshots.capture()
    request.wait = msgspec.structs.replace(request.wait)
    assert snapshots.capture() == before
    request.wait = msgspec.structs.replace(request.wait, short=2)
    assert snapshots.capture() != before
