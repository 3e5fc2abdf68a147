"""One peer's connection: what it sends, message by message, and what waits to be written to it. Never waits for it."""

from __future__ import annotations

import fcntl
import socket as sockets
import termios
from collections import deque

from . import zmtp
from .listener import Door
from .outbox import Frames, Sent
from .rate import Rate
from .users import credentials

STRANGER_S = 10.0
MESSAGE_S = 30.0
STALL_S = 60.0
DEAF_BYTES = 32 << 10  # of commands that are not taken from one that does not read: heartbeats may be stuck behind them
READ_BYTES = 64 << 10
READ_LARGE_BYTES = 256 << 10  # memory that was never written to costs more than its copy
WRITE_BYTES = 128 << 10
UNREAD_PONGS_BYTES = 64 << 10  # to one that reads nothing heartbeats are not answered


class Room(zmtp.Bounds, frozen=True, kw_only=True):
    """What one connection may make us keep: its messages (zmtp.Bounds), and what is to be written to it.

    Where so many messages or bytes wait to be written, the peer is full: nothing more is taken from it, until half of
    them are gone. What was asked of it before that is still answered: that is what may come on top.
    """

    queue_messages_max: int = 10_000
    queue_bytes_max: int = 16 << 20


class Connection:
    """One accepted connection. Times in nanoseconds, monotonic.

    identity: names it within its socket. user: whose process is there, -1 if the system cannot say. number: what it was
    given when it was admitted, 0 before. head: the next message, if it was taken apart already. ended: nothing more
    comes. full: nothing more is to be written for now. rate: how often it is listened to, None: always. slowed: it
    waits for that, and nothing is read from it. deaf: it reads nothing any more; what it said before is still read.
    """

    __slots__ = (
        "_queue",
        "_room",
        "begun_ns",
        "counted",
        "deaf",
        "descriptor",
        "ended",
        "faults",
        "full",
        "head",
        "heard_ns",
        "identity",
        "listed",
        "moved_ns",
        "number",
        "opened_ns",
        "queued_bytes",
        "queued_messages",
        "rate",
        "reader",
        "registered",
        "share_ns",
        "share_turn",
        "slowed",
        "socket",
        "trusted",
        "unread_bytes",
        "user",
    )

    def __init__(self, socket: sockets.socket, identity: bytes, door: Door, room: Room, now_ns: int) -> None:
        self.socket, self.descriptor, self.identity = socket, socket.fileno(), identity
        self.user = -1 if door.users is None else credentials(socket)[1]
        self.number = 0
        self.reader = door.reader(room)
        self.head: list[zmtp.Frame] | None = None
        self.ended = self.full = self.deaf = False
        self.opened_ns = self.heard_ns = self.moved_ns = now_ns
        self.begun_ns = now_ns  # when the message that has not ended began; 0: none has begun
        self.counted = self.unread_bytes = self.registered = 0  # these are kept by `Peers`
        self.faults = self.share_ns = self.share_turn = 0  # these too
        self.listed = self.trusted = self.slowed = False
        self.rate: Rate | None = None
        self.queued_bytes = self.queued_messages = 0
        self._room = room
        # What is still to be written, with whether a message ends there.
        self._queue: deque[tuple[zmtp.Frame, bool]] = deque()

    def read(self, now_ns: int) -> bool:
        """Takes in some of what has come. Returns whether there may be more."""
        try:
            if (room := self.reader.room) is not None:
                count = self.socket.recv_into(room[:READ_LARGE_BYTES])
                self.reader.filled(count)
            else:
                chunk = self.socket.recv(READ_BYTES)
                count = len(chunk)
                if count:
                    self.reader.feed(chunk)
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self.ended = True
            return False
        self.heard_ns = now_ns
        return count >= READ_BYTES

    def next(self, now_ns: int) -> list[zmtp.Frame] | None:
        """The next message of those that have come; None: none has come whole. Raises zmtp.Violation."""
        message, self.head = self.head, None
        if message is None:
            message = self.reader.next(self.number > 0)
            if message is not None or not self.reader.begun:
                self.begun_ns = 0
            elif not self.begun_ns:
                self.begun_ns = now_ns
            reply = self.reader.reply
            if reply:
                self.reader.reply = b""
                if self.queued_bytes < UNREAD_PONGS_BYTES:
                    self.command(reply, now_ns)
        return message

    @property
    def holds(self) -> bool:
        """Whether bytes that have come were not looked at yet."""
        return self.head is not None or self.reader.left

    def send(self, frames: Frames, now_ns: int) -> Sent:
        """Has a message written with the next `flush`, behind what waits."""
        if self.deaf:
            return Sent.GONE
        if self.full:
            return Sent.FULL
        pieces = self.reader.message(frames)
        last = len(pieces) - 1
        for i, piece in enumerate(pieces):
            self._queue.append((piece, i == last))
            self.queued_bytes += len(piece)
        self.queued_messages += 1
        room = self._room
        if self.queued_bytes >= room.queue_bytes_max or self.queued_messages >= room.queue_messages_max:
            self.full = True
            self.flush(now_ns)  # perhaps it only was not tried yet
        return Sent.GONE if self.deaf else Sent.DONE

    def command(self, data: bytes, now_ns: int) -> None:
        """Writes a command of ours, or keeps it."""
        if self.deaf:
            return
        self._queue.append((data, False))
        self.queued_bytes += len(data)
        self.flush(now_ns)

    def flush(self, now_ns: int) -> bool:
        """Writes what waits, as far as it is taken. Returns whether the peer was full and is not any more."""
        queue = self._queue
        while queue:
            try:
                sent = self.socket.send(queue[0][0] if len(queue) == 1 else self._together())
            except BlockingIOError:
                break
            except OSError:
                # It has closed. What it said before that is still to be read: to cancel, perhaps, and goodbye.
                self.deaf = True
                self.discard()
                return False
            self.moved_ns = now_ns
            if not self._taken(sent):
                break
        if not self.full:
            return False
        room = self._room
        if self.queued_bytes > room.queue_bytes_max // 2:
            return False
        if self.queued_messages > room.queue_messages_max // 2:
            return False
        self.full = False
        return True

    def _together(self) -> zmtp.Frame:
        """What is written next: small pieces together, up to as much as is taken at once."""
        pieces: list[zmtp.Frame] = []
        size = 0
        for piece, _ in self._queue:
            size += len(piece)
            if pieces and size > WRITE_BYTES:
                break
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _taken(self, sent: int) -> bool:
        """So many bytes were written. Returns whether more may be."""
        queue = self._queue
        self.queued_bytes -= sent
        if not self.queued_bytes:  # as almost always
            queue.clear()
            self.queued_messages = 0
            return False
        while sent:
            piece, ends = queue[0]
            if sent < len(piece):
                queue[0] = memoryview(piece)[sent:], ends
                return False
            sent -= len(piece)
            queue.popleft()
            self.queued_messages -= ends
        return True

    def discard(self) -> None:
        """Nobody reads what waits any more."""
        self._queue.clear()
        self.queued_bytes = self.queued_messages = 0
        self.full = False

    def put_off(self, late_ns: int) -> None:
        """Nobody looked for so long: that time does not count."""
        self.heard_ns += late_ns
        self.moved_ns += late_ns
        self.opened_ns += late_ns
        self.begun_ns += late_ns if self.begun_ns else 0

    def problem(self, now_ns: int, silence_ns: int) -> tuple[str, bool]:
        """Why it is to be ended, "" where it is not; and whether that is because nothing comes from it."""
        if not self.queued_bytes:
            self.moved_ns = now_ns
        if self.ended or (self.listed and not self.full):
            return "", False  # its turn will come
        if self.full:
            unread_bytes = _unread_bytes(self.descriptor)
            if unread_bytes > self.unread_bytes:  # not taken, but it came
                self.heard_ns = now_ns
            self.unread_bytes = unread_bytes
            if unread_bytes > DEAF_BYTES:
                stalled = now_ns - self.moved_ns > STALL_S * 1e9
                words = f"it has asked for much and read nothing of {self.queued_bytes} bytes for {STALL_S:g} s"
                return (words if stalled else ""), False
        if now_ns - self.heard_ns > silence_ns:
            return f"nothing came from it for {silence_ns / 1e9:g} s", True
        if not self.number and now_ns - self.opened_ns > STRANGER_S * 1e9:
            return f"no handshake within {STRANGER_S:g} s", False
        if self.begun_ns and now_ns - self.begun_ns > MESSAGE_S * 1e9 and not self.full:
            return f"a message did not end within {MESSAGE_S:g} s", False
        return "", False


def _unread_bytes(descriptor: int) -> int:
    """How many bytes have come that nobody has read."""
    count = bytearray(4)
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return 0
    return int.from_bytes(count, "little")
