"""A worker's connection: steps arrive by socket and shared memory, and each is taken once, in order."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import monotonic

import numpy as np
import pytest
import zmq

from kvforge.protocol import codec
from kvforge.protocol.layout import STEP_SLOT_BYTES, Geometry
from kvforge.protocol.messages import WORKER_MESSAGES, Step, Stop, WorkerHello, WorkerLoading
from kvforge.protocol.tables import TablesReader, TablesWriter
from kvforge.protocol.transport import worker_endpoint
from kvforge.worker.step.connection import CoordinatorConnection
from tests.router import router
from tests.standstill import Standstill

POOL, EPOCH = 0, 3
STEPS = 300


class Coordinator:
    """The coordinator's side of one connection."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listen()
        self.tables = TablesWriter(
            folder / "t", Geometry(slots=4, blocks=16, blocks_per_sequence=4, block_size=4), "boot"
        )
        self._identity = b""

    def _listen(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = router(self._context)
        self._socket.bind(worker_endpoint(self._folder))

    def greeted(self) -> list[bytes]:
        """Wait for a worker's first message and return it."""
        self._identity, *frames = self._socket.recv_multipart()
        return frames

    def hang_up(self) -> None:
        """Drop every connection like a killed coordinator, and listen again."""
        self._socket.close(0)
        self._context.term()
        self._listen()

    def show(self, number: int, frames: list[bytes | memoryview]) -> None:
        self.tables.step_ring.put(POOL, EPOCH, number, frames)

    def send(self, frames: list[bytes | memoryview]) -> None:
        self._socket.send_multipart([self._identity, *frames])

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
        self.tables.close()


@pytest.fixture
def ends() -> Iterator[tuple[Coordinator, CoordinatorConnection]]:
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as name:
        coordinator = Coordinator(Path(name))
        link = CoordinatorConnection(worker_endpoint(Path(name)), read)
        try:
            link.wait_connected(60)
            assert link.send(WorkerHello(rid=1, name="w", pid=1))
            coordinator.greeted()
            yield coordinator, link
        finally:
            link.close(goodbye=False)
            coordinator.close()
    os.close(read)
    os.close(write)


def step(number: int, tokens: int = 1) -> list[bytes | memoryview]:
    return codec.encode(Step(step_id=number, tokens=np.full(tokens, number, np.int32)))


def receive(link: CoordinatorConnection) -> object:
    deadline = monotonic() + 60
    while (message := link.receive(1000)) is None:
        assert monotonic() < deadline, "nothing came"
    return message


def watching(coordinator: Coordinator, link: CoordinatorConnection) -> None:
    link.watch(TablesReader(coordinator.tables.path).watch(POOL, EPOCH), 500)


def test_a_step_is_taken_before_its_message_and_the_message_is_thrown_away(
    ends: tuple[Coordinator, CoordinatorConnection],
) -> None:
    coordinator, link = ends
    watching(coordinator, link)
    coordinator.show(1, step(1))
    message = receive(link)
    assert isinstance(message, Step)
    assert (message.step_id, message.tokens.tolist()) == (1, [1])
    coordinator.send(step(1))
    coordinator.send(codec.encode(Stop(reason="that was all")))
    assert isinstance(receive(link), Stop), "a step that was taken came again"


@pytest.mark.parametrize("seed", range(4))
def test_whichever_way_is_faster_every_step_is_taken_once_and_in_order(
    ends: tuple[Coordinator, CoordinatorConnection], seed: int
) -> None:
    """Messages lag behind shared memory or run ahead; some steps are too long for shared memory."""
    coordinator, link = ends
    watching(coordinator, link)
    random = Random(seed)
    frames = [step(i, 1 + (STEP_SLOT_BYTES if random.random() < 0.05 else 0)) for i in range(1, STEPS + 1)]
    shown = sent = 0
    taken: list[int] = []
    while len(taken) < STEPS:
        if shown < STEPS and shown - len(taken) < 2 and random.random() < 0.7:
            shown += 1
            coordinator.show(shown, frames[shown - 1])
        for _ in range(random.randrange(3)):
            if sent < shown:
                sent += 1
                coordinator.send(frames[sent - 1])
        message = link.receive(random.choice((0, 0, 1)))
        if message is not None:
            assert isinstance(message, Step)
            assert (message.tokens == message.step_id).all()
            taken.append(message.step_id)
        elif sent < shown and random.random() < 0.5:
            sent += 1
            coordinator.send(frames[sent - 1])
    assert taken == list(range(1, STEPS + 1))
    for frame in frames[sent:]:
        coordinator.send(frame)
    coordinator.send(codec.encode(Stop()))
    assert isinstance(receive(link), Stop), "a step that was taken came again"


def test_a_new_registration_starts_from_one(ends: tuple[Coordinator, CoordinatorConnection]) -> None:
    coordinator, link = ends
    watching(coordinator, link)
    coordinator.show(1, step(1))
    assert receive(link) is not None
    coordinator.send(step(1))
    link.watch(None, 0)
    message = receive(link)
    assert isinstance(message, Step), "without shared memory, the step must come by message"
    link.watch(TablesReader(coordinator.tables.path).watch(POOL, EPOCH + 1), 500)
    assert link.receive(1) is None, "the step of the registration before"
    coordinator.tables.step_ring.put(POOL, EPOCH + 1, 1, step(9))
    message = receive(link)
    assert isinstance(message, Step)
    assert message.step_id == 9


def test_what_was_meant_for_one_coordinator_does_not_reach_the_next_ahead_of_a_hello(
    ends: tuple[Coordinator, CoordinatorConnection],
) -> None:
    """The coordinator restarted during a model load: the new connection does not know the sender of the progress."""
    coordinator, link = ends
    before = link.connections
    coordinator.hang_up()
    deadline = monotonic() + 60
    while link.connected:
        assert monotonic() < deadline, "the end of the connection is not noticed"
        assert link.receive(100) is None
    assert not link.send(WorkerLoading(phase="weights", progress=0.5))
    link.wait_connected(60)
    assert link.connections == before + 1
    assert link.send(WorkerHello(rid=2, name="w", pid=1))
    assert isinstance(codec.Decoder(WORKER_MESSAGES).decode(coordinator.greeted()), WorkerHello)
    coordinator.send(codec.encode(Stop()))
    assert isinstance(receive(link), Stop)


def test_a_worker_that_stood_still_waits_for_its_coordinator_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator returns after the standstill, within the time that the worker actually waited."""
    standstill = Standstill(monkeypatch)
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as name:
        link = CoordinatorConnection(worker_endpoint(Path(name)), read)
        made: list[Coordinator] = []
        look = link.look

        def stands() -> None:
            monkeypatch.setattr(link, "look", look)
            standstill.stand_still()
            made.append(Coordinator(Path(name)))

        monkeypatch.setattr(link, "look", stands)
        try:
            link.wait_connected(60)
            assert link.connected
        finally:
            link.close(goodbye=False)
            for coordinator in made:
                coordinator.close()
    os.close(read)
    os.close(write)
