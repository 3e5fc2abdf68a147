"""A server's state directory: recovery, snapshots written by a child process, removal, and a full disk."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.config import CoordinatorConfig
from kvforge.coordinator.core.events import ClientCame, Event, FromClient, FromWorker, Turn
from kvforge.coordinator.core.limits import Bounds, CacheLimits, ScheduleLimits
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.log import Journal, segments, states
from kvforge.coordinator.journal.recovery import Recovered, recover
from kvforge.coordinator.journal.state_folder import StateFolder
from kvforge.coordinator.machine_store import MachineStore
from kvforge.protocol import codec
from kvforge.protocol.errors import CoordinatorInUse, InvalidConfiguration, JournalFull
from kvforge.protocol.messages import CreateSequence, Message, Submit, WorkerHello, WorkerReady
from tests.coordinator.driver import model_info
from tests.coordinator.journal.files import head_of, records_of
from tools.simulation.digest import state_digest

DEADLINE_S = 60.0
BLOCKS = 64  # by default there is room for a million
READY = WorkerReady(rid=2, model=model_info(), blocks=8, bytes_per_block=1, kv_dtype="float32", device="cpu")


def never() -> bool:
    return False


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf-") as made:
        yield Path(made)


def config(folder: Path, **changed: Any) -> CoordinatorConfig:
    """Return the configuration with room for few blocks, unless `changed` names another number."""
    folders = {"runtime_dir": str(folder / "r"), "state_dir": str(folder / "s")}
    limits = {"blocks_max": BLOCKS, **changed.get("limits", {})}
    return msgspec.convert({**folders, **changed, "limits": limits}, CoordinatorConfig)


class Lived:
    """A life that sends, writes and applies its events."""

    def __init__(self, config: CoordinatorConfig, discard: bool = False) -> None:
        self.life = MachineStore(config, never, discard)
        self.machine = self.life.machine

    def tell(self, event: Event, message: Message | None = None) -> None:
        now_us = self.life.now_us()
        assert self.life.journal is not None
        self.life.journal.note(event, now_us, codec.encode(message) if message is not None else ())
        self.machine.apply(event, now_us)

    def client(self, message: Message) -> None:
        number = self.life.next_number()
        self.tell(ClientCame(number))
        self.tell(FromClient(number, message, 7), message)

    def turn(self) -> None:
        began_us = self.life.now_us()
        self.tell(Turn())
        assert self.life.journal is not None
        self.life.journal.commit()
        self.life.turned(began_us)

    def busy(self, requests: int = 3) -> None:
        """Add a worker and requests, and start the first."""
        for message in (WorkerHello(rid=1, name="w", pid=1), READY):
            self.tell(FromWorker(1, message), message)
        for rid in range(requests):
            self.client(Submit(rid=rid, max_tokens=3, prompt=np.arange(4, dtype=np.int32)))
        self.turn()


def until(done: Callable[[], bool]) -> None:
    deadline = monotonic() + DEADLINE_S
    while not done():
        assert monotonic() < deadline, f"condition not met within {DEADLINE_S} s"
        select.select([], [], [], 0.01)


def test_another_life_goes_on_with_the_same_machine_and_numbers_and_a_later_time(folder: Path) -> None:
    first = Lived(config(folder))
    first.busy()
    boot, digest, now_us, numbers = (
        first.machine.boot,
        state_digest(first.machine),
        first.machine._clock.now_us,
        first.life.numbers,
    )
    first.life.close(ended=False)
    for _ in range(3):
        second = Lived(config(folder))
        assert second.life.again and second.machine.boot == boot
        assert state_digest(second.machine) == digest
        assert second.life.numbers == numbers and second.life.next_number() == numbers + 1
        assert second.life.now_us() >= now_us
        second.life.close(ended=False)


def test_a_child_writes_a_snapshot_and_what_it_holds_is_removed(folder: Path) -> None:
    lived = Lived(_journal(folder, bytes_max=1 << 16))
    lived.busy()
    state_folder = lived.life._state_folder
    assert state_folder is not None
    prompt = np.arange(2000, dtype=np.int32) % 1000

    def snapshots_made() -> bool:
        lived.client(CreateSequence(rid=5, tokens=prompt))
        lived.turn()
        return state_folder.snapshots >= 3

    until(snapshots_made)
    state = folder / "s"
    assert len(states(state)) == 1 and len(segments(state)) <= 2
    assert all(first >= next(iter(states(state))) for first in segments(state))
    assert sum(path.stat().st_size for path in state.iterdir()) < 8 << 20, "unused capacity must not be stored"
    digest = state_digest(lived.machine)
    lived.life.close(ended=False)
    found = recover(state)
    assert found is not None and state_digest(found.machine) == digest
    assert not list(state.glob("*.part"))


def test_a_snapshot_is_made_too_where_applying_it_all_again_would_take_too_long(folder: Path) -> None:
    lived = Lived(_journal(folder, replay_ms_max=1.0))
    lived.busy()
    state_folder = lived.life._state_folder
    assert state_folder is not None

    def made() -> bool:
        lived.turn()
        return state_folder.snapshots >= 1

    until(made)
    written = sum(path.stat().st_size for path in segments(folder / "s").values())
    for _ in range(20):
        assert lived.life.journal is not None
        lived.life.turned(lived.life.now_us() - 10_000)  # turns without events
    assert sum(path.stat().st_size for path in segments(folder / "s").values()) == written
    lived.life.close(ended=False)


@pytest.mark.parametrize("durability", ["process", "power"])
def test_the_loop_does_not_remove_what_a_snapshot_replaces(folder: Path, durability: str) -> None:
    """Removing large files takes as long as many turns."""
    lived = Lived(msgspec.structs.replace(_journal(folder, replay_ms_max=1.0), durability=durability))
    lived.busy()
    state_folder = lived.life._state_folder
    assert state_folder is not None
    for _ in range(2):
        until(lambda: _turned_into_a_snapshot(lived))
        os.waitid(os.P_PID, state_folder._child, os.WEXITED | os.WNOWAIT)
        (number,) = states(folder / "s")
        assert number == state_folder._child_number and list(segments(folder / "s")) == [number]
        lived.turn()
    assert state_folder.snapshots >= 1
    lived.life.close(ended=False)


def _turned_into_a_snapshot(lived: Lived) -> bool:
    """Run a turn; return whether it began a snapshot."""
    state_folder = lived.life._state_folder
    assert state_folder is not None
    before = state_folder._child_number
    lived.turn()
    return state_folder._child_number > before


def test_what_it_takes_to_read_a_snapshot_is_not_to_be_cut_by_another(folder: Path) -> None:
    first = Lived(config(folder))
    first.busy()
    first.life.close(ended=False)
    found = recover(folder / "s")
    assert found is not None
    state_folder = StateFolder(folder / "s", "process", 1 << 20, 500_000)
    state_folder.begin(found._replace(snapshot_us=10_000_000, took_us=10_000_001), never)
    assert not _begins_a_snapshot(state_folder, found, took_us=1, rested_us=1000)
    state_folder.close(keep=True)


@pytest.mark.parametrize(
    ("took_us", "rested_us", "turns"),
    [(20_000, 40_000, 26), (20_000, 19_000, 51), (20_000, 0, 51)],
    ids=["rests", "hardly rests", "never rests"],
)
def test_a_snapshot_waits_for_a_loop_without_rest_but_not_for_ever(
    folder: Path, took_us: int, rested_us: int, turns: int
) -> None:
    first = Lived(config(folder))
    first.busy()
    first.life.close(ended=False)
    found = recover(folder / "s")
    assert found is not None
    state_folder = StateFolder(folder / "s", "process", 1 << 20, 500_000)
    state_folder.begin(found._replace(snapshot_us=0, took_us=0), never)
    begun = [_begins_a_snapshot(state_folder, found, took_us, rested_us) for _ in range(turns)]
    assert begun == [False] * (turns - 1) + [True]
    state_folder.close(keep=True)


def _begins_a_snapshot(state_folder: StateFolder, found: Recovered, took_us: int, rested_us: int) -> bool:
    """Return whether a snapshot begins after one more turn, this long after the last one."""
    assert state_folder.journal is not None
    state_folder.journal.note(Turn(), found.now_us)
    state_folder.journal.commit()
    state_folder.turned(found.machine, took_us, state_folder._turned_us + rested_us + took_us, found.numbers)
    return state_folder._child > 0


def test_a_snapshot_that_fails_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvforge.coordinator.journal.snapshot.write", _fails)
    lived = Lived(_journal(folder, replay_ms_max=1.0))
    lived.busy()
    state_folder = lived.life._state_folder
    assert state_folder is not None
    ends: list[int] = []
    collect = state_folder._collect

    def collected(options: int, killed: bool = False) -> None:
        child = state_folder._child
        collect(options, killed)
        if child and not state_folder._child:
            ends.append(child)

    monkeypatch.setattr(state_folder, "_collect", collected)

    def failed() -> bool:
        lived.turn()
        return len(ends) >= 2

    until(failed)
    assert state_folder.snapshots == 0 and states(folder / "s") == {} and len(segments(folder / "s")) >= 3
    digest = state_digest(lived.machine)
    lived.life.close(ended=False)
    found = recover(folder / "s")
    assert found is not None and state_digest(found.machine) == digest


def _fails(*_arguments: object) -> None:
    raise OSError("no room")


def _journal(folder: Path, **values: float) -> CoordinatorConfig:
    return config(folder, journal=values)


@pytest.mark.parametrize("on_stop", ["drain", "keep"])
def test_what_nobody_can_ask_for_any_more_is_not_kept(folder: Path, on_stop: str) -> None:
    """A stop that drains ends running requests; one that keeps leaves them to the next start."""
    lived = Lived(config(folder, on_stop=on_stop))
    lived.turn()
    lived.life.close(ended=True)
    assert not (folder / "s").exists()
    lived = Lived(config(folder, on_stop=on_stop))
    lived.busy()
    assert (lived.machine.kept, len(lived.machine.requests.live)) == (0, 3)
    lived.life.close(ended=True)
    assert (folder / "s").exists() == (on_stop == "keep")
    lived = Lived(config(folder, on_stop=on_stop))
    assert len(lived.machine.requests.live) == (3 if on_stop == "keep" else 0)
    lived.client(CreateSequence(rid=9, idle_ttl_ms=10**6, tokens=np.arange(3, dtype=np.int32)))
    lived.turn()
    lived.life.close(ended=True)
    assert Lived(config(folder, on_stop=on_stop)).machine.kept == 1


def test_two_coordinators_do_not_keep_their_state_in_one_folder(folder: Path) -> None:
    lived = Lived(config(folder))
    with pytest.raises(CoordinatorInUse, match="another coordinator uses the state folder"):
        Lived(config(folder))
    lived.life.close(ended=False)
    Lived(config(folder)).life.close(ended=True)


def test_other_limits_apply_once_nothing_of_the_old_ones_is_kept(folder: Path) -> None:
    Lived(config(folder)).life.close(ended=False)
    second = Lived(config(folder, cache={"block_size": 32}))
    assert second.machine.limits.cache.block_size == 32 and not second.life.again


def _values(section: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Another valid value for each setting of a section."""
    other: dict[str, Any] = {"policy": "none", "zero_on_tenant_change": True, "drafts_shared": False}
    defaults = msgspec.structs.asdict(section())
    return [(name, other[name] if name in other else value + 1) for name, value in defaults.items()]


FIXED = [
    *(("limits", name, value) for name, value in _values(Bounds)),
    *(("cache", name, value) for name, value in _values(CacheLimits)),
    *(("schedule", name, value) for name, value in _values(ScheduleLimits)),
    ("quotas", "ada", {"weight": 2.0}),
]


@pytest.mark.parametrize(("section", "name", "value"), FIXED)
def test_a_setting_that_the_kept_state_fixes_is_refused_by_name(
    folder: Path, section: str, name: str, value: Any
) -> None:
    """Covers every setting of the core, enumerated from the structures themselves."""
    first = Lived(config(folder))
    first.busy()
    first.life.close(ended=False)
    before = {path.name: path.read_bytes() for path in (folder / "s").iterdir()}
    other = config(folder, **{section: {name: value}})
    problem = rf"^{section}\.{name}: is .*live requests: 3.* set it back, .* start with --fresh"
    with pytest.raises(InvalidConfiguration, match=problem):
        Lived(other)
    assert {path.name: path.read_bytes() for path in (folder / "s").iterdir()} == before
    third = Lived(other, discard=True)
    assert not third.machine.requests.live and third.machine.limits == other.core_limits()
    third.life.close(ended=False)


def test_all_settings_that_differ_are_named(folder: Path) -> None:
    first = Lived(config(folder))
    first.busy()
    first.life.close(ended=False)
    other = {"cache": {"block_size": 32}, "limits": {"sequences_max": 3}}
    with pytest.raises(
        InvalidConfiguration, match=r"limits\.sequences_max: is 3, .* with 256; cache\.block_size is 32, not 16"
    ):
        Lived(config(folder, **other))


def test_a_folder_that_others_may_write_to_is_not_read(folder: Path) -> None:
    (folder / "s").mkdir(mode=0o700)
    (folder / "s").chmod(0o770)
    with pytest.raises(InvalidConfiguration, match=r"state_dir: .* writable by this user alone"):
        Lived(config(folder))
    (folder / "s").rmdir()
    (folder / "s").write_text("a file")
    with pytest.raises(InvalidConfiguration, match=r"state_dir: .* cannot be used"):
        Lived(config(folder))


def test_a_folder_of_another_user_or_of_a_read_only_disk_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, real = os.getuid(), os.open
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(InvalidConfiguration, match=r"state_dir: .* must be owned and writable by this user"):
        Lived(config(folder))
    monkeypatch.undo()

    def read_only(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(InvalidConfiguration, match=r"state_dir: .* cannot be used: .*Read-only file system"):
        Lived(config(folder))
    monkeypatch.undo()
    Lived(config(folder)).life.close(ended=True)


def test_a_snapshot_that_cannot_be_begun_is_not_tried_again_at_each_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lived = Lived(_journal(folder, bytes_max=1 << 16))
    lived.busy()
    assert lived.life.journal is not None

    def rotate() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(lived.life.journal, "rotate", rotate)
    for _ in range(20):
        lived.client(CreateSequence(rid=5, tokens=np.arange(4000, dtype=np.int32)))
        lived.turn()
    assert lived.life.journal.bytes > 3 << 16
    told = [found.getMessage() for found in caplog.records if "no snapshot could be begun" in found.getMessage()]
    assert len(told) == 1
    lived.life.close(ended=False)


def test_on_a_full_disk_nothing_goes_on_until_there_is_room(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Earlier records stay readable: a partial write is rolled back."""
    stopped = [False]
    looks = [0]

    def stopping() -> bool:
        looks[0] += 1
        if looks[0] == 3 and not stopped[0]:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)  # free some space
        return stopped[0]

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = Journal(folder, 1, stopping=stopping)
    event, frames = _large()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
        for _ in range(3):
            journal.note(event, 1, frames)
            journal.commit()
        assert looks[0] == 3, "the journal must wait for space"
        assert [found.getMessage().partition(" in ")[0] for found in caplog.records] == [
            "no room for the journal",
            "there is space for the journal",
        ], "also after a partial write"
        stopped[0] = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (13_000, before[1]))
        journal.note(event, 1, frames)
        with pytest.raises(JournalFull, match="no room for the journal"):
            journal.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        journal.close()
    (path,) = segments(folder).values()
    assert [found.number for found in records_of(path)] == [1, 2, 3]


def test_a_snapshot_that_finds_no_room_takes_none(folder: Path) -> None:
    """The journal waits for the snapshot, and its leftovers would keep the disk full."""
    lived = Lived(config(folder))
    lived.busy()
    head = head_of(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match="File too large"):
            snapshot.write(folder / "state-1", lived.machine, head)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert [path.name for path in folder.iterdir()] == ["s"]
    lived.life.close(ended=True)


def test_a_file_that_may_not_grow_by_a_byte_is_a_full_disk_too(folder: Path) -> None:
    """With some space left, a write is partial; exactly at the limit it fails with a different error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = Journal(folder, 1, stopping=lambda: True)
    event, frames = _large()
    try:
        journal.note(event, 1, frames)
        journal.commit()
        resource.setrlimit(resource.RLIMIT_FSIZE, (segments(folder)[1].stat().st_size, before[1]))
        journal.note(event, 2, frames)
        with pytest.raises(JournalFull, match="no room for the journal"):
            journal.commit()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        journal.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        journal.close()
    (path,) = segments(folder).values()
    assert [found.number for found in records_of(path)] == [1, 2]


def _large() -> tuple[FromClient, list[bytes | memoryview]]:
    """An event of 4 KB, and its frames."""
    message = CreateSequence(rid=1, tokens=np.arange(1000, dtype=np.int32))
    return FromClient(1, message), codec.encode(message)


def test_a_snapshot_that_is_whole_makes_room_while_the_journal_waits_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lived = Lived(_journal(folder, replay_ms_max=1.0))
    lived.busy()
    state_folder, journal = lived.life._state_folder, lived.life.journal
    assert state_folder is not None and journal is not None
    until(lambda: (lived.turn(), state_folder._child > 0)[1])  # type: ignore[func-returns-value]
    assert len(segments(folder / "s")) == 2
    real, tries = os.write, [0]

    def write(descriptor: int, data: bytes) -> int:
        """Write only a part while the records that the snapshot replaces still exist."""
        tries[0] += 1
        return real(descriptor, data if len(segments(folder / "s")) == 1 else data[:10])

    monkeypatch.setattr("kvforge.coordinator.journal.log.os.write", write)
    lived.tell(Turn())
    journal.commit()
    journal.flush()
    monkeypatch.undo()
    assert tries[0] > 1
    digest = state_digest(lived.machine)
    lived.life.close(ended=False)
    found = recover(folder / "s")
    assert found is not None and state_digest(found.machine) == digest


def test_the_child_of_a_coordinator_that_dies_dies_with_it_and_holds_nothing(folder: Path) -> None:
    """Otherwise the next coordinator would find the folder in use."""
    code = (
        "import os, sys, time\n"
        "import kvforge.coordinator.journal.snapshot as snapshot\n"
        "snapshot.write = lambda *_: time.sleep(600)\n"
        "from tests.coordinator.journal.test_state_folder import Lived, _journal\n"
        "from pathlib import Path\n"
        "lived = Lived(_journal(Path(sys.argv[1]), replay_ms_max=1.0))\n"
        "lived.busy()\n"
        "while not lived.life._state_folder._child: lived.turn()\n"
        "print(lived.life._state_folder._child, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        links = Path(f"/proc/{child}/fd")
        until(lambda: all(int(entry.name) < 3 for entry in links.iterdir()))
        process.kill()
        process.wait(DEADLINE_S)
        until(lambda: not _alive(child))
        assert len(Lived(_journal(folder)).machine.requests.live) == 3
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdout.close()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
