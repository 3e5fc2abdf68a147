"""The copying process of the disk tier: orders in, results out, and what happens when it dies."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvforge.protocol.errors import WorkerError
from kvforge.protocol.messages import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_FULL,
    DISK_NOT_FOUND,
    DISK_READ,
    DISK_WIPE,
    DISK_WRITE,
    DiskOrders,
    DiskScan,
)
from kvforge.worker.checksums import checksums, weights_of
from kvforge.worker.disk.copier import DiskCopier
from kvforge.worker.disk.copying import READERS, CopyingSettings
from kvforge.worker.disk.direct import PAGE
from kvforge.worker.disk.folder import DiskFolder
from kvforge.worker.disk.segments import Geometry
from kvforge.worker.host_file import HostFile

GEOMETRY = Geometry(block_bytes=64, block_tokens=4, segment_bytes=4 * 4096 + 2048)
HOSTS, EPOCH, WAIT_S = 6, 3, 60.0


class Rig:
    """A copier between a host file and a folder."""

    def __init__(self, folder: Path, segments: int = 2) -> None:
        self.host = HostFile(folder / "host", "layout", HOSTS, GEOMETRY.block_bytes, lock_wait_s=0.0)
        self._disk = DiskFolder(folder, "w", lock_wait_s=0.0)
        opened = self._disk.open("layout", GEOMETRY, segments * GEOMETRY.size)
        self.path = opened.folder
        settings = CopyingSettings(
            socket=-1,
            host=-1,
            host_blocks=HOSTS,
            around=str(self._disk.path),
            folder=str(opened.folder),
            identity=opened.identity.hex(),
            block_bytes=GEOMETRY.block_bytes,
            block_tokens=GEOMETRY.block_tokens,
            segment_bytes=GEOMETRY.segment_bytes,
            segments_max=segments,
            bytes_max=segments * GEOMETRY.size,
            key_file="",
        )
        opened.close()
        self.copier = DiskCopier(settings, self.host.fileno(), (self._disk.fileno(),))
        self._number = 0

    def fill(self, block: int, value: int) -> None:
        """Put a block into the host file, as a step does."""
        self.host.data[block] = np.random.default_rng(value).integers(0, 256, GEOMETRY.block_bytes, np.uint8)
        self.host.sums[block] = checksums(self.host.data[block].reshape(1, -1), weights_of(GEOMETRY.block_bytes))[0]
        self.host.tags[block] = value

    def order(self, *orders: tuple[int, int, int, int, int]) -> list[int]:
        """Give orders (kind, host block, slot, value, parent), 0 for a first block. Return their numbers."""
        rows, tokens, owners = np.zeros((len(orders), 9), np.int32), [], []
        for row, (kind, host, slot, value, parent) in zip(rows, orders, strict=True):
            self._number += 1
            row[:4] = self._number, kind, host, slot
            row[4:8] = np.array([value, parent or 77], "<u8").view("<i4")
            row[8] = not parent
            tokens += [value] * 4 if kind == DISK_WRITE else []
            owners += [value + 5] if kind == DISK_WRITE else []
        tags = np.array(owners, "<u8").view("<i4")
        self.message = DiskOrders(EPOCH, rows.reshape(-1), np.array(tokens, np.int32), tags)
        self.copier.take(self.message)
        return rows[:, 0].tolist()

    def results(self, count: int) -> dict[int, tuple[int, int]]:
        """Wait for so many results."""
        found: dict[int, tuple[int, int]] = {}
        while len(found) < count:
            message = self.copier.results(EPOCH)
            if message is None:
                assert select.select([self.copier.fileno()], [], [], WAIT_S)[0], "no result"
            else:
                found |= {number: (outcome, more) for number, outcome, more in message.results.reshape(-1, 3).tolist()}
        return found

    def outcomes(self, *orders: tuple[int, int, int, int, int]) -> list[int]:
        """Give orders, and return their outcomes."""
        numbers = self.order(*orders)
        found = self.results(len(numbers))
        return [found[number][0] for number in numbers]

    def children(self) -> list[int]:
        """Return the processes that carry out orders: the last one writes."""
        assert self.copier._process is not None
        pid = self.copier._process.process.pid
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def close(self) -> None:
        """End the process."""
        self.copier.close()
        self.host.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path)
    yield found
    found.close()


# behaviour: a block comes back with its bytes, checksum and tag, and a successor announces it behind its parent
def test_blocks_go_down_and_come_back(rig: Rig) -> None:
    rig.fill(0, 1001)
    rig.fill(1, 1002)
    expected = rig.host.data[:2].copy(), rig.host.sums[:2].copy()
    assert rig.outcomes((DISK_WRITE, 1, 2, 1002, 1001), (DISK_WRITE, 0, 4, 1001, 0)) == [DISK_DONE, DISK_DONE]
    rig.host.data[:], rig.host.sums[:], rig.host.tags[:] = 0, 0, 0
    assert rig.outcomes((DISK_READ, 0, 4, 1001, 0), (DISK_READ, 1, 2, 1002, 1001)) == [DISK_DONE, DISK_DONE]
    assert (rig.host.data[:2] == expected[0]).all() and (rig.host.sums[:2] == expected[1]).all()
    assert rig.host.tags.tolist() == [1001, 1002, 0, 0, 0, 0]
    rig.copier.restart()
    entries = rig.copier.scan(DiskScan(EPOCH))
    assert entries.last and entries.entries.reshape(-1, 6)[:, [0, 5]].tolist() == [[4, 1], [2, 0]]
    assert entries.tokens.tolist() == [1001] * 4 + [1002] * 4
    assert entries.owners.view("<u8").tolist() == [1006, 1007] and entries.usable == 2 * GEOMETRY.slots
    rest = rig.copier.scan(DiskScan(EPOCH, cursor=2))
    assert rest.last and not rest.entries.size


# behaviour: what is not there is a miss, and no order that came twice is carried out twice
def test_misses_and_repeated_orders(rig: Rig) -> None:
    rig.fill(0, 1001)
    assert rig.outcomes((DISK_WRITE, 0, 0, 1005, 0)) == [DISK_NOT_FOUND]
    assert rig.outcomes((DISK_READ, 3, 0, 1001, 0)) == [DISK_NOT_FOUND]
    assert rig.outcomes((DISK_WRITE, 0, 0, 1001, 0)) == [DISK_DONE]
    with (rig.path / "segment-000000").open("r+b") as file:
        file.seek(GEOMETRY.blocks_at)
        file.write(b"\0\0\0")
    assert rig.outcomes((DISK_READ, 3, 0, 1001, 0)) == [DISK_DAMAGED]
    assert rig.outcomes((DISK_READ, 4, 0, 1001, 0)) == [DISK_NOT_FOUND]
    assert not rig.host.tags[3:5].any()
    assert rig.outcomes((DISK_READ, HOSTS, 0, 1001, 0)) == [DISK_FAILED]
    rig.order((DISK_WRITE, 0, 1, 1001, 0))
    first = rig.results(1)
    rig.host.tags[0] = 0  # carried out again, it would not be found
    rig.copier.take(rig.message)
    assert rig.results(1) == first == {rig._number: (DISK_DONE, 0)}


# behaviour: a wiped block is gone, with its bytes
def test_a_wiped_block_is_gone(rig: Rig) -> None:
    rig.fill(0, 1001)
    assert rig.outcomes((DISK_WRITE, 0, 1, 1001, 0)) == [DISK_DONE]
    bytes_of_block = rig.host.data[0].tobytes()
    segment = rig.path / "segment-000000"
    assert bytes_of_block in segment.read_bytes()
    assert rig.outcomes((DISK_WIPE, -1, 1, 0, 0), (DISK_WIPE, -1, rig.copier.blocks, 0, 0)) == [DISK_DONE, DISK_FAILED]
    assert not any(segment.read_bytes()[GEOMETRY.record_bytes :])
    assert rig.outcomes((DISK_READ, 2, 1, 1001, 0)) == [DISK_NOT_FOUND]
    rig.copier.restart()
    assert not rig.copier.scan(DiskScan(EPOCH)).entries.size


# behaviour: a process that dies makes its orders and later ones fail, and the worker goes on
def test_a_process_that_dies_fails_its_orders(rig: Rig) -> None:
    rig.fill(0, 1001)
    assert rig.copier._process is not None
    os.kill(rig.copier._process.process.pid, signal.SIGSTOP)
    orders = [(DISK_WRITE, 0, slot, 1001, 0) for slot in range(6)] * 2
    numbers = rig.order(*orders)
    assert rig.copier.results(EPOCH) is None
    os.kill(rig.copier._process.process.pid, signal.SIGKILL)
    assert rig.results(len(numbers)) == dict.fromkeys(numbers, (DISK_FAILED, 0))
    assert rig.copier.fileno() == -1 and rig.outcomes(orders[0]) == [DISK_FAILED]
    rig.copier.restart()
    assert rig.outcomes((DISK_WRITE, 0, 0, 1001, 0)) == [DISK_DONE]


def test_a_process_that_cannot_start_is_an_error_with_its_reason(rig: Rig) -> None:
    settings = msgspec.structs.replace(rig.copier._settings, identity="none")
    with pytest.raises(WorkerError, match=r"did not start \(it has ended\): see its log"):
        DiskCopier(settings, rig.host.fileno())


# behaviour: a full disk is answered with what it has room for
def test_a_full_disk_names_its_size(rig: Rig) -> None:
    rig.fill(0, 1001)
    assert rig.outcomes((DISK_WRITE, 0, 0, 1001, 0)) == [DISK_DONE]
    assert rig.copier._process is not None
    # A limit of file sizes is to a process what a full disk is: there is no space for the second segment.
    for pid in rig.children():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (PAGE, PAGE))
    (number,) = rig.order((DISK_WRITE, 0, GEOMETRY.slots, 1001, 0))
    assert rig.results(1) == {number: (DISK_FULL, GEOMETRY.slots)}
    assert rig.outcomes((DISK_READ, 1, 0, 1001, 0), (DISK_WRITE, 0, 1, 1001, 0)) == [DISK_DONE, DISK_FAILED]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_blocks_that_are_read_together_do_not_mix(rig: Rig) -> None:
    values = [1001 + number for number in range(READERS)]
    for host, value in enumerate(values):
        rig.fill(host, value)
        assert rig.outcomes((DISK_WRITE, host, host, value, 0)) == [DISK_DONE]
    whole = rig.host.data[:READERS].copy()
    for _ in range(30):
        rig.host.data[:READERS] = 0
        assert rig.outcomes(*((DISK_READ, host, host, value, 0) for host, value in enumerate(values))) == [
            DISK_DONE
        ] * len(values)
        assert (rig.host.data[:READERS] == whole).all()


# behaviour: reads of several blocks are under way together, and none waits for a write
def test_reads_wait_neither_for_a_slow_read_nor_for_a_write(rig: Rig) -> None:
    rig.fill(0, 1001)
    assert rig.outcomes((DISK_WRITE, 0, 0, 1001, 0)) == [DISK_DONE]
    *readers, writer = rig.children()
    assert len(readers) == READERS
    read = [(DISK_READ, 1 + number, 0, 1001, 0) for number in range(READERS)]
    with stopped(writer):
        (late,) = rig.order((DISK_WRITE, 0, 1, 1001, 0))
        assert rig.outcomes(*read) == [DISK_DONE] * READERS
    assert rig.results(1) == {late: (DISK_DONE, 0)}
    with stopped(readers[0]):
        numbers = rig.order(*read)
        found = rig.results(READERS - 1)
    assert len(found | rig.results(1)) == len(numbers)


# behaviour: the tier is off when one of its processes dies, and no other one touches the host file any more
@pytest.mark.parametrize("which", [0, -1])
def test_the_death_of_one_process_ends_all(which: int, rig: Rig) -> None:
    rig.fill(0, 1001)
    assert rig.outcomes((DISK_WRITE, 0, 0, 1001, 0)) == [DISK_DONE]
    children = rig.children()
    ends = [os.pidfd_open(pid) for pid in children]
    os.kill(children[which], signal.SIGKILL)
    number = rig.order((DISK_READ if which == 0 else DISK_WRITE, 0, 0, 1001, 0))[0]
    assert rig.results(1)[number] in ((DISK_FAILED, 0), (DISK_DONE, 0))  # another reader may have answered before
    while rig.copier._process is not None:
        rig.order((DISK_READ, 1, 0, 1001, 0))
        rig.results(1)
    for end in ends:
        assert select.select([end], [], [], WAIT_S)[0], "a process that copies is left"
        os.close(end)
