"""The state folder of a server: recovery, the journal, and snapshots that shorten it.

A forked child writes each snapshot from its copy of the memory, so the loop stops only while the kernel copies the page
tables. The child first closes every descriptor, because it must not keep the sockets or the folder's lock of a
coordinator that dies meanwhile; it dies with its parent. It also removes the files that the snapshot replaces.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvforge.coordinator.core.machine import Machine
from kvforge.protocol.errors import CoordinatorInUse, InvalidConfiguration, KvforgeError, StateRemoved

from . import snapshot
from .disk import failed, make_folder, sync_file, sync_folder, unusable
from .identity import ACKNOWLEDGED, Origin
from .log import Journal, remove_before, segments, states
from .poison_detector import FILE, PoisonDetector
from .recovery import Recovered, cut_torn, recover
from .segment_completion import complete_segment
from .set_aside import set_aside
from .unwritten import FILE as UNWRITTEN
from .unwritten import UnwrittenRecords

PR_SET_PDEATHSIG = 1
NICE = 10
DEATHS_MAX = 3
LOOK_US = 1_000_000  # interval of checks that the folder exists: a cleaner may remove files that are not written
BUSY, BUSY_TURNS = 0.5, 16  # a loop counts as busy if it works this share of the time, over this many turns
PATIENCE = 2  # a busy loop gets its snapshot at this multiple of the limits
RETRY_RECORDS = 1000  # before another attempt after a snapshot could not be started
log = logging.getLogger("coordinator")


class StateFolder:
    """One state folder. `journal` is None until `begin`.

    A snapshot is written once the segments exceed `bytes_max`, or the loop time of their records `replay_us_max`. It
    waits until the loop is idle, because the child slows turns down (memory is copied when either process writes to
    it), but not beyond twice these limits. `longest_us` is the longest time for which a snapshot stopped the loop.
    """

    def __init__(
        self, folder: Path, durability: str, bytes_max: int, replay_us_max: int, deaths_max: int = DEATHS_MAX
    ) -> None:
        """Create the folder and lock it.

        Raises:
            InvalidConfiguration: The folder cannot be used.
            CoordinatorInUse: Another coordinator uses it.
        """
        self.folder, self._durable = folder, durability == "power"
        self._bytes_max, self._replay_us_max = bytes_max, replay_us_max
        self._spent_us = self._counted = self._turned_us = 0
        self._busy = 1.0
        self._child, self._child_number, self._not_before = 0, 0, 0
        self._look_us = 0
        self._files: set[str] = set()
        self.snapshots, self.longest_us = 0, 0
        self.journal: Journal | None = None
        self._deaths_max, self._lock = deaths_max, -1
        self._open_folder()

    def _open_folder(self) -> None:
        """Create the folder and lock it. Raise InvalidConfiguration or CoordinatorInUse."""
        folder = self.folder
        try:
            make_folder(folder, self._durable)
            found = folder.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                problem = f"{folder} must be owned and writable by this user alone, because its content is trusted"
                raise InvalidConfiguration("state_dir", problem)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._acquire_lock()
            self._poison_detector = PoisonDetector(folder, self._deaths_max)
            for path in folder.glob("*.part"):
                path.unlink()
        except OSError as error:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1
            raise unusable(folder, error) from None

    def _acquire_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise CoordinatorInUse(
                f"another coordinator uses the state folder {self.folder}: stop it, or choose another state_dir"
            ) from None

    def recover(self) -> Recovered | None:
        """Recover the state that an earlier coordinator left, and cut off a torn tail.

        With `durable`, the files are synced before the state has any effect, because the earlier coordinator may have
        died between a write and its sync.

        Raises:
            JournalCorrupt: A part is damaged or missing.
            InvalidConfiguration: Another version of kvforge wrote it.
            JournalFailed: The disk refuses to read or write it.
        """
        try:
            complete_segment(self.folder)
            if self._poison_detector.record_deaths >= self._deaths_max:
                set_aside(self.folder, self._poison_detector)
            try:
                found = recover(self.folder, self._poison_detector.recovering)
            except KvforgeError:
                self._poison_detector.recovered()  # a typed error is no crash, so no record is to blame
                raise
            self._poison_detector.recovered()
            if found is not None:
                cut_torn(found)
            if self._durable:
                self._sync_all()
        except OSError as error:
            raise failed(Path(error.filename) if isinstance(error.filename, str) else self.folder, error) from None
        return found

    def _sync_all(self) -> None:
        """Sync the files of the journal, its folder and the parents of that. Raise OSError."""
        for path in (*segments(self.folder).values(), *states(self.folder).values(), self.folder / ACKNOWLEDGED):
            if path.exists():
                sync_file(path)
        device = self.folder.stat().st_dev
        for folder in (self.folder, *self.folder.absolute().parents):
            if folder.stat().st_dev != device:
                break
            with suppress(PermissionError):  # a folder of another user is older, and on the disk
                sync_folder(folder)

    def discard(self) -> None:
        """Discard the state.

        Raises:
            JournalFailed: The disk refuses to.
        """
        try:
            self._discard()
        except OSError as error:
            raise failed(self.folder, error) from None

    def _discard(self) -> None:
        for path in (*segments(self.folder).values(), *states(self.folder).values()):
            path.unlink()
        for name in (ACKNOWLEDGED, UNWRITTEN, *(path.name for path in self.folder.glob("set-aside-*"))):
            (self.folder / name).unlink(missing_ok=True)
        if self._durable:
            sync_folder(self.folder)

    def begin(self, found: Recovered | None, stopping: Callable[[], bool], boot: str = "") -> Journal:
        """Start to write the journal.

        Args:
            found: The recovered state to continue; None starts a new journal.
            stopping: Returns whether the process was asked to stop.
            boot: The coordinator's boot, used if `found` is None.

        Raises:
            InvalidConfiguration: A file cannot be created.
        """
        origin = found.origin if found is not None else Origin.new(boot)
        number, before = (found.number, found.bytes) if found is not None else (1, 0)
        self._spent_us = found.took_us - found.snapshot_us if found is not None else 0
        try:
            unwritten = None if self._durable else UnwrittenRecords(self.folder, origin.journal, number)
            self.journal = Journal(
                self.folder,
                number,
                durable=self._durable,
                bytes_before=before,
                stopping=stopping,
                origin=origin,
                unwritten=unwritten,
            )
        except OSError as error:
            raise unusable(self.folder, error) from None
        self._files = self._names()
        self.journal.poison_detector = self._poison_detector
        return self.journal

    # ------------------------------------------------------------------------------------------------------ snapshots

    def turned(self, machine: Machine, took_us: int, now_us: int, numbers: int) -> None:
        """Write the records of a turn after its effects have left, check the folder, and write a snapshot if due.

        Args:
            machine: The machine.
            took_us: Duration of the turn in microseconds.
            now_us: The core's time in microseconds.
            numbers: Connection numbers used so far.

        Raises:
            StateRemoved: The folder or a file was removed.
            KvforgeError: The records cannot be written; they stay stored.
        """
        assert self.journal is not None
        self.journal.flush()
        if now_us >= self._look_us:
            self._look_us = now_us + LOOK_US
            if self._removed():
                raise StateRemoved(str(self.folder), "new events could not be kept there")
        since_us, self._turned_us = max(1, now_us - self._turned_us), now_us
        self._busy += (min(1.0, took_us / since_us) - self._busy) / BUSY_TURNS
        if self._child:
            self._collect(os.WNOHANG)
        if self.journal.number == self._counted:
            return  # no events
        self._counted = self.journal.number
        self._spent_us += took_us
        if self._child or self.journal.number < self._not_before:
            return
        times_over = max(self.journal.bytes / self._bytes_max, self._spent_us / self._replay_us_max)
        if times_over > PATIENCE or (times_over > 1 and self._busy < BUSY):
            self._begin_snapshot(machine, now_us, numbers)

    def _begin_snapshot(self, machine: Machine, now_us: int, numbers: int) -> None:
        assert self.journal is not None
        began_ns = time.monotonic_ns()
        self._spent_us = 0
        try:
            self._child_number = self.journal.rotate()
            self._files = self._names()
            head = snapshot.Head.of(self.journal, now_us, numbers)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that numpy's idle threads are not in the child
                parent, self._child = os.getpid(), os.fork()
            if not self._child:
                _write_and_end(parent, self.folder, self._child_number, self._durable, machine, head)
        except OSError as error:
            self._not_before = self.journal.number + RETRY_RECORDS
            log.warning("no snapshot could be begun: %s", error)
        self.longest_us = max(self.longest_us, (time.monotonic_ns() - began_ns) // 1000)

    def _collect(self, options: int, killed: bool = False) -> None:
        """Reap the child if it has ended, and remove what its snapshot replaces. killed: this process killed it."""
        ended, status = os.waitpid(self._child, options)
        if not ended:
            return
        self._child = 0
        if status:
            if not killed:
                code = os.waitstatus_to_exitcode(status)
                log.warning("a snapshot failed (status %d): the journal is kept whole", code)
            with suppress(OSError):
                (self.folder / snapshot.STATE.format(self._child_number)).with_suffix(".part").unlink(missing_ok=True)
            return
        self.snapshots += 1
        self._files = set()  # none to look for, where no descriptor is left to list them
        with suppress(OSError):
            remove_before(self.folder, self._child_number, self._durable)  # files that the child could not remove
            self._files = self._names()

    def _removed(self) -> bool:
        """Return whether the folder, or a file that the next process needs, was removed."""
        assert self.journal is not None
        try:
            if not os.path.samestat(self.folder.stat(), os.fstat(self._lock)) or self.journal.missing:
                return True
            # A child removes what its snapshot replaces.
            return not (self._child or self._files <= self._names())
        except OSError as error:
            # Without a free descriptor nothing can be listed: the next look finds what is gone.
            return error.errno not in (errno.EMFILE, errno.ENFILE)

    def _names(self) -> set[str]:
        """Return the names of the files that the next process will read."""
        return {path.name for path in (*segments(self.folder).values(), *states(self.folder).values())}

    def rebuild(self, machine: Machine, now_us: int, numbers: int) -> str:
        """Write the state to a new folder after the old one was removed. Return what was done.

        Raises:
            KvforgeError: The folder cannot be created or written.
        """
        assert self.journal is not None
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            self._collect(0, killed=True)
        self._poison_detector.close()
        os.close(self._lock)
        self._lock = -1
        self._open_folder()
        number, origin = self.journal.number, Origin.new(machine.boot)
        self.journal.close()
        try:
            self._discard()
            self.journal = Journal(self.folder, number, durable=self._durable, origin=origin)
            head = snapshot.Head.of(self.journal, now_us, numbers)
            snapshot.write(self.folder / snapshot.STATE.format(number), machine, head)
            sync_folder(self.folder)
        except OSError as error:
            raise failed(self.folder, error) from None
        return "the state was written to a new folder, from which the next start resumes"

    def leave_snapshot(self, machine: Machine, now_us: int, numbers: int) -> None:
        """Write a snapshot at a regular end, which the next version can read, too.

        If it cannot be written, the journal stays, and only this version can read it.
        """
        if self._child:
            self._collect(0)
        if self.journal is None:
            return
        try:
            number = self.journal.rotate()
            snapshot.write(
                self.folder / snapshot.STATE.format(number), machine, snapshot.Head.of(self.journal, now_us, numbers)
            )
            remove_before(self.folder, number, self._durable)
        except (OSError, KvforgeError) as error:
            log.warning("no snapshot could be written to %s: %s; the journal is kept whole", self.folder, error)

    def close(self, keep: bool) -> None:
        """Close the journal. Idempotent.

        Args:
            keep: Keep the state for the next process.
        """
        if self._child:
            if not keep:
                os.kill(self._child, signal.SIGKILL)
            self._collect(0, killed=not keep)
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        if self._lock >= 0:
            if not keep:
                with suppress(OSError):
                    self._discard()
                    (self.folder / FILE).unlink(missing_ok=True)
                    self.folder.rmdir()
            self._poison_detector.close()
            os.close(self._lock)
            self._lock = -1


def _write_and_end(
    parent: int, folder: Path, number: int, durable: bool, machine: Machine, head: snapshot.Head
) -> NoReturn:
    """Write a snapshot in the child, and remove what it replaces, which can take as long as many turns."""
    status = 1
    try:
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(status)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.nice(NICE)
        snapshot.write(folder / snapshot.STATE.format(number), machine, head)
        status = 0
        with suppress(OSError):
            remove_before(folder, number, durable)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent's loop must not run here
        sys.stderr.write(f"coordinator: a snapshot failed: {type(error).__name__}: {error}\n")
    finally:
        os._exit(status)
