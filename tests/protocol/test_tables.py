"""The shared tables: readers see published rows completely, and cannot write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.protocol.errors import DeadlineExceeded, InvalidConfiguration, ProtocolError
from kvforge.protocol.layout import GAUGES, PAGE_BYTES, Geometry, arrays, file_bytes
from kvforge.protocol.tables import TablesReader, TablesWriter

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
    monkeypatch.setattr("kvforge.protocol.service_metrics.READ_WAIT_S", 0.0)
    monkeypatch.setattr("kvforge.protocol.tables.TOGETHER_MAX", 10)
    monkeypatch.setattr("kvforge.protocol.service_metrics.SPINS_MAX", 39)
    reader = TablesReader(writer.path)
    assert reader.rows(np.array([1]), 2)[0].tolist() == [[1, 2]]
    assert reader.retries == 0
    with pytest.raises(DeadlineExceeded, match="row 2"):
        reader.rows(np.array([1, 2]), 2)
    assert reader.retries == 50
    writer.end_rows(np.array([2]))
    assert reader.rows(np.array([1, 2]), 2)[0].tolist() == [[1, 2], [3, 4]]


def in_the_middle_of_a_read(reader: TablesReader, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `action` once, after the next read has copied its rows and before it has checked them."""
    copy, pending = reader._copy, [action]

    def interrupted(*arguments: Any) -> Any:
        found = copy(*arguments)
        if pending:
            pending.pop()()
        return found

    monkeypatch.setattr(reader, "_copy", interrupted)


def test_a_row_that_changes_during_a_read_is_read_again_and_no_other(
    writer: TablesWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in range(4):
        write_row(writer, slot, [slot, slot], 8, 10 + slot)
    reader = TablesReader(writer.path)
    in_the_middle_of_a_read(reader, lambda: write_row(writer, 2, [7, 9], 5, 20), monkeypatch)
    table, length, sequence = reader.rows(np.array([3, 2, 1]), 2)
    assert table.tolist() == [[3, 3], [7, 9], [1, 1]]
    assert (length.tolist(), sequence.tolist()) == ([8, 5, 8], [13, 20, 11])
    assert reader.retries == 1


def test_a_length_that_changes_alone_makes_nobody_read_again(
    writer: TablesWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_row(writer, 1, [4, 6], 7, 3)
    reader = TablesReader(writer.path)

    def grow() -> None:
        writer.row_length[[1]] = 8

    in_the_middle_of_a_read(reader, grow, monkeypatch)
    assert reader.rows(np.array([1]), 2)[1].tolist() == [7]
    assert reader.rows(np.array([1]), 2)[1].tolist() == [8]
    assert reader.retries == 0


def test_widths_and_slots_that_do_not_exist_are_refused(writer: TablesWriter) -> None:
    reader = TablesReader(writer.path)
    for width in (0, 17):
        with pytest.raises(ValueError, match="1 to 16"):
            reader.rows(np.array([1]), width)
    with pytest.raises(IndexError):
        reader.rows(np.array([8]), 1)
    assert reader.rows(np.zeros(0, np.int32), 16)[0].shape == (0, 16)


def test_state_blocks_are_read_with_the_version_of_their_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = TablesWriter(tmp_path / "states.shm", msgspec.structs.replace(GEOMETRY, states_per_sequence=3), "boot-1")
    reader = TablesReader(tables.path)
    assert reader.geometry.states_per_sequence == 3
    write_row(tables, 1, [1], 8, 1)
    tables.begin_rows(np.array([2]))
    tables.state_table[2], tables.row_states[2] = [7, 5, 9], 3
    monkeypatch.setattr("kvforge.protocol.service_metrics.READ_WAIT_S", 0.0)
    monkeypatch.setattr("kvforge.protocol.service_metrics.SPINS_MAX", 39)
    assert reader.states(np.array([1]), 2).tolist() == [[0, 0]]
    with pytest.raises(DeadlineExceeded, match="row 2"):
        reader.states(np.array([1, 2]), 2)
    with pytest.raises(DeadlineExceeded, match="row 2"):
        reader.state_groups(np.array([1, 2]), 1, 2, np.array([[0], [0]]))
    tables.end_rows(np.array([2]))
    assert reader.states(np.array([2, 1]), 2).tolist() == [[7, 5], [0, 0]]
    assert reader.row_states[[1, 2]].tolist() == [0, 3]
    groups = reader.state_groups(np.array([2, 1]), 1, 1, np.array([[1, 0, 1], [0, 0, 0]]))
    assert groups.tolist() == [[[9], [5], [9]], [[0], [0], [0]]]
    assert reader.state_groups(np.array([2]), 0, 2, np.array([[0]])).tolist() == [[[7, 5]]]  # column 2 is in no group
    with pytest.raises(IndexError):
        reader.state_groups(np.array([1]), 0, 2, np.array([[1]]))
    for width in (0, 4):
        with pytest.raises(ValueError, match="1 to 3"):
            reader.states(np.array([1]), width)
    tables.close()


def test_a_reader_cannot_write(writer: TablesWriter) -> None:
    reader = TablesReader(writer.path)
    numbers = reader._metrics
    held = [*vars(reader).values(), *vars(numbers).values(), *numbers._rest]
    views = [value for value in held if isinstance(value, np.ndarray)]
    assert len(views) == 2 + len(arrays(GEOMETRY))
    for view in views:
        with pytest.raises(ValueError, match="read-only"):
            view[...] = np.ones((), view.dtype)
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)
    with pytest.raises(TypeError, match="readonly"):
        reader._map[0] = 1
    script = f"""
        import ctypes, sys
        from pathlib import Path
        from kvforge.protocol.tables import TablesReader
        reader = TablesReader(Path({str(writer.path)!r}))
        ctypes.memset(reader.block_refcount.ctypes.data, 1, 4)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=60, check=False)
    assert run.returncode == -signal.SIGSEGV  # the kernel refuses the write
    assert writer.block_refcount[0] == 0


def test_the_file_is_private_has_its_room_from_the_start_and_is_removed_at_the_end(tmp_path: Path) -> None:
    """A sparse file kills its writer by SIGBUS if the disk is full at the time of the write."""
    geometry = Geometry(slots=64, blocks=4096, blocks_per_sequence=64, block_size=16)
    writer = TablesWriter(tmp_path / "t.shm", geometry, "b")
    status = writer.path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == file_bytes(geometry)
    assert status.st_blocks * 512 >= status.st_size
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_boot_left_half_made_is_removed(tmp_path: Path) -> None:
    (tmp_path / "t.shm.q1w2e3").write_bytes(b"half")
    (tmp_path / "mine").write_bytes(b"not ours")
    TablesWriter(tmp_path / "t.shm", GEOMETRY, "b").close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


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
        end = spec.offset + spec.bytes
        assert spec.bytes >= int(np.prod(spec.shape)) * int(spec.dtype[2:])
    assert end <= file_bytes(GEOMETRY)
    assert file_bytes(GEOMETRY) % PAGE_BYTES == 0


@pytest.mark.parametrize("field", ["slots", "blocks", "blocks_per_sequence", "block_size", "states_per_sequence"])
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


# Row r of 64 holds r + n tokens after step n. Every cell and the sequence id are a sixteenth of that, rounded down:
# most steps change a row's length alone, every sixteenth the whole row.
WRITER = """
import sys
import numpy as np
from pathlib import Path
from kvforge.protocol.layout import Geometry
from kvforge.protocol.tables import TablesWriter
tables = TablesWriter(Path(sys.argv[1]), Geometry(slots=64, blocks=64, blocks_per_sequence=32, block_size=4), "busy")
length = np.arange(64)
moved = slots = np.arange(64)
while True:
    tables.begin_rows(moved)
    tables.block_table[moved] = length[moved, None] // 16
    tables.row_length[moved] = length[moved]
    tables.row_sequence[moved] = length[moved] // 16
    tables.end_rows(moved)
    tables.row_length[slots] = length
    if length[0] == 0:
        print("ready", flush=True)
    length += 1
    moved = slots[length % 16 == 0]
"""

READER = """
import json, sys, time
import numpy as np
from pathlib import Path
from kvforge.protocol.tables import TablesReader

class Trusting(TablesReader):
    def _read_again(self, *_):
        "Takes torn rows for whole ones."

path, seconds, kind = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
reader = TablesReader(path) if kind == "careful" else Trusting(path)
slots = np.random.default_rng(0).permutation(64)
torn, versions, last = 0, 0, -1
end = time.monotonic() + seconds
while time.monotonic() < end and not torn and not (reader.retries >= 10_000 and versions >= 300):
    table, length, sequence = reader.rows(slots, 32)
    torn = int(np.count_nonzero((table != sequence[:, None]).any(axis=1) | (length // 16 != sequence)))
    versions += int(length[0] != last)
    last = length[0]
print(json.dumps({"torn": torn, "versions": versions, "retries": reader.retries}))
"""


@contextmanager
def busy_writer(path: Path) -> Iterator[None]:
    """Run a process that writes at full speed."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()


def readers(path: Path, count: int, seconds: float, kind: str) -> list[dict[str, int]]:
    """Run `count` reader processes at once; return their results. A reader ends at a torn row, after 10,000 retries
    that avoided one, or after `seconds`."""
    command = [sys.executable, "-c", READER, str(path), str(seconds), kind]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    return [json.loads(process.communicate(timeout=seconds + 60)[0]) for process in processes]


def test_readers_of_a_busy_writer_see_only_whole_rows(tmp_path: Path) -> None:
    """behaviour 19, with five real processes. A reader that ignores the row versions is caught at once."""
    path = tmp_path / "t.shm"
    with busy_writer(path):
        [trusting] = readers(path, 1, 30, "trusting")
        assert trusting["torn"] > 0
        for seen in readers(path, 4, 10, "careful"):
            assert seen["torn"] == 0
            assert seen["retries"] > 0 or seen["versions"] > 1000, seen


STOPPED_READER = """
import os, signal, sys
import numpy as np
from pathlib import Path
from kvforge.protocol.tables import TablesReader

class Stopping(TablesReader):
    def _copy(self, at):
        found = super()._copy(at)
        if self.retries == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return found

reader = Stopping(Path(sys.argv[1]))
table, length, sequence = reader.rows(np.array([1, 2]), 2)
print(table.tolist(), length.tolist(), sequence.tolist(), reader.retries)
"""


def test_a_reader_that_stops_in_the_middle_of_a_read_does_not_hold_up_the_writer(writer: TablesWriter) -> None:
    """Its map is read-only, and the writer depends on nothing that a reader could change, not even a lock."""
    write_row(writer, 1, [1, 1], 1, 1)
    with subprocess.Popen([sys.executable, "-c", STOPPED_READER, str(writer.path)], stdout=subprocess.PIPE) as process:
        try:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            for n in range(1000):
                write_row(writer, 2, [n, n], n, n)
            assert writer.row_length[2] == 999
            assert os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED) == (0, 0)  # still in its read
            process.send_signal(signal.SIGCONT)
            assert process.communicate(timeout=60)[0] == b"[[1, 1], [999, 999]] [1, 999] [1, 999] 1\n"
        finally:
            process.kill()


def test_gauges_that_are_written_while_they_are_read_are_read_again(
    writer: TablesWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = range(len(GAUGES)), range(100, 100 + len(GAUGES))
    writer.write_gauges(old)
    reader = TablesReader(writer.path)

    class Torn:
        """The gauges, read once with the first half before a write and the rest after it."""

        def __init__(self, values: Any) -> None:
            self._values, self._first = values, True

        def __getitem__(self, key: Any) -> Any:
            if not isinstance(key, slice) or not self._first:
                return self._values[key]
            self._first = False
            before = self._values[key].copy()
            writer.write_gauges(new)
            half = len(before) // 2
            return np.concatenate([before[:half], self._values[key][half:]])

    monkeypatch.setattr(reader, "_gauges", Torn(reader._gauges))
    assert list(reader.gauges().values()) == list(new)


@pytest.mark.parametrize(
    ("room_bytes", "problem"),
    [
        (64 << 10, "state_dir: {}/state cannot be used: [Errno 27] File too large; remove the cause"),
        (1 << 20, "runtime_dir: {} has no room for the shared tables"),
    ],
)
def test_where_there_is_no_room_nothing_is_left(room_bytes: int, problem: str) -> None:
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room_bytes}, {room_bytes}))\n"
        "from kvforge.coordinator.config import CoordinatorConfig\n"
        "from kvforge.coordinator.server import Server\n"
        "from kvforge.protocol.errors import InvalidConfiguration\n"
        "try: Server(CoordinatorConfig(runtime_dir=sys.argv[1]))\n"
        "except InvalidConfiguration as error: print(error)\n"
    )
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60)
        assert list(Path(folder).iterdir()) == []
    assert (done.returncode, done.stderr) == (0, "")
    assert problem.format(folder) in done.stdout
    assert ("lower limits.sequences_max" in done.stdout) == problem.startswith("runtime_dir")
