"""Streams against a coordinator with random valid actions: pause, take over, restart, cut, end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvforge.client.pending import PendingCommand
from kvforge.client.results import finished
from kvforge.client.session import ClientSession
from kvforge.protocol import messages as m
from kvforge.protocol.errors import (
    InvalidRequest,
)
from tests.kvforge.client.test_session import accepted, end, rows, take
from tests.kvforge.client.test_streams import attach, submit


@pytest.fixture
def session() -> ClientSession:
    return ClientSession("ipc:///nowhere")


class Coordinator:
    """One request and its stream to one connection. Sent messages wait in `out` until delivery.

    As in the real coordinator, answers are sent at once and everything else at the end of a turn, in one message: rows
    collected before an Attach follow its answer. A full connection may lose a message; the coordinator notices before
    it sends the next one.
    """

    def __init__(self, made: int) -> None:
        self.made, self.over = made, False
        self.streams, self.lost, self.paused = True, False, False
        self.rows: list[int] = []
        self.ends = 0
        self.out: list[m.Message] = []
        self.commands: list[m.Message] = []

    @property
    def busy(self) -> bool:
        return any((self.out, self.commands, self.rows, self.ends, self.lost, self.paused))

    def make(self) -> None:
        self.rows += [self.made] * self.streams
        self.made += 1

    def end(self) -> None:
        self.over = True
        self.ends += self.streams

    def notice(self) -> None:
        if self.lost:
            self.lost, self.streams, self.paused = False, False, True

    def turn(self, arrives: bool) -> None:
        self.notice()
        if not self.rows and not self.ends and not self.paused:
            return
        stream = rows(*((7, offset, 100 + offset) for offset in self.rows), ended=(end(7, self.made),) * self.ends)
        fields: dict[str, Any] = {name: getattr(stream, name) for name in stream.__struct_fields__}
        if arrives:
            self.out.append(m.Stream(**{**fields, "paused": (7,) * self.paused}))
        self.lost, self.rows, self.ends, self.paused = not arrives, [], 0, False

    def answer(self) -> None:
        command = self.commands.pop(0)
        assert isinstance(command, m.Attach | m.Submit), "nothing was given up and nothing is missing"
        offset = command.offset if isinstance(command, m.Attach) else 0
        if offset > self.made:
            problem = InvalidRequest("offset", "behind what there is")
            self.out.append(m.Refused(rid=command.rid, error=m.ErrorInfo.of(problem)))
            return
        if isinstance(command, m.Attach):
            self.out.append(m.Attached(rid=command.rid, request_id=7, seed=5, offset=offset))
        else:
            self.out.append(m.Accepted(rid=command.rid, request_id=7, seed=5, repeated=True))
        self.streams, self.paused = True, False
        self.rows += range(offset, self.made)
        self.ends += self.over


ACTIONS = st.one_of(
    st.sampled_from(["make", "make", "turn", "lose", "notice", "answer", "deliver", "repeat", "end"]),
    st.tuples(st.sampled_from(["attach", "abandon"]), st.integers(0, 6)),
)


@given(st.integers(0, 4), st.lists(ACTIONS, max_size=60))
def test_whoever_reads_gets_every_token_from_its_offset_on(start: int, actions: list[Any]) -> None:
    session, coordinator = ClientSession("ipc:///nowhere"), Coordinator(start)
    readers = [(attach(session, 7, start) if start else accepted(session, 7), start)]
    waiting: list[tuple[PendingCommand, int]] = []

    def deliver() -> None:
        for reply in take(session, coordinator.out.pop(0)):
            coordinator.commands.append(reply)

    for action in actions:
        match action:
            case "make" if not coordinator.over:
                coordinator.make()
            case "end" if not coordinator.over:
                coordinator.end()
            case "turn" | "lose":
                coordinator.turn(arrives=action == "turn")
            case "notice":
                coordinator.notice()
            case "answer" if coordinator.commands:
                coordinator.answer()
            case "deliver" if coordinator.out:
                deliver()
            case "repeat":
                pending = submit(session, key=True)
                waiting.append((pending, 0))
                coordinator.commands.append(m.Submit(rid=pending.rid, max_tokens=99))
            case (kind, offset):
                track = session.tracked(7, offset)
                if track is not None:
                    readers.append((track, offset))
                    continue
                pending = session.expect(session.new_rid(), m.Attached, "Attach")
                coordinator.commands.append(m.Attach(rid=pending.rid, request_id=7, offset=offset))
                if kind == "abandon":
                    assert session.forget(pending) == []
                else:
                    waiting.append((pending, offset))
    if not coordinator.over:
        coordinator.end()
    while coordinator.busy:
        if coordinator.commands:
            coordinator.answer()
        coordinator.turn(arrives=True)
        if coordinator.out:
            deliver()
    for pending, offset in waiting:
        assert pending.done
        readers += [(track, offset) for track in pending.tracks]
        assert len(pending.tracks) == (offset <= coordinator.made or pending.error is None)
    for track, offset in readers:
        assert finished(track, offset).tokens == tuple(range(100 + offset, 100 + coordinator.made))
    assert session.running == ()
