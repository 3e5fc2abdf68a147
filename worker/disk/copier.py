"""The worker's side of the disk tier: orders to the copying process, and its results.

Nothing here waits, except the start and the end. The process gets few orders at a time: reads of several blocks are
under way together, and a write beside them, so that a request waits for no more than these. If it dies, its orders and
all later ones fail: the coordinator then turns the tier off, and serving goes on.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from kvforge.process.leash import leashed
from kvforge.protocol.errors import WorkerError
from kvforge.protocol.messages import (
    DISK_ENTRY_NUMBERS,
    DISK_FAILED,
    DISK_ORDER_NUMBERS,
    DISK_READ,
    DISK_WIPE,
    DISK_WRITE,
    DiskEntries,
    DiskOrders,
    DiskResults,
    DiskScan,
    Int32Array,
)

from .copiers import RESULT_NUMBERS
from .copying import HEAD_NUMBERS, OWNER_NUMBERS, CopyingSettings

READS_EACH = 2  # orders that a process has, so that it need not wait for the next
WRITES_AT_ONCE = 4
KNOWN_MAX = 1 << 14  # answered orders that are remembered: more than a coordinator has in flight
ENTRIES_BYTES = 256 << 10  # of one DiskEntries
START_S, END_S = 120.0, 10.0
NO_OWNER: Int32Array = np.zeros(OWNER_NUMBERS, np.int32)
log = logging.getLogger("worker")


@dataclass
class Process:
    """A copying process, what it recovered, and why it copies through the page cache ("" where it does not)."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    entries: Int32Array
    dropped: int
    usable: int
    indirect: str


class DiskCopier:
    """The disk tier of a worker.

    Args:
        settings: Those of the process. The descriptors are set here.
        host: Descriptor of the locked host file.
        locks: Descriptors of other locks that the process must hold. `close` closes them.

    Attributes:
        blocks: Blocks of the tier.

    Raises:
        WorkerError: The process could not start.
    """

    def __init__(self, settings: CopyingSettings, host: int, locks: tuple[int, ...] = ()) -> None:
        self._settings, self._host, self._locks = settings, host, locks
        self.blocks = settings.segments_max * settings.geometry.slots
        self._width = DISK_ENTRY_NUMBERS + OWNER_NUMBERS + settings.block_tokens
        self._start()

    def _start(self) -> None:
        self._queues: tuple[deque[Int32Array], deque[Int32Array]] = (deque(), deque())  # reads, writes
        self._known: dict[int, tuple[int, int] | None] = {}  # outcomes by id; None: not answered
        self._given: tuple[set[int], set[int]] = (set(), set())  # as the queues
        self._answers: list[tuple[int, int, int]] = []
        self._received = b""
        self._process: Process | None = self._launch()
        count, dropped = len(self._process.entries), self._process.dropped
        log.info("disk tier: %d blocks in %s, %d recovered; %s", self.blocks, self._settings.folder, count, self.how)
        if dropped:
            log.warning("disk tier: %d damaged records were dropped", dropped)

    def _launch(self) -> Process:
        ours, theirs = socket.socketpair()
        with theirs:
            settings = msgspec.structs.replace(self._settings, socket=theirs.fileno(), host=self._host)
            encoded = msgspec.json.encode(settings).decode()
            command = [sys.executable, "-m", "kvforge.worker.disk.copying", encoded]
            process = subprocess.Popen(
                leashed(command) if sys.platform == "linux" else command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._host, *self._locks),
                start_new_session=True,
            )
        ours.settimeout(START_S)
        try:
            head = np.frombuffer(_received(ours, 4 * HEAD_NUMBERS), np.int32)
            entries = np.frombuffer(_received(ours, 4 * self._width * int(head[0])), np.int32).reshape(-1, self._width)
            indirect = _received(ours, int(np.frombuffer(_received(ours, 4), np.int32)[0])).decode()
        except OSError as error:
            process.kill()
            process.wait()
            ours.close()
            raise WorkerError(f"the process of the disk tier did not start ({error}): see its log") from None
        ours.setblocking(False)
        return Process(process, ours, entries, int(head[1]), int(head[2]), indirect)

    @property
    def how(self) -> str:
        """How blocks are copied, for people."""
        if self._process is None:
            return "its process has ended"
        cache = (
            f"through the page cache ({self._process.indirect})" if self._process.indirect else "past the page cache"
        )
        return f"{self._settings.readers} processes read, {cache}"

    # ----------------------------------------------------------------------------------------------------------- orders

    def fileno(self) -> int:
        """Return a descriptor that is readable when results have come; -1 once the process has died."""
        return self._process.socket.fileno() if self._process is not None else -1

    def scan(self, scan: DiskScan) -> DiskEntries:
        """Return the next entries that were recovered."""
        entries = self._process.entries if self._process is not None else np.zeros((0, self._width), np.int32)
        count = max(1, ENTRIES_BYTES // (4 * self._width))
        part = entries[scan.cursor : scan.cursor + count]
        columns = np.split(part, [DISK_ENTRY_NUMBERS, DISK_ENTRY_NUMBERS + OWNER_NUMBERS], axis=1)
        numbers, owners, tokens = (column.reshape(-1) for column in columns)
        last, usable = scan.cursor + len(part) >= len(entries), self._process.usable if self._process is not None else 0
        return DiskEntries(scan.epoch, scan.cursor, last, numbers, tokens, owners, usable)

    def take(self, message: DiskOrders) -> None:
        """Queue orders. Those that came before are answered again, once they have ended."""
        size = self._settings.block_tokens
        tokens = iter(message.tokens.reshape(-1, size))
        owners = iter(message.owners.reshape(-1, OWNER_NUMBERS))
        for row in message.orders.reshape(-1, DISK_ORDER_NUMBERS):
            number, kind, host, slot = row[:4].tolist()
            writes = kind == DISK_WRITE
            own = next(tokens) if writes else np.zeros(size, np.int32)
            owner = next(owners, NO_OWNER) if writes else NO_OWNER
            if number in self._known:
                outcome = self._known[number]
                if outcome is not None:
                    self._answers.append((number, *outcome))
                continue
            self._known[number] = None
            if (kind != DISK_WIPE and not 0 <= host < self._settings.host_blocks) or not 0 <= slot < self.blocks:
                self._answer(number, DISK_FAILED, 0)
                continue
            self._queues[kind != DISK_READ].append(np.concatenate([row, owner, own]))
        self._feed()

    def results(self, epoch: int) -> DiskResults | None:
        """Return the results that have come; None if there are none. Never waits."""
        if any(self._given):
            self._receive()
        if not self._answers:
            return None
        results = np.array(self._answers, np.int32).reshape(-1)
        self._answers.clear()
        return DiskResults(epoch, results)

    def restart(self) -> None:
        """Replace the process, for a coordinator that does not know the orders of the last one."""
        self._end(kill=True)
        self._start()

    def close(self) -> None:
        """End the process, which first writes everything to the disk."""
        self._end(kill=False)
        for lock in self._locks:
            os.close(lock)

    # ---------------------------------------------------------------------------------------------------------- process

    def _feed(self) -> None:
        limits = READS_EACH * self._settings.readers, WRITES_AT_ONCE
        for queue, given, most in zip(self._queues, self._given, limits, strict=True):
            while self._process is not None and len(given) < most and queue:
                order = queue.popleft()
                given.add(int(order[0]))
                try:
                    self._process.socket.sendall(order.astype(np.int32).tobytes())
                except OSError as error:
                    self._died(error)
        if self._process is None:
            self._fail_all()

    def _receive(self) -> None:
        if self._process is None:
            return
        try:
            received = self._process.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self._died(error)
            return
        if not received:
            self._died(None)
            return
        self._received += received
        whole = len(self._received) // (4 * RESULT_NUMBERS)
        results = np.frombuffer(self._received, np.int32, whole * RESULT_NUMBERS).reshape(-1, RESULT_NUMBERS)
        self._received = self._received[4 * RESULT_NUMBERS * whole :]
        for number, outcome, usable in results.tolist():
            for given in self._given:
                given.discard(number)
            self._answer(number, outcome, usable)
        self._feed()

    def _answer(self, number: int, outcome: int, usable: int) -> None:
        self._known[number] = outcome, usable
        self._answers.append((number, outcome, usable))
        while len(self._known) > KNOWN_MAX:
            oldest = next(iter(self._known))
            if self._known[oldest] is None:
                break
            del self._known[oldest]

    def _died(self, error: OSError | None) -> None:
        log.error("disk tier: its process has ended (%s): the tier is off", error or "see its log")
        self._end(kill=True)
        self._fail_all()

    def _fail_all(self) -> None:
        given = sorted(self._given[0] | self._given[1])
        for each in self._given:
            each.clear()
        queued = [int(order[0]) for queue in self._queues for order in queue]
        for queue in self._queues:
            queue.clear()
        for number in (*given, *queued):
            self._answer(number, DISK_FAILED, 0)

    def _end(self, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if kill:
                os.killpg(process.process.pid, signal.SIGKILL)
            process.socket.shutdown(socket.SHUT_WR)
            process.process.wait(END_S)
            _await_end(process.socket)
        except (ProcessLookupError, OSError):
            process.process.wait()
        except subprocess.TimeoutExpired:
            log.warning("disk tier: its process does not end within %g s: it is killed", END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.process.pid, signal.SIGKILL)
        finally:
            process.socket.close()


def _await_end(ours: socket.socket) -> None:
    """Wait until no process has the other end any more. Raises OSError if one still has it after END_S."""
    ours.settimeout(END_S)
    while ours.recv(1 << 16):
        pass


def _received(ours: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes. Raises OSError if the process ends before."""
    parts: list[bytes] = []
    while size:
        part = ours.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionResetError("it has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
