"""The shared tables as clients read them: consistent rows, the writer's identity, and errors without tables."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

from kvforge import (
    AsyncClient,
    BlockCounts,
    BlockNotFound,
    CachedSequence,
    Client,
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolError,
    SequenceNotFound,
    Tables,
    Unavailable,
)
from kvforge.protocol.layout import BLOCK_KINDS, BLOCK_STATES, GAUGES, HEADER, LAYOUT_VERSION, Geometry
from kvforge.protocol.messages import Welcome
from kvforge.protocol.service_metrics import attempts
from kvforge.protocol.tables import TablesReader, TablesWriter
from kvforge.protocol.transport import TABLES_FILE
from tests.kvforge.fake_coordinator import Running

GEOMETRY = Geometry(slots=8, blocks=64, blocks_per_sequence=16, block_size=4)
DEADLINE_S = 30.0


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TablesWriter]:
    tables = TablesWriter(tmp_path / TABLES_FILE, GEOMETRY, "boot-1")
    yield tables
    tables.close()


@pytest.fixture
def tables(writer: TablesWriter) -> Tables:
    return Tables(writer.path.parent)


def fill(writer: TablesWriter, slot: int, blocks: list[int], length: int, sequence: int) -> None:
    """Change the fields of a row while it is marked."""
    writer.block_table[slot, : len(blocks)] = blocks
    writer.row_blocks[slot], writer.row_length[slot], writer.row_sequence[slot] = len(blocks), length, sequence


def write_row(writer: TablesWriter, slot: int, blocks: list[int], length: int, sequence: int) -> None:
    writer.begin_rows(np.array([slot]))
    fill(writer, slot, blocks, length, sequence)
    writer.end_rows(np.array([slot]))


def write_header(writer: TablesWriter, field: str, value: int) -> None:
    offset = HEADER.fields[field][1]  # type: ignore[index]
    with writer.path.open("r+b") as file:
        file.seek(offset)
        file.write(value.to_bytes(HEADER[field].itemsize, "little"))


def shown(tables: Tables) -> list[tuple[int, int]]:
    ids, lengths = tables.sequences()
    assert (ids.dtype, lengths.dtype) == (np.int64, np.int32)
    return list(zip(ids.tolist(), lengths.tolist(), strict=True))


# ----------------------------------------------------------------------------------------------------- what it shows


def test_what_the_coordinator_published(writer: TablesWriter, tables: Tables) -> None:
    assert shown(tables) == []
    write_row(writer, 3, [5, 9, 7], 11, 42)
    write_row(writer, 6, [], 2, 43)  # its blocks were evicted
    writer.block_refcount[9], writer.block_generation[9], writer.block_owner[9] = 2, 7, 1
    writer.block_kind[9] = BLOCK_KINDS.index("checkpoint")
    writer.block_state[9] = BLOCK_STATES.index("quarantined")
    writer.write_gauges(range(len(GAUGES)))
    assert shown(tables) == [(42, 11), (43, 2)]
    row = tables.sequence(42)
    assert (row.sequence_id, row.length, row.blocks.tolist(), row.blocks.dtype) == (42, 11, [5, 9, 7], np.int32)
    assert tables.sequence(CachedSequence(43)).blocks.size == 0
    assert tables.block(9) == BlockCounts(refcount=2, generation=7, owner=1, kind="checkpoint", state="quarantined")
    assert tables.block(63) == BlockCounts(0, 0, 0, "kv", "free")
    assert tables.block(np.int32(9)) == tables.block(9)  # type: ignore[arg-type]
    for wrong in (9.0, "9", True):
        with pytest.raises(InvalidRequest, match="block_id"):
            tables.block(wrong)  # type: ignore[arg-type]
    assert tables.gauges() == dict(zip(GAUGES, range(len(GAUGES)), strict=True))
    assert (tables.boot, tables.block_size, tables.pid) == ("boot-1", 4, os.getpid())
    row.blocks[:] = 0  # a copy
    assert tables.sequence(42).blocks.tolist() == [5, 9, 7]


def test_all_blocks_at_once_are_copies(writer: TablesWriter, tables: Tables) -> None:
    writer.block_refcount[[0, 2]], writer.block_generation[2], writer.block_owner[2] = [1, 3], 7, 5
    writer.block_kind[:3], writer.block_state[:3] = [3, 0, 1], [1, 0, 2]
    found = tables.blocks(3)
    writer.block_refcount[:] = writer.block_kind[:] = writer.block_state[:] = 9
    assert (found.refcount.tolist(), found.generation.tolist(), found.owner.tolist()) == (
        [1, 0, 3],
        [0, 0, 7],
        [0, 0, 5],
    )
    assert (found.kind.tolist(), found.state.tolist()) == ([3, 0, 1], [1, 0, 2])
    assert tables.blocks(1000).owner.size == GEOMETRY.blocks and tables.blocks(0).owner.size == 0
    with pytest.raises(InvalidRequest, match="count"):
        tables.blocks(-1)


def test_what_is_not_there_is_refused_by_its_id(writer: TablesWriter, tables: Tables) -> None:
    write_row(writer, 0, [1], 1, 5)
    with pytest.raises(SequenceNotFound) as missing:
        tables.sequence(6)
    assert missing.value.sequence_id == 6
    for wrong in (0, -1, True):
        with pytest.raises(InvalidRequest, match="sequence"):
            tables.sequence(wrong)
    for block_id in (-1, 64):
        with pytest.raises(BlockNotFound) as unknown:
            tables.block(block_id)
        assert unknown.value.block_id == block_id


def test_the_slots_of_sequences(writer: TablesWriter) -> None:
    write_row(writer, 3, [5], 1, 42)
    write_row(writer, 1, [6], 1, 43)
    reader = TablesReader(writer.path)
    assert reader.occupied_slots().tolist() == [1, 3]
    assert (reader.slot_of(42), reader.slot_of(43), reader.slot_of(44)) == (3, 1, None)
    assert reader.pid == os.getpid()


# --------------------------------------------------------------------------------------------- while it is written


def after(tables: Tables, name: str, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `action` once, after the reader's method `name` has returned."""
    method, pending = getattr(tables._reader, name), [action]

    def interrupted(*arguments: Any) -> Any:
        found = method(*arguments)
        if pending:
            pending.pop()()
        return found

    monkeypatch.setattr(tables._reader, name, interrupted)


def test_a_row_in_the_middle_of_a_write_is_waited_for(
    writer: TablesWriter, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_row(writer, 2, [1, 2], 8, 7)
    writer.begin_rows(np.array([2]))
    fill(writer, 2, [3, 4, 5], 9, 7)

    def ended_meanwhile() -> Iterator[None]:
        for number, _ in enumerate(attempts()):
            if number == 5:
                writer.end_rows(np.array([2]))
            yield

    monkeypatch.setattr("kvforge.protocol.tables.attempts", ended_meanwhile)
    row = tables.sequence(7)
    assert (row.blocks.tolist(), row.length) == ([3, 4, 5], 9)
    assert tables._reader.retries == 5


def test_a_row_that_never_comes_to_rest_is_given_up(
    writer: TablesWriter, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the coordinator was killed in the middle of a write."""
    monkeypatch.setattr("kvforge.protocol.service_metrics.READ_WAIT_S", 0.0)
    write_row(writer, 2, [1, 2], 8, 7)
    write_row(writer, 3, [4], 4, 8)
    writer.begin_rows(np.array([2]))
    with pytest.raises(DeadlineExceeded, match="row 2"):
        tables.sequence(7)
    with pytest.raises(DeadlineExceeded, match="row 2"):
        tables.sequences()
    assert tables.sequence(8).blocks.tolist() == [4]


def test_a_slot_that_changes_hands_is_looked_for_again(
    writer: TablesWriter, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_row(writer, 2, [1, 2], 8, 7)

    def moved() -> None:
        write_row(writer, 2, [3], 1, 9)
        write_row(writer, 5, [1, 2], 8, 7)

    after(tables, "slot_of", moved, monkeypatch)
    assert tables.sequence(7).blocks.tolist() == [1, 2]
    after(tables, "slot_of", lambda: write_row(writer, 5, [4], 1, 10), monkeypatch)
    with pytest.raises(SequenceNotFound):
        tables.sequence(7)
    assert tables.sequence(9).blocks.tolist() == [3]


def test_a_list_holds_neither_free_slots_nor_lengths_of_others(
    writer: TablesWriter, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in range(3):
        write_row(writer, slot, [slot], slot + 1, slot + 10)

    def change() -> None:
        write_row(writer, 0, [], 0, 0)
        write_row(writer, 1, [5, 6], 7, 20)

    after(tables, "occupied_slots", change, monkeypatch)
    assert shown(tables) == [(20, 7), (12, 3)]


# A row of k blocks holds 4k tokens, all its block ids are k, and k changes with every write. Ids are consecutive.
BUSY = """
import sys
import numpy as np
from pathlib import Path
from kvforge.protocol.layout import Geometry
from kvforge.protocol.tables import TablesWriter
tables = TablesWriter(Path(sys.argv[1]), Geometry(slots=8, blocks=64, blocks_per_sequence=16, block_size=4), "busy")
count = 0
while True:
    slot, k = count % 8, 1 + count % 13
    at = np.array([slot])
    tables.begin_rows(at)
    tables.row_sequence[slot] = 1 + slot + 8 * (count // 2000)
    tables.block_table[slot, :k] = k
    tables.row_blocks[slot], tables.row_length[slot] = k, 4 * k
    tables.end_rows(at)
    if count == 8:
        print("ready", flush=True)
    count += 1
"""


def test_rows_of_a_busy_coordinator_are_whole(tmp_path: Path) -> None:
    path = tmp_path / TABLES_FILE
    with subprocess.Popen([sys.executable, "-c", BUSY, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            tables = Tables(tmp_path)
            assert tables.alive
            ids, found, deadline = set(), 0, monotonic() + DEADLINE_S
            while found < 2000 or len(ids) <= 8:  # more ids than slots: slots were reused
                assert monotonic() < deadline, (found, len(ids))
                for sequence, length in shown(tables):
                    ids.add(sequence)
                    assert length in range(4, 4 * 13 + 1, 4)
                    try:
                        row = tables.sequence(sequence)
                    except SequenceNotFound:  # another sequence has its slot now
                        continue
                    assert row.blocks.tolist() == [row.length // 4] * (row.length // 4)
                    found += 1
        finally:
            process.kill()


# --------------------------------------------------------------------------------------- who wrote it, and where it is


def test_the_end_of_the_process_that_wrote_is_seen(writer: TablesWriter, tables: Tables) -> None:
    assert tables.alive
    assert not tables.ended(0.001)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        write_header(writer, "pid", process.pid)
        other = Tables(writer.path.parent)
        assert other.alive
        process.kill()
        assert other.ended(DEADLINE_S)  # before a wait
        assert not other.alive
    assert not other.alive
    assert other.gauges() == tables.gauges()  # its last values remain readable


def test_a_later_start_in_the_same_folder_is_another_object(writer: TablesWriter, tables: Tables) -> None:
    write_row(writer, 0, [1], 1, 5)
    later = TablesWriter(writer.path, GEOMETRY, "boot-2")
    write_row(later, 0, [2], 2, 6)
    assert (tables.boot, shown(tables)) == ("boot-1", [(5, 1)])
    fresh = Tables(writer.path.parent)
    assert (fresh.boot, shown(fresh)) == ("boot-2", [(6, 2)])


def test_the_folder_is_found_as_everywhere(
    writer: TablesWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFORGE_RUNTIME_DIR", str(tmp_path))
    assert Tables().boot == "boot-1"
    monkeypatch.chdir(tmp_path.parent)
    assert Tables(tmp_path.name).boot == "boot-1"


def test_without_a_file_no_coordinator_serves(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorUnavailable, match=r"no coordinator serves in .*kvforge up") as caught:
        Tables(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / TABLES_FILE).mkdir()
    with pytest.raises(Unavailable, match="Is a directory"):
        Tables(tmp_path)


def test_another_layout_is_refused_naming_both(writer: TablesWriter) -> None:
    write_header(writer, "layout_version", 99)
    with pytest.raises(ProtocolError, match=f"layout 99; this side reads {LAYOUT_VERSION}"):
        Tables(writer.path.parent)


def test_the_tables_of_a_welcome(writer: TablesWriter) -> None:
    def welcome(boot: str, path: Path) -> Welcome:
        return Welcome(rid=1, version=1, boot=boot, tables_path=str(path))

    assert Tables.of(welcome("boot-1", writer.path), "ipc:///x").boot == "boot-1"
    with pytest.raises(
        CoordinatorUnavailable, match=r"boot boot-1, not to the coordinator at tcp://x:1: that one runs on another"
    ):
        Tables.of(welcome("boot-2", writer.path), "tcp://x:1")
    with pytest.raises(CoordinatorUnavailable, match=r"tcp://x:1 are not at .*/none.*another machine"):
        Tables.of(welcome("boot-1", Path("/none")), "tcp://x:1")


def test_both_clients_connect_for_it_and_refuse_what_is_not_here() -> None:
    """The fake coordinator names a missing file, as a coordinator on another machine does."""

    async def ask(endpoint: str) -> None:
        async with AsyncClient(endpoint, timeout_s=10) as kv:
            await kv.tables()

    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as folder, Running(Path(folder)) as fake:
        with pytest.raises(CoordinatorUnavailable, match="are not at"), Client(fake.endpoint, timeout_s=10) as kv:
            kv.tables()
        fake.expect("Hello")
        with pytest.raises(CoordinatorUnavailable, match="are not at"):
            asyncio.run(ask(fake.endpoint))
        with Client(f"ipc://{folder}/nobody.sock", connect_timeout_s=0.1) as kv:
            with pytest.raises(CoordinatorUnavailable, match="does not answer"):
                kv.tables()
            with pytest.raises(InvalidRequest, match="timeout_s"):
                kv.tables(timeout_s=0)


def test_a_coordinator_that_goes_on_in_a_new_file_is_read_from_there(writer: TablesWriter, tables: Tables) -> None:
    writer.write_gauges([1] * len(GAUGES))
    assert set(tables.gauges().values()) == {1}
    writer.path.unlink()
    assert set(tables.gauges().values()) == {1}  # killed and not yet restarted
    again = TablesWriter(writer.path, GEOMETRY, "boot-1")
    again.write_gauges([2] * len(GAUGES))
    write_row(again, 3, [7, 9], 6, 44)
    assert set(tables.gauges().values()) == {2}
    assert tables.sequence(44).blocks.tolist() == [7, 9]


def test_tables_of_another_start_are_not_taken_for_these(writer: TablesWriter, tables: Tables) -> None:
    writer.write_gauges([1] * len(GAUGES))
    other = TablesWriter(writer.path, GEOMETRY, "boot-2")
    other.write_gauges([2] * len(GAUGES))
    assert (tables.boot, set(tables.gauges().values())) == ("boot-1", {1})
    assert Tables(writer.path.parent).boot == "boot-2"
