"""ZeroMQ's wire protocol (ZMTP 3.1, https://rfc.zeromq.org/spec/37/), the accepting side, without any input or output.

The coordinator speaks it itself, as a ROUTER to the DEALERs of clients and workers, because libzmq has no bound for
what one peer may make it keep: it accepts connections until descriptors run out and then aborts, keeps every part of a
message that never ends, and queues so many messages of whatever size. Here every bound is checked before anything is
kept: a size when it is announced, a part when it begins.

Connections: a greeting of 64 bytes from both sides, then a READY command, then messages and commands. A frame is one
byte of flags, its size in one byte or eight, and its body; a message is one frame or several.
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
NULL = b"NULL"  # nothing is hidden and nobody proves who it is: for sockets that only whom we know can reach
PEERS = (b"DEALER", b"REQ", b"ROUTER")  # the types of socket that may talk to a ROUTER
LARGE_BYTES = 16 << 10  # a frame above this is read to its own place, and is not copied
COMMAND_BYTES_MAX = 4096
COMMANDS_MAX = 64  # in a row, in what was read at once: heartbeats come one in two seconds
CONTEXT_BYTES_MAX = 16
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX + BODY_BYTES_MAX  # no message of ours is larger
LONG_HEADER = struct.Struct(">BQ")


def greeting(mechanism: bytes, as_server: bool = True) -> bytes:
    """What both sides say first."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes((as_server,)) + bytes(31)


GREETING = greeting(NULL, as_server=False)


class Violation(Exception):
    """A peer broke the protocol or a bound: the connection is of no use. last: what it is told before it is ended."""

    def __init__(self, words: str, last: bytes = b"") -> None:
        super().__init__(words)
        self.last = last


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one message. Sizes in bytes, of all its parts together.

    stranger_bytes_max: of a peer that is not admitted yet. skipped_bytes_max: a message beyond message_bytes_max and up
    to this is read past and handed out with `Skipped` in place of its parts, so that it can be refused and the
    connection goes on. Beyond both, the connection ends.
    """

    parts_max: int = 2
    message_bytes_max: int = MESSAGE_BYTES_MAX
    skipped_bytes_max: int = 0
    stranger_bytes_max: int = 64 << 10


class Reader:
    """What one peer sends, from its greeting on.

    Feed what was read (`feed`, or into `room` where a large frame is under way), then take messages with `next` until
    it gives None. `reply` is a command that is to be written, b"" where there is none; `key` proves who the peer is,
    b"" where the mechanism proves nothing. Both sides agree on a mechanism in their greetings: this is NULL's, and
    `curve.SealedReader` is CURVE's.
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
        self._skipped: Skipped | None = None  # the frame that is read past
        self._unread_bytes = 0  # bytes of that frame still to come
        self._skipped_bytes = 0  # announced by frames of this message that are read past
        self.held = 0  # bytes of the message that has begun and not ended
        self.reply = self.key = b""

    @property
    def ready(self) -> bool:
        """Whether the handshake is over."""
        return self._ready

    @property
    def spoke(self) -> bool:
        """Whether the peer's greeting has come whole."""
        return self._greeted

    @property
    def left(self) -> bool:
        """Whether bytes are there that were not looked at, or not understood yet."""
        return self._at < len(self._data)

    @property
    def begun(self) -> bool:
        """Where `next` gave None: whether something has begun that has not ended, a handshake, a frame or a message."""
        within = self._large is not None or self._skipped is not None
        return not self._ready or bool(self._parts) or within or self.left

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes belong if a large frame is under way; say how many came with `filled`."""
        return self._large[self._filled :] if self._large is not None else None

    def filled(self, count: int) -> None:
        """So many bytes were read into `room`."""
        assert self._large is not None, "there is no room to fill"
        self._filled += count
        self.held += count

    def feed(self, chunk: bytes) -> None:
        """These bytes were read."""
        assert self._large is None, "what comes now belongs into its room"
        self._data = self._data[self._at :] + chunk if self._at < len(self._data) else chunk
        self._at = 0

    def next(self, admitted: bool) -> list[Frame] | None:
        """The next whole message; None: more bytes are needed. admitted: the peer is no stranger. Raises Violation."""
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
                    raise Violation(f"it sent more than {COMMANDS_MAX} commands at once")
                self._command(bytes(part))
            elif (message := self._add(part, flags)) is not None:
                return message
        return None

    def _add(self, part: Frame, flags: int) -> list[Frame] | None:
        """Adds a part to the message. Returns the message if this was its last."""
        parts = self._parts
        parts.append(part)
        if flags & MORE:
            if len(parts) >= self._bounds.parts_max:
                raise Violation(f"a message has at most {self._bounds.parts_max} parts")
            return None
        self._parts, self.held, self._skipped_bytes = [], 0, 0
        return parts

    def _frame(self, admitted: bool) -> tuple[int, Frame] | None:
        """The next frame that has come whole; None: it has not, and where it is a large one it has got its room."""
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
            raise Violation(f"it sent a frame with flags {flags:#04x}")
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
        """Whether a frame is to be read past. Raises Violation where it is larger than that, too."""
        if flags & COMMAND:
            if size > COMMAND_BYTES_MAX:
                raise Violation(f"a command is at most {COMMAND_BYTES_MAX} bytes, this one is to have {size}")
            return False
        bounds = self._bounds
        bytes_max = bounds.message_bytes_max if admitted else bounds.stranger_bytes_max
        whole = self.held + size + self._skipped_bytes
        if whole <= bytes_max and not self._skipped_bytes:
            return False
        if admitted and whole <= bounds.skipped_bytes_max:
            return True
        bytes_max = max(bytes_max, bounds.skipped_bytes_max) if admitted else bytes_max
        who = "a message" if admitted else "a message before the hello is answered"
        raise Violation(f"{who} is at most {bytes_max} bytes, this one is to have {whole}")

    def _skip(self) -> Skipped | None:
        """Drops what has come of the frame that is read past. Returns what stands for it once all has come."""
        there = min(self._unread_bytes, len(self._data) - self._at)
        self._at += there
        self._unread_bytes -= there
        if self._unread_bytes:
            return None
        skipped, self._skipped = self._skipped, None
        return skipped

    def _begin_large(self, flags: int, size: int, begin: bytes) -> None:
        try:
            # Memory that was never written to costs nothing: what is announced and not sent. Not of numpy, which
            # asks for huge pages: to find one takes the system milliseconds at times.
            self._large = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except (MemoryError, OSError):
            raise Violation(f"there is no memory for a message of {size} bytes") from None
        self._large[: len(begin)] = begin
        self._flags, self._filled = flags, len(begin)
        self.held += len(begin)
        self._data, self._at = b"", 0

    def _opened(self, flags: int, body: Frame) -> tuple[int, Frame]:
        """What a large frame says once it has come whole."""
        return flags, body

    # ------------------------------------------------------------------------------------------------------- handshake

    @property
    def greeting(self) -> bytes:
        """What we say as soon as the peer is there: all that this mechanism can say unasked."""
        return GREETING + ready()

    def sealed(self, command: bytes) -> bytes:
        """A command's frame as this mechanism sends it."""
        return command

    def message(self, frames: Sequence[Frame]) -> list[Frame]:
        """A message as bytes to be written."""
        return message(frames)

    def _shake_hands(self) -> bool:
        if not self._greeted and not self._greet():
            return False
        while (frame := self._frame(False)) is not None:
            flags, body = frame
            if self._introduced(bytes(body) if flags & COMMAND else b""):
                self._ready = True
                return True
        if self._large is not None:
            self._introduced(b"")
        return False

    def _greet(self) -> bool:
        """Whether the greeting has come whole."""
        seen = self._data[self._at : self._at + GREETING_BYTES]
        if seen[:1] not in (b"", b"\xff") or (len(seen) > 9 and not seen[9] & 1):
            raise Violation("it does not speak ZMTP")
        if len(seen) < GREETING_BYTES:
            return False
        mechanism, wanted = seen[12:32].rstrip(b"\0"), self.MECHANISM
        if seen[10] < 3 or mechanism != wanted:
            raise Violation(f"it speaks ZMTP {seen[10]} with {mechanism!r}, not 3 with {wanted.decode()}")
        self._greeted = True
        self._at += GREETING_BYTES
        return True

    def _introduced(self, body: bytes) -> bool:
        """Takes the next command of the handshake, b"" for a frame that is none. Returns whether it was the last."""
        if not body.startswith(b"\x05READY"):
            raise Violation("its first frame is not READY")
        check_type(body[6:])
        return True

    def _command(self, body: bytes) -> None:
        """PING is to be answered; whatever else there is is for others."""
        if body.startswith(b"\x04PING"):
            if not 7 <= len(body) <= 7 + CONTEXT_BYTES_MAX:
                raise Violation("it sent a PING of a wrong size")
            self.reply = self.sealed(pong(body[7:]))
        elif body.startswith(b"\x05ERROR"):
            raise Violation("it sent an ERROR")


def ready() -> bytes:
    """The READY command of a ROUTER."""
    return command(b"\x05READY" + METADATA)


def ping(ttl_ms: int) -> bytes:
    """A PING. The peer takes us for gone if nothing comes from us for `ttl_ms` after it, to a tenth of a second."""
    return command(b"\x04PING" + min(ttl_ms // 100, 0xFFFF).to_bytes(2, "big"))


def pong(context: bytes) -> bytes:
    """The answer to a PING."""
    return command(b"\x04PONG" + context)


def message(frames: Sequence[Frame]) -> list[Frame]:
    """A message as bytes to be written: what is small is put together, a large frame stands alone, uncopied."""
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
    """The frame of a command."""
    assert len(body) < 256, "our commands are short"
    return bytes((COMMAND, len(body))) + body


def check_type(metadata: bytes) -> None:
    """Whether a socket of this type may talk to a ROUTER. Raises Violation."""
    kind = _properties(metadata).get(b"socket-type", b"")
    if kind not in PEERS:
        raise Violation(f"it is a socket of type {kind[:16]!r}, which cannot talk to a ROUTER")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


METADATA = _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b"")  # what a ROUTER says of itself


def _properties(data: bytes) -> dict[bytes, bytes]:
    """The metadata of a READY command, names in lower case. Raises Violation."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(data[name_end:value_start], "big")
        if value_start > len(data) or value_end > len(data):
            raise Violation("its READY is cut short")
        found[data[at + 1 : name_end].lower()] = data[value_start:value_end]
        at = value_end
    return found
