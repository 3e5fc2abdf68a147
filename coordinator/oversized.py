"""Messages of clients that are refused for their size: read past, never held, joined or written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from kvforge.protocol.errors import InvalidRequest


class Oversized(InvalidRequest):
    """A message has more bytes than it may have."""


class Skipped(bytes):
    """Stands for a frame that was read past: b"", with the frame's size in bytes and the bound of its message."""

    size: int
    bytes_max: int

    def __new__(cls, size: int, bytes_max: int) -> Self:
        frame = super().__new__(cls)
        frame.size, frame.bytes_max = size, bytes_max
        return frame


def check_size(frames: Sequence[bytes | memoryview], bytes_max: int) -> None:
    """Check the size of a message, all its frames together.

    Args:
        frames: The frames of a client's message; the last is a `Skipped` where the connection read past it.
        bytes_max: `limits.message_bytes_max`, in bytes.

    Raises:
        Oversized: It is larger, or larger than its connection allows.
    """
    size = sum(map(len, frames))
    if size <= bytes_max and not (frames and type(frames[-1]) is Skipped):
        return
    most, remedy = bytes_max, f"limits.message_bytes_max is {bytes_max}: shorten the request, or raise the limit"
    for frame in frames:
        if isinstance(frame, Skipped):
            size += frame.size
            if frame.bytes_max < most:
                most = frame.bytes_max
                remedy = f"an encrypted connection takes at most {frame.bytes_max}: shorten the request"
    raise Oversized("message", f"has {size} bytes, and {remedy}", size=size, bytes_max=most)
