"""The declared format: covers the machine's whole state, tolerates missing and unknown fields, never runs code."""

from __future__ import annotations

import random
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvforge.coordinator.core.cache.groups import SentStep
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.requests.idempotency import IdempotencyKey
from kvforge.coordinator.core.requests.phases import Phases
from kvforge.coordinator.core.requests.request import Request
from kvforge.coordinator.core.requests.streams import StreamRows
from kvforge.coordinator.core.requests.top_logprobs import TopLogprobs
from kvforge.coordinator.journal import declared, declared_cache, entries, field_markers, snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.coordinator.journal.fields import Restorer, fields_of
from kvforge.coordinator.journal.identity import AcknowledgedPositionWriter
from kvforge.coordinator.journal.memory import ArrayWriter, Bytes, read_arrays
from kvforge.coordinator.journal.recovery import recover
from kvforge.coordinator.journal.saving import saved
from kvforge.protocol.errors import InvalidConfiguration, JournalCorrupt
from tests.amount import examples
from tests.coordinator.journal.test_recovery import boot, cut_by_a_snapshot, lived
from tools.simulation.digest import state_digest

CRC = struct.Struct("<I")
SIZE = struct.Struct("<Q")
MEMORY_MAX = 2 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal that begins with a snapshot of a busy world."""
    made = tmp_path_factory.mktemp("lived")
    lived(43, made)
    return cut_by_a_snapshot(made / "journal", 150)


@pytest.fixture(scope="module")
def good(folder: Path) -> bytes:
    (path,) = folder.glob("state-*")
    return path.read_bytes()


def with_crc(data: bytes) -> bytes:
    return data + CRC.pack(zlib.crc32(data))


def parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """The head, the state and the arrays of a snapshot."""
    rest = Bytes(memoryview(data)[len(snapshot.MAGIC) : -CRC.size])
    head, state = bytes(rest.read(rest.number())), bytes(rest.read(rest.number()))
    return head, state, bytes(rest.read(rest.left))


def whole(head: bytes, state: bytes, arrays: bytes) -> bytes:
    return with_crc(snapshot.MAGIC + SIZE.pack(len(head)) + head + SIZE.pack(len(state)) + state + arrays)


def changed(data: bytes, change: Any) -> bytes:
    """A snapshot with its state modified by `change` as plain values."""
    head, state, arrays = parts(data)
    values = msgspec.msgpack.decode(state, strict=False)
    change(values)
    return whole(head, msgspec.msgpack.encode(values), arrays)


def machine_of(data: bytes, where: Path) -> Machine:
    path = where / "state-0000000000000001"
    path.write_bytes(data)
    return snapshot.Snapshot(path).machine()


def refused(data: bytes, where: Path) -> bool:
    """Return whether the snapshot is refused with JournalCorrupt, the only permitted error."""
    try:
        machine_of(data, where)
    except JournalCorrupt:
        return True
    return False


def test_it_is_the_same_machine(good: bytes, tmp_path: Path) -> None:
    machine = machine_of(good, tmp_path)
    machine.check_invariants()
    arrays = ArrayWriter()
    again = snapshot.Snapshot(tmp_path / "state-0000000000000001")
    snapshot.write(tmp_path / "again", machine, again.head)
    assert state_digest(snapshot.Snapshot(tmp_path / "again").machine()) == state_digest(machine)
    assert saved(machine, arrays).turns == machine.turns > 0


def test_an_array_that_two_parts_share_is_one_again(good: bytes, tmp_path: Path) -> None:
    machine = machine_of(good, tmp_path)
    cache = machine.cache
    assert machine.admission.waiting.service is cache.tenants.service
    assert any(column is cache.sequences.length for column in cache.sequences._columns)
    assert np.shares_memory(cache.store.contents, cache.store.tokens)
    assert machine.workers is machine._reports.workers
    new = Machine(boot(), 0).cache.sequences
    assert [each.dtype for each in cache.sequences._columns] == [each.dtype for each in new._columns]


def test_a_field_that_the_reader_does_not_know_is_ignored(good: bytes, tmp_path: Path) -> None:
    def everywhere(values: Any) -> None:
        values["another"] = {"deep": [1, 2]}
        values["cache"]["blocks"]["another"] = 1
        values["requests"]["known"][0]["another"] = "text"
        values["limits"]["bounds"]["another_max"] = 7
        values["limits"]["another_section"] = {}

    expected = state_digest(machine_of(good, tmp_path))
    assert state_digest(machine_of(changed(good, everywhere), tmp_path)) == expected


def test_a_field_that_the_writer_did_not_know_takes_its_default() -> None:
    """New fields have defaults: an array is as in a new machine, a plain value as declared."""

    class Later(declared_cache.SavedBlocks):
        added: field_markers.I64 | None = None
        counted: int = 7

    arrays = ArrayWriter()
    machine = Machine(boot(), 0)
    before = msgspec.msgpack.encode(saved(machine, arrays).cache.blocks)
    part = machine.cache.blocks
    part.added = there = np.arange(3)  # type: ignore[attr-defined]
    written: list[bytes] = []
    arrays.write(lambda data: written.append(bytes(data)))
    table = read_arrays(Bytes(memoryview(b"".join(written))), 1 << 30)
    Restorer(table).restore(part, msgspec.msgpack.decode(before, type=Later))
    assert part.added is there and part.counted == 7  # type: ignore[attr-defined]


def test_snapshots_of_this_version_and_of_the_one_before_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stopped coordinator leaves a snapshot without records, because other versions cannot read its records."""
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (path,) = folder.glob("state-*")
    (stopped / path.name).write_bytes(path.read_bytes())
    head = snapshot.Snapshot(path).head
    mark = AcknowledgedPositionWriter(stopped, False, head.journal)
    mark.write(head.number, head.before)
    mark.close()
    assert recover(stopped) is not None
    monkeypatch.setattr(entries, "STATE_VERSION", STATE_VERSION + 1)
    assert recover(stopped) is not None
    with pytest.raises(InvalidConfiguration, match=rf"records of state version {STATE_VERSION}.*leaves a snapshot"):
        recover(folder)
    monkeypatch.setattr(entries, "STATE_VERSION", STATE_VERSION + 2)
    with pytest.raises(InvalidConfiguration, match=r"reads .* and the one before"):
        recover(stopped)
    monkeypatch.setattr(entries, "STATE_VERSION", STATE_VERSION - 1)
    with pytest.raises(InvalidConfiguration, match=f"snapshot of state version {STATE_VERSION}"):
        recover(stopped)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_whatever_bytes_are_changed_it_is_read_or_refused(
    data: st.DataObject, good: bytes, tmp_path_factory: Any
) -> None:
    """With a corrected checksum: bit flips, truncation, swaps, and huge lengths."""
    body = bytearray(good[: -CRC.size])
    how = data.draw(st.sampled_from(["flip", "cut", "swap", "length", "repeat"]))
    # Most of a snapshot is arrays, where a change only yields another number: concentrate on the heads and the state.
    limit = min(len(body), 2 * len(parts(good)[1])) if data.draw(st.booleans()) else len(body)
    where = data.draw(st.integers(0, limit - 1))
    if how == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            body[data.draw(st.integers(0, limit - 1))] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del body[where : where + data.draw(st.integers(1, 5000))]
    elif how == "swap":
        size, other = data.draw(st.integers(1, 64)), data.draw(st.integers(0, limit - 1))
        body[where : where + size], body[other : other + size] = body[other : other + size], body[where : where + size]
    elif how == "length":
        body[where : where + 8] = SIZE.pack(data.draw(st.sampled_from([1 << 20, 1 << 32, 1 << 48, (1 << 64) - 1])))
    else:
        body[where:where] = body[where : where + data.draw(st.integers(1, 5000))]
    refused(with_crc(bytes(body)), tmp_path_factory.getbasetemp())  # raises nothing else


def leaves(values: Any) -> list[tuple[Any, Any]]:
    """Locations of plain values and containers in a state: (container, key)."""
    found: list[tuple[Any, Any]] = []
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        found.append((values, key))
        found += leaves(value)
    return found


ODD = [None, -1, 1 << 63, (1 << 64) - 1, -(1 << 63), "text", "", b"bytes", [], {}, [[]], True, 1.5, "9" * 5000]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_values_are_changed_it_is_read_or_refused(seed: int, good: bytes, tmp_path: Path) -> None:
    """Each value in turn gets another type, or an impossible value."""
    drawn = random.Random(seed)
    head, state, arrays = parts(good)
    count = refusals = 0
    for _ in range(60):
        values = msgspec.msgpack.decode(state, strict=False)
        container, key = drawn.choice(leaves(values))
        container[key] = drawn.choice(ODD)
        count += 1
        refusals += refused(whole(head, msgspec.msgpack.encode(values), arrays), tmp_path)
    assert refusals > count // 4, "most of these changes must be refused"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blocks_max", 1 << 50),
        ("sequences_max", 1 << 40),
        ("tenants_max", 1 << 40),
        ("blocks_per_sequence_max", 1 << 26),
    ],
)
def test_limits_beyond_the_memory_of_the_host_are_refused_before_anything_is_made(
    field: str, value: int, good: bytes, tmp_path: Path
) -> None:
    def grow(values: Any) -> None:
        values["limits"]["bounds"][field] = value

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refused(changed(good, grow), tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_arrays_of_huge_shapes_are_refused_before_anything_is_made(good: bytes, tmp_path: Path) -> None:
    head, state, _ = parts(good)
    for lengths in ((1 << 40, 1), (1 << 62, 4), (1 << 34, 1 << 34)):
        array = struct.pack("<QBB6xQQQ", 1, 0, 2, *lengths, 0)
        assert refused(whole(head, state, array), tmp_path)
    assert refused(whole(head, state, SIZE.pack((1 << 64) - 1)), tmp_path)


def test_reading_never_imports_calls_or_finds_what_a_file_names() -> None:
    """The code that reads a folder neither imports pickle nor resolves names."""
    code = (
        "import sys, kvforge.coordinator.replay, kvforge.coordinator.journal.state_folder\n"
        "sys.exit([name for name in sys.modules if name in ('dill', 'cloudpickle')] != [])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False, timeout=60)
    assert done.returncode == 0
    for path in (Path(__file__).parents[3] / "coordinator").rglob("*.py"):
        text = path.read_text()
        assert "pickle" not in text and "marshal" not in text and "import_module" not in text, path.name


def test_every_attribute_is_declared_or_made_by_the_constructor() -> None:
    """An attribute that is added to the core but not declared would be lost in a restart."""
    new = Machine(boot(), 0)
    undeclared = {
        (type(part).__name__, name)
        for part, cls in declared_parts(new)
        for name, value in vars(part).items()
        if isinstance(value, int | float | str | list | dict | set | np.ndarray)
        and name not in {field.name for field in fields_of(cls)}
        and name.lstrip("_") not in {field.name for field in fields_of(cls)}
    }
    assert undeclared == WIRING, "declare a new attribute in coordinator/journal/declared.py, or list it here"


@pytest.mark.parametrize(
    ("cls", "kept"),
    [
        (Request, declared.SavedRequest),
        (Phases, declared.SavedPhases),
        (SentStep, declared_cache.SavedStep),
        (IdempotencyKey, declared.SavedKey),
        (StreamRows, declared.SavedStreamRows),
        (TopLogprobs, declared.SavedTops),
    ],
)
def test_every_field_of_what_comes_and_goes_is_declared(cls: Any, kept: Any) -> None:
    names = getattr(cls, "__struct_fields__", None) or getattr(cls, "_fields", None) or cls.__slots__
    assert {field.name for field in fields_of(kept)} == set(names)


# Attributes that follow from the limits, are rebuilt by the snapshot reader, or are published again.
WIRING = {
    ("Tenants", "_most"),
    ("Tenants", "has_host_quotas"),  # these follow from the limits
    ("Tenants", "has_disk_quotas"),
    ("Tenants", "disk_ceiling"),
    ("Tenants", "disk_floor"),
    ("Tenants", "host_ceiling"),
    ("Tenants", "host_floor"),
    ("Meters", "_last"),
    ("Blocks", "block_size"),
    ("Blocks", "changed"),
    ("PrefixStore", "contents"),
    ("Pins", "_holders_max"),
    ("Sequences", "block_size"),
    ("Sequences", "context_tokens_max"),
    ("Sequences", "_columns"),
    ("Sequences", "changed_rows"),
    ("Sequences", "changed_lengths"),
    ("Sequences", "changed_cells"),
    ("Sequences", "changed_states"),
    ("Sequences", "changed_rings"),
    ("RunningRows", "readers_changed"),
    ("RequestTable", "first_id"),
    ("RequestTable", "_ttl_us"),
    ("WaitingQueue", "_ageing_us"),
    ("WaitingQueue", "service"),
    ("WaitingQueue", "batches"),  # counted anew
    ("WorkerReports", "_crashes_max"),
    ("WorkerReports", "_timeout_us"),
    ("WorkerReports", "_boot"),
    ("WorkerReports", "_reattach_us"),
    ("WorkerReports", "_ended_max"),
    ("WorkerReports", "_effects"),
    ("WorkerReports", "_reports"),
    ("Machine", "_effects"),
    ("Machine", "workers"),
    ("Machine", "_commands_for"),
    ("Machine", "_commands_of"),
}


def declared_parts(machine: Machine) -> list[tuple[Any, Any]]:
    cache = machine.cache
    return [
        (machine, declared.SavedMachine),
        (cache, declared_cache.SavedCache),
        (cache.tenants, declared_cache.SavedTenants),
        (cache.tenants.meters, declared_cache.SavedMeters),
        (cache.blocks, declared_cache.SavedBlocks),
        (cache.store, declared_cache.SavedStore),
        (cache.pins, declared_cache.SavedPins),
        (cache.sequences, declared_cache.SavedSequences),
        (cache.waits, declared.SavedWaits),
        (machine.requests, declared.SavedRequests),
        (machine.admission, declared.SavedAdmission),
        (machine.admission.waiting, declared.SavedQueue),
        (machine.admission.rows, declared.SavedRows),
        (machine.streams, declared.SavedStreams),
        (machine.sessions, declared.SavedSessions),
        (machine._reports, declared.SavedReports),
    ]
