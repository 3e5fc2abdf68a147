"""The benchmark of a turn terminates, whatever makes its turns due."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from benchmarks import control_plane


def test_a_turn_that_comes_before_the_workers_answer_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat can make a turn due that sends no step; the benchmark must not wait for a step then."""
    monkeypatch.setattr(control_plane, "WARM_STEPS", 2)
    turn, early = control_plane.Shell.turn, iter(range(1 << 20))

    def sometimes_early(shell: control_plane.Shell) -> float:
        return 0.0 if next(early) % 3 == 2 else turn(shell)

    monkeypatch.setattr(control_plane.Shell, "turn", sometimes_early)
    taken, *_ = control_plane.whole(4, 8)
    assert len(taken) == 8
    assert min(taken) > 0, "the benchmark must measure the turn that handled the answer"


def test_a_step_that_its_socket_accepts_in_parts_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator writes the rest of a step when it polls; a benchmark of one thread must let it."""
    monkeypatch.setattr(control_plane, "WARM_STEPS", 2)
    made, parts = control_plane.Shell.__init__, []

    def with_small_buffers(shell: control_plane.Shell, folder: Path, limits: Any, durability: str = "none") -> None:
        made(shell, folder, limits, durability)
        shell.worker.setsockopt(zmq.RCVTIMEO, 10_000)  # a failure, not a hang
        (connection,) = shell.workers._table.by_identity.values()
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's minimum
        dequeue = connection._dequeue_sent

        def dequeue_sent(sent: int) -> bool:
            parts.append(sent)
            return dequeue(sent)

        monkeypatch.setattr(type(connection), "_dequeue_sent", lambda _connection, sent: dequeue_sent(sent))

    monkeypatch.setattr(control_plane.Shell, "__init__", with_small_buffers)
    taken, *_ = control_plane.whole(64, 4)
    assert len(taken) == 4
    assert parts, "no step was longer than the socket's buffer"
