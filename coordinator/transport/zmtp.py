"""ZeroMQ's wire protocol (ZMTP 3.1, https://rfc.zeromq.org/spec/37/), the accepting side, without I/O.

The coordinator implements the ROUTER side itself because libzmq does not bound the memory that a peer can consume: it
accepts connections until descriptors run out and then aborts, keeps every part of an endless message, and limits queues
by messages of any size. Here every limit is checked before memory is used: a size when it is announced, a part when it
begins.

A connection has a greeting of 64 bytes from both sides, then a READY command, then messages and commands. A frame is a
byte of flags, a size of one or eight bytes, and a body; a message has one or more frames.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence

import msgspec

from kvforge.protocol.codec import BODY_BYTES_MAX, FRAME_BYTES_MAX

from .oversized import Skipped

Frame = bytes | memoryview

MORE, LONG, COMMAND = 1, 2, 4
GREETING_BYTES = 64
NULL = b"NULL"  # no authentication or encryption: for local sockets only
PEERS = (b"DEALER", b"REQ", b"ROUTER")  # socket types that may talk to a ROUTER
LARGE_BYTES = 16 << 10  # a larger frame is read into its own buffer without copies
COMMAND_BYTES_MAX = 4096
COMMANDS_MAX = 64  # consecutive commands in one read: heartbeats come every two seconds
CONTEXT_BYTES_MAX = 16
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX + BODY_BYTES_MAX  # the largest message of the protocol
LONG_HEADER = struct.Struct(">BQ")


def greeting(mechanism: bytes, as_server: bool = True) -> bytes:
    """Return the greeting that each side sends first."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes((as_server,)) + bytes(31)


GREETING = greeting(NULL, as_server=False)


class Violation(Exception):
    """A peer broke the protocol or a limit. `last` is sent to it before the connection ends."""

    def __init__(self, words: str, last: bytes = b"") -> None:
        super().__init__(words)
        self.last = last


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one message. Sizes are in bytes, of all its parts together.

    Attributes:
        parts_max: Parts of a message.
        message_bytes_max: Size of a message from an admitted peer.
        skipped_bytes_max: A larger message up to this size is skipped and handed out with `Skipped` in place of its
            parts, so that it can be refused without ending the connection.
        handshake_bytes_max: Size of a message from a peer that is not admitted yet.
    """

    parts_max: int = 2
    message_bytes_max: int = MESSAGE_BYTES_MAX
    skipped_bytes_max: int = 0
    handshake_bytes_max: int = 64 << 10


class Reader:
    """The parser of one peer's input, from its greeting on.

    Feed it with received data (`feed`, or into `room` while a large frame is incomplete), then call `next` until it
    returns None. This class implements the NULL mechanism, and `curve.SealedReader` CURVE; both sides announce the
    mechanism in their greetings.

    Attributes:
        reply: A command to send, or b"".
        key: The public key that the peer has proved, or b"".
        held: Bytes of the incomplete message.
    """

    MECHANISM = NULL

    __slots__ = (
        "_at",
        "_bounds",
        "_data",
        "_filled",
        "_flags",
        "_greeted",
        "_large",
        "_parts",
        "_ready",
        "_skipped",
        "_skipped_bytes",
        "_unread_bytes",
        "held",
        "key",
        "reply",
    )

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._data = b""
        self._at = 0
        self._greeted = self._ready = False
        self._parts: list[Frame] = []
        self._large: memoryview | None = None
        self._filled = self._flags = 0
        self._skipped: Skipped | None = None  # the frame being skipped
        self._unread_bytes = 0  # bytes of that frame still to come
        self._skipped_bytes = 0  # total size of the skipped frames of this message
        self.held = 0
        self.reply = self.key = b""

    @property
    def ready(self) -> bool:
        """Whether the handshake is complete."""
        return self._ready

    @property
    def greeted(self) -> bool:
        """Whether the peer's greeting is complete."""
        return self._greeted

    @property
    def left(self) -> bool:
        """Whether data has not been parsed yet."""
        return self._at < len(self._data)

    @property
    def begun(self) -> bool:
        """Whether a handshake, a frame or a message is incomplete, after `next` returned None."""
        within = self._large is not None or self._skipped is not None
        return not self._ready or bool(self._parts) or within or self.left

    @property
    def room(self) -> memoryview | None:
        """The buffer for the next bytes of a large frame, or None; report the count with `filled`."""
        return self._large[self._filled :] if self._large is not None else None

    def filled(self, count: int) -> None:
        """Record that `count` bytes were read into `room`."""
        assert self._large is not None, "there is no room to fill"
        self._filled += count
        self.held += count

    def feed(self, chunk: bytes) -> None:
        """Add received bytes."""
        assert self._large is None, "data must be read into `room`"
        self._data = self._data[self._at :] + chunk if self._at < len(self._data) else chunk
        self._at = 0

    def next(self, admitted: bool) -> list[Frame] | None:
        """Return the next complete message, or None if more data is needed.

        Args:
            admitted: The peer is admitted, and may send larger messages.

        Raises:
            Violation: The peer broke the protocol or a limit.
        """
        if not self._ready and not self._shake_hands():
            return None
        if self._large is not None:
            if self._filled < len(self._large):
                return None
            large, self._large = self._large.toreadonly(), None
            flags, whole = self._opened(self._flags, large)
            if (message := self._add(whole, flags)) is not None:
                return message
        if self._skipped is not None:
            if (skipped := self._skip()) is None:
                return None
            if (message := self._add(skipped, self._flags)) is not None:
                return message
        commands = 0
        while (frame := self._frame(admitted)) is not None:
            flags, part = frame
            if flags & COMMAND:
                commands += 1
                if commands > COMMANDS_MAX:
                    raise Violation(f"more than {COMMANDS_MAX} commands at once")
                self._command(bytes(part))
            elif (message := self._add(part, flags)) is not None:
                return message
        return None

    def _add(self, part: Frame, flags: int) -> list[Frame] | None:
        """Add a part to the message. Return the message if this was its last part."""
        parts = self._parts
        parts.append(part)
        if flags & MORE:
            if len(parts) >= self._bounds.parts_max:
                raise Violation(f"a message has at most {self._bounds.parts_max} parts")
            return None
        self._parts, self.held, self._skipped_bytes = [], 0, 0
        return parts

    def _frame(self, admitted: bool) -> tuple[int, Frame] | None:
        """Return the next complete frame, or None; a large incomplete frame then has its own buffer."""
        data, at = self._data, self._at
        there = len(data) - at
        if there < 2:
            return None
        flags = data[at]
        if flags & LONG:
            if there < LONG_HEADER.size:
                return None
            size, start = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
        else:
            size, start = data[at + 1], at + 2
        if flags > (COMMAND | LONG):
            raise Violation(f"frame with invalid flags {flags:#04x}")
        if self._is_skipped(flags, size, admitted):
            self._at = start
            self._flags, self._unread_bytes = flags, size
            self._skipped = Skipped(size, self._bounds.message_bytes_max)
            self._skipped_bytes += size
            skipped = self._skip()
            return (flags, skipped) if skipped is not None else None
        end = start + size
        if end <= len(data):
            self._at = end
            if not flags & COMMAND:
                self.held += size
            return flags, data[start:end]
        if size > LARGE_BYTES:
            self._begin_large(flags, size, data[start:])
        return None

    def _is_skipped(self, flags: int, size: int, admitted: bool) -> bool:
        """Return whether a frame must be skipped. Raise Violation if it is too large even for that."""
        if flags & COMMAND:
            if size > COMMAND_BYTES_MAX:
                raise Violation(f"a command is at most {COMMAND_BYTES_MAX} bytes, this one has {size}")
            return False
        bounds = self._bounds
        bytes_max = bounds.message_bytes_max if admitted else bounds.handshake_bytes_max
        whole = self.held + size + self._skipped_bytes
        if whole <= bytes_max and not self._skipped_bytes:
            return False
        if admitted and whole <= bounds.skipped_bytes_max:
            return True
        bytes_max = max(bytes_max, bounds.skipped_bytes_max) if admitted else bytes_max
        who = "a message" if admitted else "a message during the handshake"
        raise Violation(f"{who} is at most {bytes_max} bytes, this one has {whole}")

    def _skip(self) -> Skipped | None:
        """Drop received data of the frame being skipped. Return its placeholder once it is complete."""
        there = min(self._unread_bytes, len(self._data) - self._at)
        self._at += there
        self._unread_bytes -= there
        if self._unread_bytes:
            return None
        skipped, self._skipped = self._skipped, None
        return skipped

    def _begin_large(self, flags: int, size: int, begin: bytes) -> None:
        try:
            # Anonymous memory costs nothing until it is written, so an announced frame that never arrives is free.
            # numpy would request huge pages, which can take the system milliseconds to find.
            self._large = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except (MemoryError, OSError):
            raise Violation(f"out of memory for a message of {size} bytes") from None
        self._large[: len(begin)] = begin
        self._flags, self._filled = flags, len(begin)
        self.held += len(begin)
        self._data, self._at = b"", 0

    def _opened(self, flags: int, body: Frame) -> tuple[int, Frame]:
        """Decode a complete large frame."""
        return flags, body

    # ------------------------------------------------------------------------------------------------------- handshake

    @property
    def greeting(self) -> bytes:
        """The data to send as soon as the peer connects."""
        return GREETING + ready()

    def sealed(self, command: bytes) -> bytes:
        """Return a command frame in the form that this mechanism sends."""
        return command

    def message(self, frames: Sequence[Frame]) -> list[Frame]:
        """Return a message as pieces to write."""
        return message(frames)

    def _shake_hands(self) -> bool:
        if not self._greeted and not self._parse_greeting():
            return False
        while (frame := self._frame(False)) is not None:
            flags, body = frame
            if self._introduced(bytes(body) if flags & COMMAND else b""):
                self._ready = True
                return True
        if self._large is not None:
            self._introduced(b"")
        return False

    def _parse_greeting(self) -> bool:
        """Parse the greeting. Return whether it is complete."""
        seen = self._data[self._at : self._at + GREETING_BYTES]
        if seen[:1] not in (b"", b"\xff") or (len(seen) > 9 and not seen[9] & 1):
            raise Violation("not a ZMTP peer")
        if len(seen) < GREETING_BYTES:
            return False
        mechanism, wanted = seen[12:32].rstrip(b"\0"), self.MECHANISM
        if seen[10] < 3 or mechanism != wanted:
            raise Violation(f"ZMTP {seen[10]} with {mechanism!r} (expected 3 with {wanted.decode()})")
        self._greeted = True
        self._at += GREETING_BYTES
        return True

    def _introduced(self, body: bytes) -> bool:
        """Process a handshake command, b"" for any other frame. Return whether it was the last."""
        if not body.startswith(b"\x05READY"):
            raise Violation("the first frame is not READY")
        check_type(body[6:])
        return True

    def _command(self, body: bytes) -> None:
        """Answer a PING; ignore commands of other extensions."""
        if body.startswith(b"\x04PING"):
            if not 7 <= len(body) <= 7 + CONTEXT_BYTES_MAX:
                raise Violation("PING of a wrong size")
            self.reply = self.sealed(pong(body[7:]))
        elif body.startswith(b"\x05ERROR"):
            raise Violation("the peer sent ERROR")


def ready() -> bytes:
    """Return the READY command of a ROUTER."""
    return command(b"\x05READY" + METADATA)


def ping(ttl_ms: int) -> bytes:
    """Return a PING. The peer ends the connection if it gets nothing for `ttl_ms` after it (in steps of 100 ms)."""
    return command(b"\x04PING" + min(ttl_ms // 100, 0xFFFF).to_bytes(2, "big"))


def pong(context: bytes) -> bytes:
    """Return the answer to a PING."""
    return command(b"\x04PONG" + context)


def message(frames: Sequence[Frame]) -> list[Frame]:
    """Return a message as pieces to write: small frames are joined, large ones stay separate to avoid a copy."""
    pieces: list[Frame] = []
    small: list[Frame] = []
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        size = len(frame)
        more = MORE if i < last else 0
        small.append(bytes((more, size)) if size < 256 else LONG_HEADER.pack(more | LONG, size))
        if size <= LARGE_BYTES:
            small.append(frame)
            continue
        pieces += (b"".join(small), frame)
        small = []
    if small:
        pieces.append(b"".join(small))
    return pieces


def command(body: bytes) -> bytes:
    """Return the frame of a command."""
    assert len(body) < 256, "our commands are short"
    return bytes((COMMAND, len(body))) + body


def check_type(metadata: bytes) -> None:
    """Check the peer's socket type. Raise Violation if it cannot talk to a ROUTER."""
    kind = _properties(metadata).get(b"socket-type", b"")
    if kind not in PEERS:
        raise Violation(f"socket type {kind[:16]!r} cannot talk to a ROUTER")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


METADATA = _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b"")


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the metadata of a READY command, with names in lower case. Raise Violation."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(data[name_end:value_start], "big")
        if value_start > len(data) or value_end > len(data):
            raise Violation("truncated READY")
        found[data[at + 1 : name_end].lower()] = data[value_start:value_end]
        at = value_end
    return found
