"""Bodies of multipart/form-data (RFC 7578), read piece by piece without holding a file in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvforge.protocol.errors import InvalidRequest

HEAD_BYTES_MAX = 8 << 10
PARTS_MAX = 32
_BOUNDARY = re.compile(
    r'^multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^;\s"]{1,70}))', re.IGNORECASE | re.DOTALL
)
_NAME = re.compile(r'(?:^|[;\s])name="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_FILENAME = re.compile(r'(?:^|[;\s])filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """The head of a part. `filename` is None for a field that is no file."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the content of the last part."""

    data: bytes


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a content type names.

    Raises:
        InvalidRequest: Names the header.
    """
    found = _BOUNDARY.match(content_type.strip())
    if found is None:
        problem = f"is {content_type[:100]!r}; it must be multipart/form-data with a boundary"
        raise InvalidRequest("content-type", problem)
    return (found[1] or found[2]).encode("latin-1")


class MultipartReader:
    """Splits a body into the heads of its parts and pieces of their content.

    It holds less than one delimiter, or one head, beside the piece that it was given.

    Args:
        boundary: See `boundary_of`.
    """

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # a body may begin with its first delimiter
        self._in_head = self._ended = self._begun = False
        self._parts = 0

    @property
    def ended(self) -> bool:
        """Whether the last delimiter was read."""
        return self._ended

    def feed(self, data: bytes) -> list[Part | Content]:
        """Return what a further piece of the body completes.

        Raises:
            InvalidRequest: The body is not multipart/form-data, or has too many or too large heads.
        """
        self._held += data
        found: list[Part | Content] = []
        while not self._ended:
            if not (self._head(found) if self._in_head else self._body(found)):
                return found
        self._held.clear()  # an epilogue says nothing
        return found

    def _body(self, found: list[Part | Content]) -> bool:
        """Read content up to a delimiter. Return whether there was one."""
        held, delimiter = self._held, self._delimiter
        at = held.find(delimiter)
        if at < 0 or len(held) < at + len(delimiter) + 2:
            safe = at if at >= 0 else len(held) - len(delimiter) + 1
            if safe > 0:
                self._content(found, safe)
            return False
        if at:
            self._content(found, at)
        after = bytes(held[len(delimiter) : len(delimiter) + 2])
        if after not in (b"--", b"\r\n"):
            raise InvalidRequest("body", "is not valid multipart/form-data: a boundary does not end its line")
        self._ended, self._in_head = after == b"--", after == b"\r\n"
        del held[: len(delimiter) + (2 if self._ended else 0)]  # the head begins with the end of its line
        return True

    def _content(self, found: list[Part | Content], size: int) -> None:
        if self._begun:
            found.append(Content(bytes(self._held[:size])))
        del self._held[:size]

    def _head(self, found: list[Part | Content]) -> bool:
        """Read the head of a part. Return whether it is complete."""
        end = self._held.find(b"\r\n\r\n")
        if end > HEAD_BYTES_MAX or (end < 0 and len(self._held) > HEAD_BYTES_MAX):
            raise InvalidRequest("body", f"has a part with a head of more than {HEAD_BYTES_MAX} bytes")
        if end < 0:
            return False
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise InvalidRequest("body", f"has more than {PARTS_MAX} parts")
        found.append(_part(bytes(self._held[2:end])))
        del self._held[: end + 4]
        self._begun, self._in_head = True, False
        return True


def _part(head: bytes) -> Part:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition" and (found := _NAME.search(value)):
            filename = _FILENAME.search(value)
            return Part(_plain(found[1]), _plain(filename[1]) if filename else None)
    raise InvalidRequest("body", "is not valid multipart/form-data: a part has no name")


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text).replace("%22", '"')
