"""Oversized client messages, which are skipped on the wire and refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from kvforge.protocol.errors import InvalidRequest


class Oversized(InvalidRequest):
    """A message exceeds its size limit."""


class Skipped(bytes):
    """An empty placeholder for a skipped frame, with the frame's size and the limit of its message in bytes."""

    size: int
    bytes_max: int

    def __new__(cls, size: int, bytes_max: int) -> Self:
        """Create the placeholder of a frame of `size` bytes in a message limited to `bytes_max`."""
        frame = super().__new__(cls)
        frame.size, frame.bytes_max = size, bytes_max
        return frame


def check_size(frames: Sequence[bytes | memoryview], bytes_max: int) -> None:
    """Check the total size of a message.

    Args:
        frames: The frames of a client's message; the last is a `Skipped` if the connection skipped it.
        bytes_max: `limits.message_bytes_max`, in bytes.

    Raises:
        Oversized: The message is too large.
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
