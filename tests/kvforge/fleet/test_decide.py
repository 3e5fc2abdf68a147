"""Decisions for a fleet: single ones, and whole sequences from any state in a simulated world."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvforge.fleet.deciding import (
    CreateAction,
    DrainAction,
    Gateway,
    Memory,
    RemoveAction,
    Replica,
    StopAction,
    View,
    Wanted,
    carried,
    decide,
    reason_for_no_room,
)
from kvforge.fleet.deciding.decide import GRACE_S
from kvforge.fleet.messages import (
    DRAINING,
    FAILED,
    GATEWAY,
    PLACING,
    READY,
    REPLICA,
    SILENT,
    STARTING,
    STOPPED,
    UNREADY,
    NodeStatus,
)
from kvforge.fleet.settings import FleetFile, parse

NAMES = [f"new{at}" for at in range(8)]


def file_of(replicas: str = "count = 2", gateways: str = "count = 0", rest: str = "", model: str = "m") -> FleetFile:
    return parse(f'[replicas]\n{replicas}\n[gateways]\n{gateways}\n{rest}\n[up]\nmodel = "{model}"\n')


def replica(name: str, phase: str = READY, file: FleetFile | None = None, **told: Any) -> Replica:
    silent_s = told.pop("silent_s", 0.0)
    return Replica(name, (file or FILE).revision, NodeStatus(phase=phase, **told), silent_s)


def gateway(name: str, phase: str = READY, file: FleetFile | None = None, **told: Any) -> Gateway:
    return Gateway(name, (file or FILE).gateway_revision, NodeStatus(phase=phase, **told))


FILE = file_of()
OLD = file_of(model="old")


def actions(file: FleetFile, *there: Replica, **wanted: Any) -> list[Any]:
    """Return the decided actions for these members."""
    return decided(file, *there, **wanted)[0]


def decided(file: FleetFile, *there: Replica, **wanted: Any) -> tuple[list[Any], str]:
    """Return the decided actions and the message."""
    gateways = tuple(one for one in there if isinstance(one, Gateway))
    replicas = tuple(one for one in there if not isinstance(one, Gateway))
    decision, _ = decide(Wanted(file, **wanted), View(replicas, gateways), Memory(), 0.0, NAMES)
    return decision.actions, "; ".join(decision.sentences)


# ---------------------------------------------------------------------------------------------------------- how many


def test_those_that_lack_are_created_at_once_and_those_that_are_there_are_left_alone() -> None:
    assert actions(FILE) == [CreateAction(REPLICA, "new0", FILE.revision), CreateAction(REPLICA, "new1", FILE.revision)]
    for phase in (PLACING, STARTING, UNREADY, SILENT, FAILED, READY):
        assert actions(FILE, replica("a"), replica("b", phase)) == [], phase
    assert actions(FILE, replica("a"), replica("b", DRAINING, running=1)) == [
        CreateAction(REPLICA, "new0", FILE.revision)
    ]


def test_whoever_serves_nobody_leaves_first_and_at_once() -> None:
    both = replica("a", running=3), replica("b", running=1)
    assert actions(FILE, *both, replica("c", PLACING)) == [RemoveAction(REPLICA, "c")]
    assert actions(FILE, *both, replica("c", STARTING)) == [StopAction(REPLICA, "c")]
    assert actions(FILE, *both, replica("c", FAILED)) == [StopAction(REPLICA, "c")]
    assert actions(FILE, *both, replica("c", UNREADY, running=9)) == [DrainAction("c", 600.0)]
    assert actions(FILE, *both, replica("c", running=2)) == [DrainAction("b", 600.0)]
    assert actions(FILE, *both, replica("c", running=2), count=1) == [DrainAction("b", 600.0), DrainAction("c", 600.0)]


def test_one_that_is_silent_is_given_time_before_it_is_removed() -> None:
    both = replica("a"), replica("b")
    done, said = decided(FILE, *both, replica("c", SILENT, silent_s=59.0))
    assert done == [] and said == "c should leave but does not answer"
    assert actions(FILE, *both, replica("c", SILENT, silent_s=60.0)) == [RemoveAction(REPLICA, "c")]
    assert actions(FILE, replica("a"), replica("c", SILENT, silent_s=1e6)) == [], "Ray brings it back where it can"


def test_who_leaves_ends_when_nothing_runs_there_or_its_time_is_over() -> None:
    both = replica("a"), replica("b")
    for told in ({"running": 1}, {"pending": 1}):
        assert actions(FILE, *both, replica("c", DRAINING, draining_s=599.0, **told)) == []
    assert actions(FILE, *both, replica("c", DRAINING)) == [StopAction(REPLICA, "c")]
    late = replica("c", DRAINING, running=1, draining_s=600.0 + GRACE_S)
    assert actions(FILE, *both, late) == [StopAction(REPLICA, "c")]
    assert actions(FILE, *both, replica("c", STOPPED)) == [RemoveAction(REPLICA, "c")]


def test_who_cannot_start_says_why_and_is_tried_again_later_or_when_asked() -> None:
    failed = replica("b", FAILED, reason="no such model", failed_s=299.0)
    done, said = decided(FILE, replica("a"), failed)
    assert done == [] and said == "b cannot start: no such model"
    assert actions(FILE, replica("a"), failed, again=True) == [StopAction(REPLICA, "b")]
    assert actions(FILE, replica("a"), replica("b", FAILED, failed_s=300.0)) == [StopAction(REPLICA, "b")]
    late = replica("b", STARTING, age_s=3600.0, reason="loading")
    done, said = decided(FILE, replica("a"), late)
    assert done == [StopAction(REPLICA, "b")] and said.startswith("b, after 3600 s, is starting: loading")


# ------------------------------------------------------------------------------------------------------------ update


def old(name: str, phase: str = READY, **told: Any) -> Replica:
    return replica(name, phase, OLD, **told)


def test_an_update_goes_one_by_one_and_a_new_one_serves_before_an_old_one_leaves() -> None:
    both = old("a", running=2), old("b")
    assert actions(FILE, *both) == [CreateAction(REPLICA, "new0", FILE.revision)]
    for phase in (PLACING, STARTING, UNREADY, SILENT):
        done, said = decided(FILE, *both, replica("n", phase, reason="why"))
        assert done == [] and said == f"the update waits for n, which is {phase}: why"
    assert actions(FILE, *both, replica("n")) == [DrainAction("b", 600.0)]
    leaving = old("b", DRAINING, running=1)
    assert actions(FILE, both[0], leaving, replica("n")) == []
    assert actions(FILE, both[0], replica("n")) == [CreateAction(REPLICA, "new0", FILE.revision)]
    assert actions(FILE, both[0], replica("n"), replica("m")) == [DrainAction("a", 600.0)]


def test_no_old_one_leaves_before_every_gateway_knows_the_new_one() -> None:
    file = file_of(gateways="count = 2")
    there = old("a"), old("b"), replica("n", file=file)
    g, h = gateway("g", file=file, ready=("a", "b", "n")), gateway("h", file=file, ready=("a", "b"))
    done, said = decided(file, *there, g, h)
    assert done == [] and "n, which not all gateways know yet" in said
    assert actions(file, *there, g, replace(h, status=g.status)) == [DrainAction("a", 600.0)]
    unready = gateway("h", UNREADY, file=file)
    assert actions(file, *there, g, unready) == [DrainAction("a", 600.0)], "an unready gateway blocks no drain"


def test_an_update_that_cannot_start_stands_still_and_a_third_revision_goes_past_it() -> None:
    bad = file_of(model="bad")
    there = old("a"), old("b"), replica("n", FAILED, bad, reason="no such model")
    done, said = decided(bad, *there)
    assert done == [] and "n cannot start: no such model" in said and "the update is stopped" in said
    assert actions(FILE, *there) == [StopAction(REPLICA, "n")]
    assert actions(OLD, *there) == [StopAction(REPLICA, "n")], "back to the old revision"


def test_without_surge_an_old_one_leaves_before_its_successor_comes() -> None:
    file, before = file_of("count = 2\nsurge = 0"), file_of("count = 2\nsurge = 0", model="old")
    a, b = replica("a", file=before), replica("b", file=before)
    assert actions(file, a, b) == [DrainAction("a", 600.0)]
    assert actions(file, b) == [CreateAction(REPLICA, "new0", file.revision)]
    assert actions(file, b, replica("n", STARTING, file)) == []
    assert actions(file, b, replica("n", file=file)) == [DrainAction("b", 600.0)]


def test_old_ones_that_serve_nobody_go_first() -> None:
    assert actions(FILE, old("a"), old("b", FAILED)) == [StopAction(REPLICA, "b")]
    assert actions(FILE, old("a"), old("b", PLACING)) == [RemoveAction(REPLICA, "b")]
    assert actions(FILE, old("a"), old("b", UNREADY), replica("n")) == [DrainAction("b", 600.0)]


# ---------------------------------------------------------------------------------------------------- gateways, the end


def test_gateways_leave_one_by_one_and_only_while_others_serve() -> None:
    file, before = file_of(gateways="count = 2\nport = 1"), file_of(gateways="count = 2\nport = 2")
    rest = replica("a", file=file), replica("b", file=file)
    known = {"ready": ("a", "b")}
    g, h = gateway("g", file=before, **known), gateway("h", file=before, **known)
    assert actions(file, *rest, g, h) == [StopAction(GATEWAY, "g")]
    assert actions(file, *rest, gateway("g", DRAINING, before), h) == [StopAction(GATEWAY, "g")], (
        "again, until it has ended"
    )
    assert actions(file, *rest, gateway("g", STOPPED, before), h) == [RemoveAction(GATEWAY, "g")]
    assert actions(file, *rest, h) == [CreateAction(GATEWAY, "new0", file.gateway_revision)]
    assert actions(file, *rest, gateway("n", STARTING, file), h) == []
    assert actions(file, *rest, gateway("n", file=file, **known), h) == [StopAction(GATEWAY, "h")]
    assert actions(file, *rest, *(gateway(n, file=file, **known) for n in "gnm")) == [StopAction(GATEWAY, "g")]


def test_the_end_is_that_of_gateways_and_then_of_replicas() -> None:
    file = file_of(gateways="count = 1")
    both = replica("a", file=file, running=1), replica("b", PLACING, file)
    assert actions(file, *both, gateway("g", file=file), ended=True) == [StopAction(GATEWAY, "g")]
    assert actions(file, *both, ended=True) == [DrainAction("a", 600.0), RemoveAction(REPLICA, "b")]
    assert actions(file, replica("a", DRAINING, file, running=1), ended=True) == []
    assert actions(file, ended=True) == []


# ------------------------------------------------------------------------------------------------------------ scaling

SCALED = "[autoscale]\nreplicas_min = 1\nreplicas_max = 5\nqueue_up_s = 2.0\nqueue_down_s = 0.1\n"
SCALED += "up_after_s = 10.0\ndown_after_s = 100.0\npause_s = 60.0"


class Scaling:
    """Serving replicas, and the scaling decisions over time."""

    def __init__(self, count: int) -> None:
        self.file = file_of("", rest=SCALED)
        self.count, self.memory, self.now_s = count, Memory(), 0.0

    def look(self, queue_s: float, after_s: float = 1.0, phase: str = READY) -> int:
        self.now_s += after_s
        ones = tuple(replica(f"r{at}", phase, self.file, queue_s=queue_s) for at in range(self.count))
        wanted = Wanted(self.file, self.count)
        decision, self.memory = decide(wanted, View(ones), self.memory, self.now_s, NAMES)
        created = sum(isinstance(action, CreateAction) for action in decision.actions)
        left = sum(isinstance(action, DrainAction) for action in decision.actions)
        assert self.count + created - left == decision.count
        self.count = decision.count
        return self.count


def test_a_queue_that_stays_long_brings_more_in_proportion_and_not_more_often_than_may_be() -> None:
    fleet = Scaling(2)
    assert [fleet.look(3.0) for _ in range(11)] == [2] * 10 + [3]
    assert [fleet.look(100.0) for _ in range(59)] == [3] * 59, "the pause"
    assert fleet.look(100.0) == 5, "at most"
    assert fleet.look(1e6, 1000.0) == 5
    fleet = Scaling(2)
    assert [fleet.look(0.0 if at == 8 else 9.0) for at in range(18)] == [2] * 18, "a break begins it anew"
    fleet = Scaling(2)
    fleet.look(1000.0)
    assert fleet.look(1000.0, 10.0) == 4, "twice as many at most"


def test_a_queue_that_stays_short_takes_one_away_and_between_the_two_nothing_happens() -> None:
    fleet = Scaling(3)
    assert fleet.look(0.0) == fleet.look(0.05, 99.0) == 3
    assert fleet.look(0.0) == 2
    assert fleet.look(0.0, 99.0) == 2
    assert fleet.look(0.0, 100.0) == 1
    assert fleet.look(0.0, 1e6) == fleet.look(0.0, 1e6) == 1, "at least"
    fleet = Scaling(3)
    assert {fleet.look(1.0, 1000.0) for _ in range(5)} == {3}


def test_nothing_is_scaled_while_somebody_starts_and_bounds_that_change_hold_at_once() -> None:
    fleet = Scaling(2)
    assert {fleet.look(100.0, 20.0, STARTING) for _ in range(5)} == {2}
    assert Scaling(9).look(0.0) == 5
    file = file_of("", rest=SCALED.replace("replicas_min = 1", "replicas_min = 3"))
    decision, _ = decide(Wanted(file, 2), View(), Memory(), 0.0, NAMES)
    assert decision.count == 3 == len(decision.actions)


def test_a_number_that_was_said_stays_until_a_file_says_another() -> None:
    two, three, scaled = file_of(), file_of("count = 3"), file_of("", rest=SCALED)
    assert carried(two, 5, file_of(model="other")) == 5 and carried(two, None, two) is None
    assert carried(two, 5, three) is None, "the file sets the number"
    assert carried(two, 5, scaled) == 5 and carried(three, None, scaled) == 3, "it begins with the existing replicas"
    assert carried(scaled, 4, file_of("", rest=SCALED, model="other")) == 4
    assert carried(scaled, 4, two) is None


# -------------------------------------------------------------------------------------------------------- whole ways


class World:
    """A simulation: decided actions happen in random order and time, and invariants are checked."""

    def __init__(self, file: FleetFile, ones: list[Replica], draw: Callable[[int], int]) -> None:
        self.file, self.draw, self.now_s = file, draw, 0.0
        self.ones = {one.name: one for one in ones}
        self.fresh = (f"n{at}" for at in itertools.count())

    def step(self) -> list[Any]:
        view = View(
            tuple(one for one in self.ones.values() if not isinstance(one, Gateway)),
            tuple(one for one in self.ones.values() if isinstance(one, Gateway)),
        )
        before = self.serving()
        names = [next(self.fresh) for _ in range(4)]
        decision, _ = decide(Wanted(self.file), view, Memory(), self.now_s, names)
        assert len({action.name for action in decision.actions}) == len(decision.actions)
        drained = [self.ones[action.name] for action in decision.actions if isinstance(action, DrainAction)]
        served = [one for one in drained if one.phase == READY]
        if served:
            least = self.file.count - (1 - self.file.replicas.surge)
            assert before - len(served) >= least, "too few serving members"
        for action in decision.actions:
            if isinstance(action, StopAction) and isinstance(self.ones[action.name], Replica):
                assert not self.ones[action.name].status.running, "its requests run"
            self.do(action)
        if not decision.actions:
            self.pass_time()
        return decision.actions

    def serving(self) -> int:
        return sum(one.phase == READY and not isinstance(one, Gateway) for one in self.ones.values())

    def do(self, action: Any) -> None:
        if isinstance(action, CreateAction):
            cls = Replica if action.kind == REPLICA else Gateway
            self.ones[action.name] = cls(action.name, action.revision, NodeStatus(phase=PLACING))
        elif isinstance(action, RemoveAction):
            del self.ones[action.name]
        else:
            self.say(action.name, phase=STOPPED if isinstance(action, StopAction) else DRAINING)

    def say(self, name: str, **told: Any) -> None:
        one = self.ones[name]
        self.ones[name] = replace(one, status=msgspec.structs.replace(one.status, **told), silent_s=0.0)

    def pass_time(self) -> None:
        """Advance one pending action; update all gateways with all replicas."""
        self.now_s += 1.0
        further = {PLACING: STARTING, STARTING: READY, UNREADY: READY, SILENT: READY, FAILED: FAILED}
        moving = [one for one in self.ones.values() if one.phase != READY]
        for one in moving[self.draw(len(moving)) :] if moving else ():
            if one.phase == DRAINING:
                self.say(one.name, running=0, pending=0)
            elif one.phase == FAILED:
                self.say(one.name, failed_s=1e6)
            elif one.phase in further:
                self.say(one.name, phase=further[one.phase])
        ready = tuple(one.name for one in self.ones.values() if one.phase == READY and not isinstance(one, Gateway))
        for one in list(self.ones.values()):
            if isinstance(one, Gateway):
                self.say(one.name, ready=ready)

    @property
    def settled(self) -> bool:
        replicas = [one for one in self.ones.values() if not isinstance(one, Gateway)]
        gateways = [one for one in self.ones.values() if isinstance(one, Gateway)]
        return (
            [one.revision for one in replicas] == [self.file.revision] * self.file.count
            and [one.revision for one in gateways] == [self.file.gateway_revision] * self.file.gateways.count
            and all(one.phase == READY for one in self.ones.values())
        )


PHASES = (PLACING, STARTING, READY, UNREADY, SILENT, DRAINING, STOPPED, FAILED)


@given(st.data())
def test_from_any_state_a_fleet_becomes_what_is_wanted_and_nobody_is_missed_on_the_way(data: st.DataObject) -> None:
    surge, gateways = data.draw(st.sampled_from((0, 1))), data.draw(st.integers(0, 2))
    count = data.draw(st.integers(1 if surge else 2, 3))
    text = f"count = {count}\nsurge = {surge}"
    wanted = file_of(text, f"count = {gateways}\nport = 1")
    before = file_of(text, f"count = {gateways}\nport = 2", model="old")
    ones: list[Replica] = []
    for at, (phase, new, runs) in enumerate(
        data.draw(st.lists(st.tuples(st.sampled_from(PHASES), st.booleans(), st.integers(0, 2)), max_size=5))
    ):
        told = {"running": runs} if phase in (READY, UNREADY, DRAINING) else {}
        ones.append(replica(f"r{at}", phase, wanted if new else before, **told))
    for at, (phase, new) in enumerate(
        data.draw(st.lists(st.tuples(st.sampled_from(PHASES), st.booleans()), max_size=3))
    ):
        ones.append(gateway(f"g{at}", phase, wanted if new else before))
    world = World(wanted, ones, lambda size: data.draw(st.integers(0, size - 1)))
    for _ in range(200):
        if not world.step() and world.settled:
            break
    assert world.settled, world.ones
    assert world.step() == [], "the state must be stable"


@pytest.mark.parametrize(
    ("bundle", "wanted", "most"),
    [
        ({"CPU": 3.0, "GPU": 2.0}, "2 GPUs and 3 CPUs", "8 CPUs, 1 GPU"),
        ({"CPU": 9.0}, "9 CPUs", "8 CPUs"),
        ({"CPU": 1.0, "big": 1.0}, "1 CPU and 1 big", "8 CPUs, 0 big"),
        ({"CPU": 8.0, "GPU": 1.0}, "1 GPU and 8 CPUs", "8 CPUs, 1 GPU"),
    ],
)
def test_why_nobody_has_room(bundle: dict[str, float], wanted: str, most: str) -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}]
    said = f"the cluster has no node with {wanted} for a replica; the largest has {most}"
    assert reason_for_no_room(bundle, nodes, "a replica") == said
    assert reason_for_no_room({"CPU": 4.0, "GPU": 1.0}, nodes, "a replica") == ""
