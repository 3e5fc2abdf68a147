"""Steps through shared memory arrive once, in order and complete, and never replace the socket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from kvforge.protocol import codec
from kvforge.protocol.handover import StepRingReader
from kvforge.protocol.layout import STEP_RING_SLOTS, STEP_SLOT_BYTES, Geometry
from kvforge.protocol.messages import WORKER_REPLIES, Step, Stop
from kvforge.protocol.tables import TablesReader, TablesWriter
from tests.amount import examples

GEOMETRY = Geometry(slots=4, blocks=16, blocks_per_sequence=4, block_size=4, pools=3)
POOL, EPOCH = 1, 7


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TablesWriter]:
    tables = TablesWriter(tmp_path / "t", GEOMETRY, "boot")
    yield tables
    tables.close()


def watch(writer: TablesWriter, pool: int = POOL, epoch: int = EPOCH) -> StepRingReader:
    return TablesReader(writer.path).watch(pool, epoch)


def frames_of(number: int) -> list[bytes]:
    return [b"body %d" % number, bytes([number % 256]) * (number % 5)][: 2 if number % 5 else 1]


def put(writer: TablesWriter, *numbers: int, epoch: int = EPOCH) -> None:
    for number in numbers:
        writer.step_ring.put(POOL, epoch, number, frames_of(number))


def test_steps_are_taken_once_and_in_their_order(writer: TablesWriter) -> None:
    steps = watch(writer)
    assert steps.read_step() is None
    put(writer, 1, 2)
    assert [steps.read_step(), steps.read_step(), steps.read_step()] == [frames_of(1), frames_of(2), None]
    for number in range(3, 3 * STEP_RING_SLOTS):
        put(writer, number)
        assert steps.read_step() == frames_of(number)
    assert steps.last_step == 3 * STEP_RING_SLOTS - 1


def test_another_pool_and_an_earlier_registration_are_not_mine(writer: TablesWriter) -> None:
    put(writer, 1, epoch=EPOCH - 1)
    assert watch(writer, pool=POOL - 1).read_step() is None
    steps = watch(writer)
    assert steps.read_step() is None
    put(writer, 1)
    assert steps.read_step() == frames_of(1)
    assert steps.read_step() is None


def test_a_step_that_is_too_long_is_left_to_the_socket(writer: TablesWriter) -> None:
    steps = watch(writer)
    writer.step_ring.put(POOL, EPOCH, 1, [b"b", bytes(STEP_SLOT_BYTES)])
    assert steps.read_step() is None
    put(writer, 2)
    assert steps.read_step() is None, "the second before the first"
    steps.last_step = 1  # the first arrived over the socket
    assert steps.read_step() == frames_of(2)
    writer.step_ring.put(POOL, EPOCH, 3, [b"b" * 10, bytes(STEP_SLOT_BYTES - 10)])
    assert steps.read_step() == [b"b" * 10, bytes(STEP_SLOT_BYTES - 10)]


def test_one_that_was_overwritten_is_left_to_the_socket(writer: TablesWriter) -> None:
    steps = watch(writer)
    put(writer, *range(1, STEP_RING_SLOTS + 3))
    assert steps.read_step() is None
    steps.last_step = 2
    assert [steps.read_step() for _ in range(STEP_RING_SLOTS)] == [frames_of(n) for n in range(3, STEP_RING_SLOTS + 3)]
    assert steps.read_step() is None


def test_a_step_is_known_by_its_first_bytes() -> None:
    step = codec.encode(Step(step_id=3, slots=np.arange(3, dtype=np.int32)))
    assert codec.is_step(step)
    assert isinstance(codec.Decoder(WORKER_REPLIES).decode(step), Step)
    assert not codec.is_step(codec.encode(Stop(reason="t step")))
    assert not codec.is_step([b""])


BUSY = """
import sys
from pathlib import Path
from kvforge.protocol.layout import Geometry
from kvforge.protocol.tables import TablesWriter
geometry = Geometry(slots=4, blocks=16, blocks_per_sequence=4, block_size=4, pools=3)
tables = TablesWriter(Path(sys.argv[1]), geometry, "busy")
number = 0
print("ready", flush=True)
while True:
    number += 1
    tables.step_ring.put(1, 7, number, [b"%d" % number, bytes([number % 251]) * (number % 4096)])
"""


def test_a_step_that_is_overwritten_while_it_is_read_is_never_taken_torn(tmp_path: Path) -> None:
    """With a writer process that never pauses, for 3 seconds at least, or for a quarter of that in `make test`."""
    path = tmp_path / "t"
    with subprocess.Popen([sys.executable, "-c", BUSY, str(path)], stdout=subprocess.PIPE, cwd=Path.cwd()) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            reader = TablesReader(path)
            steps = reader.watch(POOL, EPOCH)
            taken, last, deadline = 0, 0, monotonic() + examples(12) / 4
            while monotonic() < deadline or (
                taken <= 100 and monotonic() < deadline + 60.0
            ):  # a busy machine takes longer
                frames = steps.read_step()
                if frames is None:  # the reader lags: it catches up with the ring, as with messages
                    steps.last_step = max(steps.last_step, int(reader._step_ring_head[POOL, ::4].max()) - 1)
                    continue
                number = int(frames[0])
                body = frames[1] if len(frames) > 1 else b""
                assert number > last, "a step came twice, or late"
                assert body == bytes([number % 251]) * (number % 4096), "a torn step"
                last, taken = number, taken + 1
            assert taken > 100
        finally:
            process.kill()
