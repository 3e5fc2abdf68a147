"""The shared tables: what the writer publishes is what readers see, whole, and readers cannot write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import DeadlineExceeded, InvalidConfiguration, ProtocolError
from protocol.layout import GAUGES, PAGE_BYTES, Geometry, arrays, file_bytes
from protocol.tables import TablesReader, TablesWriter

GEOMETRY = Geometry(slots=8, blocks=64, blocks_per_sequence=16, block_size=4)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TablesWriter]:
    tables = TablesWriter(tmp_path / "tables.shm", GEOMETRY, "boot-1")
    yield tables
    tables.close()


def write_row(writer: TablesWriter, slot: int, blocks: list[int], length: int, sequence: int) -> None:
    slots = np.array([slot])
    writer.begin_rows(slots)
    writer.block_table[slot, : len(blocks)] = blocks
    writer.row_blocks[slot], writer.row_length[slot], writer.row_sequence[slot] = len(blocks), length, sequence
    writer.end_rows(slots)


def test_a_reader_sees_rows_lengths_blocks_and_gauges(writer: TablesWriter) -> None:
    write_row(writer, 3, [5, 9, 7], 11, 42)
    writer.block_refcount[[5, 9]] = [2, 1]
    writer.write_gauges(range(len(GAUGES)))
    reader = TablesReader(writer.path, "boot-1")
    table, length, sequence = reader.row(3)
    assert (table.tolist(), length, sequence) == ([5, 9, 7], 11, 42)
    rows, lengths, sequences = reader.rows(np.array([3, 0]), 3)
    assert rows.tolist() == [[5, 9, 7], [0, 0, 0]]
    assert (lengths.tolist(), sequences.tolist()) == ([11, 0], [42, 0])
    assert reader.block_refcount[[5, 9]].tolist() == [2, 1]
    assert reader.gauges() == dict(zip(GAUGES, range(len(GAUGES)), strict=True))
    assert reader.geometry == GEOMETRY


def test_a_row_in_the_middle_of_a_write_is_waited_for_and_the_others_are_not(
    writer: TablesWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour 19: never a torn row."""
    write_row(writer, 1, [1, 2], 8, 1)
    write_row(writer, 2, [3, 4], 8, 2)
    writer.begin_rows(np.array([2]))
    monkeypatch.setattr("protocol.tables.READ_WAIT_S", 0.0)
    monkeypatch.setattr("protocol.tables.SPINS_MAX", 49)
    reader = TablesReader(writer.path)
    assert reader.rows(np.array([1]), 2)[0].tolist() == [[1, 2]]
    assert reader.retries == 0
    with pytest.raises(DeadlineExceeded, match="row 2"):
        reader.rows(np.array([1, 2]), 2)
    assert reader.retries == 50
    writer.end_rows(np.array([2]))
    assert reader.rows(np.array([1, 2]), 2)[0].tolist() == [[1, 2], [3, 4]]


def test_a_reader_cannot_write(writer: TablesWriter) -> None:
    reader = TablesReader(writer.path)
    with pytest.raises(ValueError, match="read-only"):
        reader.block_refcount[0] = 1
    with pytest.raises(TypeError, match="readonly"):
        reader._map[0] = 1
    script = f"""
        import ctypes, sys
        from pathlib import Path
        from protocol.tables import TablesReader
        reader = TablesReader(Path({str(writer.path)!r}))
        ctypes.memset(reader.block_refcount.ctypes.data, 1, 4)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=60, check=False)
    assert run.returncode == -signal.SIGSEGV  # the kernel itself refuses
    assert writer.block_refcount[0] == 0


def test_the_file_is_private_sparse_and_removed_at_the_end(tmp_path: Path) -> None:
    large = Geometry(slots=4096, blocks=1_000_000, blocks_per_sequence=65_536, block_size=16)
    writer = TablesWriter(tmp_path / "t.shm", large, "b")
    status = writer.path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == file_bytes(large) > 1 << 30
    assert status.st_blocks * 512 < 1 << 20  # untouched pages take no memory
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_stale_file_of_a_dead_boot_is_replaced_and_its_readers_keep_what_they_saw(tmp_path: Path) -> None:
    old = TablesWriter(tmp_path / "t.shm", GEOMETRY, "old")
    write_row(old, 0, [1], 4, 9)
    reader = TablesReader(old.path, "old")
    new = TablesWriter(tmp_path / "t.shm", GEOMETRY, "new")
    assert reader.row(0)[2] == 9
    assert TablesReader(new.path, "new").row(0)[2] == 0
    with pytest.raises(ProtocolError, match="belongs to boot new"):
        TablesReader(new.path, "old")
    assert [path.name for path in tmp_path.iterdir()] == ["t.shm"]


@pytest.mark.parametrize("damage", ["short", "magic", "version", "size"])
def test_a_file_that_is_not_ours_is_refused(writer: TablesWriter, damage: str) -> None:
    with writer.path.open("r+b") as file:
        if damage == "short":
            file.truncate(100)
        elif damage == "magic":
            file.write(b"\0" * 8)
        elif damage == "version":
            file.seek(8)
            file.write((99).to_bytes(4, "little"))
        else:
            file.truncate(file_bytes(GEOMETRY) + PAGE_BYTES)
    with pytest.raises(ProtocolError):
        TablesReader(writer.path)


def test_arrays_do_not_overlap_and_are_aligned() -> None:
    end = 2 * PAGE_BYTES
    for spec in arrays(GEOMETRY).values():
        assert spec.offset >= end
        assert spec.offset % 64 == 0
        end = spec.offset + int(np.prod(spec.shape)) * int(spec.dtype[2:])
    assert end <= file_bytes(GEOMETRY)
    assert file_bytes(GEOMETRY) % PAGE_BYTES == 0


@pytest.mark.parametrize("field", ["slots", "blocks", "blocks_per_sequence", "block_size"])
def test_an_impossible_geometry_names_its_field(field: str) -> None:
    """behaviour 1: zero or negative is refused by name, all-ones is accepted."""
    good = {"slots": 1, "blocks": 1, "blocks_per_sequence": 1, "block_size": 1}
    assert Geometry(**good).slots == 1
    for value in (0, -1):
        with pytest.raises(InvalidConfiguration) as caught:
            Geometry(**{**good, field: value})
        assert caught.value.field == field


def test_tables_beyond_the_bound_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="more than"):
        Geometry(slots=1 << 20, blocks=1, blocks_per_sequence=1 << 20, block_size=16)


WRITER = """
import sys
import numpy as np
from pathlib import Path
from protocol.layout import Geometry
from protocol.tables import TablesWriter
geometry = Geometry(slots=8, blocks=64, blocks_per_sequence=16, block_size=4)
tables = TablesWriter(Path(sys.argv[1]), geometry, "busy")
print("ready", flush=True)
slots = np.arange(8)
for n in range(10**9):
    tables.begin_rows(slots)
    tables.block_table[slots] = n
    tables.row_length[slots] = n
    tables.row_sequence[slots] = n
    tables.end_rows(slots)
"""


def test_readers_of_a_busy_writer_see_only_whole_rows(tmp_path: Path) -> None:
    """behaviour 19, with two real processes."""
    path = tmp_path / "t.shm"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            reader = TablesReader(path)
            seen = set()
            for _ in range(3000):
                table, length, sequence = reader.rows(np.arange(8), 16)
                assert (table == table[:, :1]).all()
                assert (table[:, 0] == length).all()
                assert (sequence == length).all()
                seen.add(int(length[0]))
            assert len(seen) > 1  # the writer did write meanwhile
        finally:
            os.kill(process.pid, signal.SIGKILL)
