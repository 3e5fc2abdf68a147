"""One peer's connection: parsing of incoming messages, and the queue of outgoing ones. It never blocks."""

from __future__ import annotations

import fcntl
import socket as sockets
import termios
from collections import deque

from . import zmtp
from .listener import Endpoint
from .outbox import Frames, Sent
from .peer_credentials import credentials
from .rate_limit import Rate

STRANGER_S = 10.0
MESSAGE_S = 30.0
STALL_S = 60.0
DEAF_BYTES = 32 << 10  # unread input of a slow consumer above this is more than queued heartbeats
READ_BYTES = 64 << 10
READ_LARGE_BYTES = 256 << 10  # page faults on fresh memory cost more than copying
WRITE_BYTES = 128 << 10
UNREAD_PONGS_BYTES = 64 << 10  # no heartbeats are answered beyond this, for a peer that does not read


class ConnectionLimits(zmtp.Bounds, frozen=True, kw_only=True):
    """Limits of one connection: the size of a message (zmtp.Bounds), and its send queue.

    At the limit of the send queue, the peer's messages are not read until half of the queue has drained. Replies to
    messages read before may exceed the limit.
    """

    queue_messages_max: int = 10_000
    queue_bytes_max: int = 16 << 20


class Connection:
    """One accepted connection. Times in nanoseconds, monotonic.

    Attributes:
        identity: Identifies the connection within its socket.
        user: The peer's user, -1 if the system does not report it.
        number: Its number once admitted, 0 before.
        head: The next message, if it is parsed already.
        ended: No more data will arrive.
        full: The send queue is full.
        rate: Limiter of its messages; None for no limit.
        slowed: It waits for the limiter and is not read.
        removed: It was disconnected here, and is not in the table of connections any more.
        deaf: The peer has closed its receiving side; data it sent before is still read.
    """

    __slots__ = (
        "_limits",
        "_queue",
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
        "removed",
        "share_ns",
        "share_turn",
        "slowed",
        "socket",
        "trusted",
        "unread_bytes",
        "user",
    )

    def __init__(
        self, socket: sockets.socket, identity: bytes, endpoint: Endpoint, limits: ConnectionLimits, now_ns: int
    ) -> None:
        self.socket, self.descriptor, self.identity = socket, socket.fileno(), identity
        self.user = -1 if endpoint.users is None else credentials(socket)[1]
        self.number = 0
        self.reader = endpoint.reader(limits)
        self.head: list[zmtp.Frame] | None = None
        self.ended = self.full = self.deaf = self.removed = False
        self.opened_ns = self.heard_ns = self.moved_ns = now_ns
        self.begun_ns = now_ns  # when the incomplete message began; 0 for none
        self.counted = self.unread_bytes = self.registered = 0  # maintained by the parts of `RouterSocket`
        self.faults = self.share_ns = self.share_turn = 0  # the same
        self.listed = self.trusted = self.slowed = False
        self.rate: Rate | None = None
        self.queued_bytes = self.queued_messages = 0
        self._limits = limits
        # Pieces to write, each with whether a message ends there.
        self._queue: deque[tuple[zmtp.Frame, bool]] = deque()

    def read(self, now_ns: int) -> bool:
        """Read available data. Return whether there may be more."""
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
        """Return the next complete message, or None.

        Raises:
            zmtp.Violation: The peer broke the protocol or a limit.
        """
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
        """Whether received data has not been processed."""
        return self.head is not None or self.reader.left

    def send(self, frames: Frames, now_ns: int) -> Sent:
        """Queue a message for the next `flush`."""
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
        limits = self._limits
        if self.queued_bytes >= limits.queue_bytes_max or self.queued_messages >= limits.queue_messages_max:
            self.full = True
            self.flush(now_ns)  # the socket may accept data now
        return Sent.GONE if self.deaf else Sent.DONE

    def command(self, data: bytes, now_ns: int) -> None:
        """Queue a protocol command, and write as much as possible."""
        if self.deaf:
            return
        self._queue.append((data, False))
        self.queued_bytes += len(data)
        self.flush(now_ns)

    def flush(self, now_ns: int) -> bool:
        """Write queued data as far as the socket accepts it. Return whether the queue has ceased to be full."""
        queue = self._queue
        while queue:
            try:
                sent = self.socket.send(queue[0][0] if len(queue) == 1 else self._together())
            except BlockingIOError:
                break
            except OSError:
                # The peer has closed. Earlier input must still be read: it may contain a cancel or a goodbye.
                self.deaf = True
                self.discard()
                return False
            self.moved_ns = now_ns
            if sent == self.queued_bytes:  # the common case
                queue.clear()
                self.queued_bytes = self.queued_messages = 0
            elif not self._dequeue_sent(sent):
                break
        if not self.full:
            return False
        limits = self._limits
        if self.queued_bytes > limits.queue_bytes_max // 2:
            return False
        if self.queued_messages > limits.queue_messages_max // 2:
            return False
        self.full = False
        return True

    def _together(self) -> zmtp.Frame:
        """Return the next data to write: small pieces are joined, up to the size of one write."""
        pieces: list[zmtp.Frame] = []
        size = 0
        for piece, _ in self._queue:
            size += len(piece)
            if pieces and size > WRITE_BYTES:
                break
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _dequeue_sent(self, sent: int) -> bool:
        """Remove written bytes from the queue. Return whether more may be written."""
        queue = self._queue
        self.queued_bytes -= sent
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
        """Drop queued data that the peer will not read."""
        self._queue.clear()
        self.queued_bytes = self.queued_messages = 0
        self.full = False

    def put_off(self, late_ns: int) -> None:
        """Shift all timestamps by time in which the loop did not run."""
        self.heard_ns += late_ns
        self.moved_ns += late_ns
        self.opened_ns += late_ns
        self.begun_ns += late_ns if self.begun_ns else 0

    def problem(self, now_ns: int, silence_ns: int) -> tuple[str, bool]:
        """Return why the connection must end ("" if it need not), and whether the reason is silence."""
        if not self.queued_bytes:
            self.moved_ns = now_ns
        if self.ended or (self.listed and not self.full):
            return "", False  # pending data will be processed first
        if self.full:
            unread_bytes = _unread_bytes(self.descriptor)
            if unread_bytes > self.unread_bytes:  # data is arriving, although it is not read
                self.heard_ns = now_ns
            self.unread_bytes = unread_bytes
            if unread_bytes > DEAF_BYTES:
                stalled = now_ns - self.moved_ns > STALL_S * 1e9
                words = f"slow consumer: {self.queued_bytes} bytes unsent for {STALL_S:g} s"
                return (words if stalled else ""), False
        if now_ns - self.heard_ns > silence_ns:
            return f"nothing came from it for {silence_ns / 1e9:g} s", True
        if not self.number and now_ns - self.opened_ns > STRANGER_S * 1e9:
            return f"no handshake within {STRANGER_S:g} s", False
        if self.begun_ns and now_ns - self.begun_ns > MESSAGE_S * 1e9 and not self.full:
            return f"incomplete message after {MESSAGE_S:g} s", False
        return "", False


def _unread_bytes(descriptor: int) -> int:
    """Return the number of received bytes that have not been read."""
    count = bytearray(4)
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return 0
    return int.from_bytes(count, "little")
