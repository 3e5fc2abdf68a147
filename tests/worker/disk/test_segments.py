"""Segments of the disk tier: whatever a crash or a flipped bit leaves is the block that was written, or a miss."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvforge.worker.checksums import checksums, weights_of
from kvforge.worker.disk import direct
from kvforge.worker.disk.direct import BlockIo
from kvforge.worker.disk.records import Entry
from kvforge.worker.disk.sealing import Sealer
from kvforge.worker.disk.segments import Geometry, Segments
from kvforge.worker.disk.store import Damaged, DiskFull, NotFound

IDENTITY, OTHER = b"identity of test", b"another identity"
GEOMETRY = Geometry(block_bytes=48, block_tokens=4, segment_bytes=4 * 4096 + 2048)
KEY = bytes(range(32))
SLOTS = GEOMETRY.slots


def opened(
    folder: Path, identity: bytes = IDENTITY, key: bytes = b"", segments_max: int = 3, *, direct: bool = True
) -> Segments:
    return Segments(folder, identity, GEOMETRY, segments_max, Sealer(key), direct=direct)


def entry_of(number: int) -> Entry:
    tokens = np.arange(4 * number, 4 * number + 4, dtype=np.int32).tobytes()
    return Entry((1 << 64) - 1 - number, (1 << 64) - max(1, number), number == 0, tokens, 77 + number)


def block_of(number: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, GEOMETRY.block_bytes, np.uint8)


def put(store: Segments, slot: int, number: int) -> None:
    block = block_of(number)
    store.write(slot, entry_of(number), int(checksums(block.reshape(1, -1), weights_of(block.size))[0]), block)


def got(store: Segments, slot: int, number: int) -> bool:
    """Return whether the slot has this entry. A block with other bytes fails the test."""
    block = np.zeros(GEOMETRY.block_bytes, np.uint8)
    try:
        store.read(slot, entry_of(number).value, block)
    except (NotFound, Damaged):
        return False
    assert (block == block_of(number)).all()
    return True


# behaviour: another process finds what was written, in several segments
@pytest.mark.parametrize("key", [b"", KEY], ids=["plain", "sealed"])
def test_a_successor_finds_the_entries(key: bytes, tmp_path: Path) -> None:
    assert SLOTS == 3
    store = opened(tmp_path, key=key)
    for slot in (0, 2, 4):
        put(store, slot, slot)
    store.close()
    again = opened(tmp_path, key=key)
    found = again.recover()
    assert {slot: record.entry for slot, record in found.records.items()} == {n: entry_of(n) for n in (0, 2, 4)}
    assert not found.dropped and all(got(again, slot, slot) for slot in (0, 2, 4))
    assert not got(again, 0, 1) and not got(again, 1, 1) and not got(again, 8, 8)


# behaviour: a process that dies at any byte of a write leaves the old entry, the new one, or none
@pytest.mark.parametrize("key", [b"", KEY], ids=["plain", "sealed"])
def test_a_crash_at_any_byte_loses_at_most_the_slot(
    key: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, key=key)
    for slot in range(3):
        put(store, slot, slot)
    writes: list[tuple[bytes, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(direct, "write", lambda _file, data, at: writes.append((bytes(data), at)))
        patch.setattr(BlockIo, "write", lambda _io, _file, data, at: writes.append((bytes(data), at)))
        put(store, 1, 9)
    kept = [(got(store, 1, 1), got(store, 1, 9))]
    with (tmp_path / "segment-000000").open("r+b", buffering=0) as file:
        for data, at in writes:
            for count, byte in enumerate(data):
                os.pwrite(file.fileno(), bytes([byte]), at + count)
                assert set(store.recover().records) >= {0, 2} and got(store, 0, 0) and got(store, 2, 2)
                kept.append((got(store, 1, 1), got(store, 1, 9)))
    # The old entry is there until its record is removed, the new one from its last byte on that matters.
    assert kept[0] == (True, False) and kept[-1] == (False, True)
    assert (True, True) not in kept and kept.index((False, True)) > len(b"kvfDisk1") + GEOMETRY.block_bytes


# behaviour: the parts of a write that reach the disk in another order are a miss, never other bytes
@pytest.mark.parametrize("lost", range(3))
def test_a_part_that_never_reached_the_disk_is_a_miss(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, 1, 1)
    record, block, calls = direct.write, BlockIo.write, iter(range(3))
    monkeypatch.setattr(direct, "write", lambda *write: None if next(calls) == lost else record(*write))
    monkeypatch.setattr(BlockIo, "write", lambda *write: None if next(calls) == lost else block(*write))
    put(store, 1, 9)
    assert got(store, 1, 9) == (lost == 0)
    assert not got(store, 1, 1)


# behaviour: a flipped bit anywhere is a miss of that slot, or changes nothing
@pytest.mark.parametrize("key", [b"", KEY], ids=["plain", "sealed"])
def test_flipped_bits_are_misses(key: bytes, tmp_path: Path) -> None:
    store = opened(tmp_path, key=key)
    for slot in range(3):
        put(store, slot, slot)
    store.close()
    path, drawn = tmp_path / "segment-000000", random.Random(7)
    whole = path.read_bytes()
    records = [range(slot * GEOMETRY.record_bytes, (slot + 1) * GEOMETRY.record_bytes) for slot in range(3)]
    at = GEOMETRY.blocks_at
    blocks = [range(at + slot * GEOMETRY.stride, at + slot * GEOMETRY.stride + 48) for slot in range(3)]
    again = opened(tmp_path, key=key)
    with path.open("r+b", buffering=0) as file:
        for _ in range(500):
            slot = drawn.randrange(3)
            place = drawn.choice(drawn.choice((records, blocks))[slot])
            os.pwrite(file.fileno(), bytes([whole[place] ^ 1 << drawn.randrange(8)]), place)
            found = again.recover()
            assert [got(again, other, other) for other in range(3)] == [other != slot for other in range(3)]
            assert found.dropped + len(found.records) == 3
            os.pwrite(file.fileno(), bytes([whole[place]]), place)


# behaviour: bytes of another place, identity or key are not taken for an entry
def test_records_and_blocks_count_only_at_their_place(tmp_path: Path) -> None:
    store = opened(tmp_path, key=KEY)
    put(store, 0, 0)
    put(store, 1, 1)
    store.close()
    path = tmp_path / "segment-000000"
    moved, size, at = bytearray(path.read_bytes()), GEOMETRY.record_bytes, GEOMETRY.blocks_at
    moved[2 * size : 3 * size] = moved[:size]
    moved[at + GEOMETRY.stride : at + GEOMETRY.stride + 48] = moved[at : at + 48]
    path.write_bytes(moved)
    again = opened(tmp_path, key=KEY)
    assert set(again.recover().records) == {0, 1} and got(again, 0, 0)
    assert not got(again, 2, 0) and not got(again, 1, 1) and not got(again, 1, 0)
    assert opened(tmp_path, identity=OTHER, key=KEY).recover().records == {}
    assert opened(tmp_path, key=KEY[::-1]).recover().records == {}
    assert opened(tmp_path).recover().records == {}


def test_nothing_is_readable_without_the_key(tmp_path: Path) -> None:
    store = opened(tmp_path, key=KEY)
    put(store, 0, 5)
    store.close()
    whole = (tmp_path / "segment-000000").read_bytes()
    assert entry_of(5).tokens not in whole and bytes(block_of(5)[:16]) not in whole
    plain = opened(tmp_path / "..", segments_max=1)
    put(plain, 0, 5)
    whole = (tmp_path / ".." / "segment-000000").read_bytes()
    assert entry_of(5).tokens in whole and bytes(block_of(5)[:16]) in whole


# behaviour: a full disk is noticed before anything is written, and what is there stays
def test_a_full_disk_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    put(store, 0, 0)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match="No space left"):
        put(store, SLOTS, 1)
    assert store.usable == SLOTS and got(store, 0, 0)
    put(store, 1, 1)
    store.close()
    assert set(opened(tmp_path).recover().records) == {0, 1}


def test_files_beyond_the_bound_or_of_another_size_are_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for slot in (0, SLOTS, 2 * SLOTS):
        put(store, slot, slot)
    store.close()
    with (tmp_path / "segment-000001").open("r+b") as file:
        file.truncate(100)
    again = opened(tmp_path, segments_max=2)
    assert set(again.recover().records) == {0}
    assert sorted(path.name for path in tmp_path.glob("segment-*")) == ["segment-000000"]


# behaviour: the bytes of a wiped slot are in no file any more
@pytest.mark.parametrize("key", [b"", KEY], ids=["plain", "sealed"])
def test_a_wiped_slot_leaves_no_bytes(key: bytes, tmp_path: Path) -> None:
    store = opened(tmp_path, key=key)
    for number in range(2):
        put(store, number, number)
    before = (tmp_path / "segment-000000").read_bytes()
    size, stride, begin = GEOMETRY.record_bytes, GEOMETRY.stride, GEOMETRY.blocks_at
    store.wipe(1)
    store.wipe(2 * SLOTS)  # in a segment that does not exist
    after = (tmp_path / "segment-000000").read_bytes()
    assert any(before[size : 2 * size]) and any(before[begin + stride : begin + 2 * stride])
    assert not any(after[size : 2 * size]) and not any(after[begin + stride : begin + 2 * stride])
    assert after[:size] == before[:size] and after[begin : begin + stride] == before[begin : begin + stride]
    assert got(store, 0, 0) and not got(store, 1, 1) and store.usable == SLOTS
    store.close()


def test_a_dropped_slot_is_empty(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1, 1)
    store.drop(1)
    store.drop(2 * SLOTS)  # of a segment that is not there
    assert not got(store, 1, 1) and store.recover().records == {} and store.usable == SLOTS


# behaviour: blocks go past the page cache where the file system allows it, and else through it, with the same bytes
@pytest.mark.parametrize("key", [b"", KEY], ids=["plain", "sealed"])
def test_direct_and_other_transfers_read_each_others_blocks(key: bytes, tmp_path: Path) -> None:
    past, through = opened(tmp_path, key=key), opened(tmp_path, key=key, direct=False)
    assert through.indirect == "it is turned off"
    put(past, 1, 1)
    assert got(through, 1, 1), "a segment that another process made is found"
    for slot, (writer, reader) in enumerate([(past, through), (through, past)] * 2):
        put(writer, slot, 10 + slot)
        assert got(reader, slot, 10 + slot) and got(writer, slot, 10 + slot)
    past.wipe(2)
    assert not got(through, 2, 12) and not got(past, 2, 12)


def test_a_file_system_without_direct_transfers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: object) -> int:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        store = opened(tmp_path)
    assert store.indirect == "copying a page: Invalid argument"
    assert [path.name for path in tmp_path.iterdir()] == []
    put(store, 1, 1)
    assert got(store, 1, 1)
