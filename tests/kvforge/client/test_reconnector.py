"""Times and limits of connection retries, on a simulated clock."""

from __future__ import annotations

import pytest

from kvforge.client import reconnector
from kvforge.client.pending import PendingCommand
from kvforge.client.reconnector import Reconnector
from kvforge.client.session import ClientSession
from kvforge.protocol import messages as m
from kvforge.protocol.codec import encode
from kvforge.protocol.errors import CoordinatorUnavailable, StateLost, VersionMismatch

GONE = CoordinatorUnavailable("gone")


class Line:
    """Sockets of a link; a variable of the test decides whether the coordinator is reachable."""

    def __init__(self) -> None:
        self.is_open = False
        self.there = False
        self.opened: list[float] = []
        self.hellos: list[m.Hello] = []
        self.now = 100.0

    def open(self) -> None:
        self.is_open = True
        self.opened.append(round(self.now - 100, 3))
        self.reconnector.opened()

    def close(self) -> None:
        self.is_open = False

    def writable(self) -> bool:
        return self.there

    def greet(self, hello: m.Hello) -> None:
        self.hellos.append(hello)

    def wake(self) -> None:
        """Do nothing: there is no waiting thread."""

    reconnector: Reconnector


class World:
    """A session with its line, its reconnector and a waiting command."""

    def __init__(self, reconnect_s: float) -> None:
        self.session, self.line = ClientSession("ipc:///x"), Line()
        self.reconnector = self.line.reconnector = Reconnector(self.session, self.line, reconnect_s)

    def answer(self, reply: m.Message) -> None:
        self.session.receive([bytes(frame) for frame in encode(reply)])
        self.reconnector.step()

    def connect(self) -> None:
        self.line.there = True
        with self.reconnector.wanting(), self.reconnector.waiting():
            self.run(0.0)
            self.welcome()

    def welcome(self, *, resumed: bool = True) -> None:
        rid = self.line.hellos[-1].rid
        self.answer(m.Welcome(rid=rid, version=1, boot="b", tables_path="/t", resumed=resumed))

    def refuse(self, error: VersionMismatch | StateLost) -> None:
        self.answer(m.Refused(rid=self.line.hellos[-1].rid, error=m.ErrorInfo.of(error)))

    def lose(self) -> None:
        self.line.close()
        self.reconnector.lost(GONE)
        self.reconnector.step()

    def run(self, seconds: float) -> None:
        """Advance time from one due time to the next, as a wait does."""
        end = self.line.now + seconds
        self.reconnector.step()
        for _ in range(10_000):
            due = self.reconnector.due()
            if due is None or due > end:
                self.line.now = end
                self.reconnector.step()
                return
            self.line.now = max(self.line.now, due)
            self.reconnector.step()
        raise AssertionError("due without end")

    def asked(self) -> PendingCommand:
        return self.session.expect(self.session.new_rid(), m.Done, "Drain")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(reconnect_s=10.0)
    for clock in ("monotonic", "plain_monotonic"):
        monkeypatch.setattr(reconnector, clock, lambda: made.line.now)
    made.connect()
    made.line.now += 5
    made.line.opened.clear()
    return made


def test_nothing_is_tried_while_nobody_waits(world: World) -> None:
    pending = world.asked()
    world.lose()
    assert world.reconnector.due() is None
    world.run(1000.0)
    assert (world.line.opened, pending.done) == ([], False)
    with world.reconnector.waiting():
        world.run(0.0)
        world.welcome()
    assert world.line.opened == [1005.0]
    assert world.line.hellos[-1].session == world.line.hellos[0].session == world.session.name
    assert world.line.hellos[-1].boot == "b"


def test_only_time_in_which_somebody_waits_counts(world: World) -> None:
    pending = world.asked()
    world.lose()
    world.line.there = False
    for _ in range(9):
        with world.reconnector.waiting():
            world.run(1.0)
        world.run(100.0)
    assert not pending.done
    with world.reconnector.waiting():
        world.run(0.9)
        assert not pending.done
        world.run(0.2)
    with pytest.raises(CoordinatorUnavailable, match=r"gone; tried again for 10 s"):
        pending.answer(m.Done)
    assert not world.line.is_open


def test_a_coordinator_that_hangs_up_is_tried_with_growing_pauses(world: World) -> None:
    world.lose()
    with world.reconnector.waiting():
        for _ in range(7):
            due = world.reconnector.due()
            assert due is not None
            world.line.now = due
            world.reconnector.step()
            assert world.line.is_open
            world.lose()  # before it answered
    assert world.line.opened == [5.0, 5.05, 5.105, 5.166, 5.232, 5.305, 5.386]


def test_connections_that_do_not_last_are_one_loss(world: World) -> None:
    pending = world.asked()
    with world.reconnector.waiting():
        world.lose()
        for _ in range(100):
            if pending.done:
                break
            world.run(reconnector.RETRY_PAUSE_S_MAX)
            if world.line.is_open:
                world.welcome()
                world.line.now += 0.01
                world.lose()
    assert isinstance(pending.error, CoordinatorUnavailable)
    # A connection that lasts resets the pauses.
    world.connect()
    world.line.now += 2
    again = world.asked()
    with world.reconnector.waiting():
        world.lose()
        world.line.there = False
        world.run(9.9)
        assert not again.done


@pytest.mark.parametrize("error", [VersionMismatch("1 to 2; you speak 3")])
def test_one_that_does_not_take_us_fails_everything(world: World, error: VersionMismatch) -> None:
    pending = world.asked()
    world.lose()
    with world.reconnector.waiting():
        world.run(0.0)
        world.refuse(error)
        with pytest.raises(VersionMismatch):
            pending.answer(m.Done)
        assert (world.line.is_open, world.reconnector.due()) == (False, None)


def test_one_that_lost_our_state_fails_what_waited_and_takes_what_comes(world: World) -> None:
    pending, name = world.asked(), world.session.name
    world.lose()
    with world.reconnector.waiting(), world.reconnector.wanting():
        world.run(0.0)
        world.refuse(StateLost("b", "c"))
        with pytest.raises(CoordinatorUnavailable, match="started without its earlier state"):
            pending.answer(m.Done)
        world.run(0.0)
        assert (world.line.hellos[-1].boot, world.line.hellos[-1].session != name) == ("", True)


def test_without_reconnecting_a_loss_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(reconnect_s=0.0)
    for clock in ("monotonic", "plain_monotonic"):
        monkeypatch.setattr(reconnector, clock, lambda: world.line.now)
    world.connect()
    pending = world.asked()
    with world.reconnector.waiting():
        world.lose()
        assert pending.error is GONE
        assert world.reconnector.due() is None
    assert world.line.hellos[0].session == ""
