"""Input files: their lines, and whether each is a request of the batch."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import msgspec

from .records import Problem

PROBLEMS_MAX = 100  # reported of one batch
CUSTOM_ID_LENGTH_MAX = 512
SHOWN_MAX = 200
_BLANK = b" \t\r"


class LineTooLong(Exception):
    """A line exceeds the limit of a request's body."""


class Line(msgspec.Struct, frozen=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


LINE = msgspec.json.Decoder(Line)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def lines(content: AsyncIterator[bytes], bytes_max: int, at: int = 0) -> AsyncIterator[list[tuple[int, bytes]]]:
    """Yield the lines of a file, several at a time, each with its offset. Blank lines are empty.

    Args:
        content: The content from `at` on.
        bytes_max: The longest line.
        at: The offset of a line's first byte.

    Raises:
        LineTooLong: A line is longer. The lines before it were yielded.
    """
    parts: list[bytes] = []  # of a line that has not ended
    size = 0
    async for piece in content:
        if b"\n" not in piece:
            parts.append(piece)
            size += len(piece)
            if size > bytes_max:
                raise LineTooLong
            continue
        *ended, held = b"".join([*parts, piece]).split(b"\n")
        parts, size = [held], len(held)
        found: list[tuple[int, bytes]] = []
        for line in ended:
            if len(line) > bytes_max:
                yield found
                raise LineTooLong
            found.append((at, line.strip(_BLANK)))
            at += len(line) + 1
        yield found
        if size > bytes_max:
            raise LineTooLong
    if rest := b"".join(parts).strip(_BLANK):
        yield [(at, rest)]


class Validation:
    """Checks the lines of an input file, which arrive in order.

    Args:
        endpoint: The path of the requests.
        lines_max: The most requests.

    Attributes:
        total: The requests so far.
        problems: What is wrong, at most PROBLEMS_MAX.
    """

    def __init__(self, endpoint: str, lines_max: int) -> None:
        self._endpoint, self._lines_max = endpoint, lines_max
        self._ids: set[bytes] = set()  # digests, since ids may be long
        self._number = 0
        self.total = 0
        self.problems: list[Problem] = []

    @property
    def over(self) -> bool:
        """Whether further lines change nothing."""
        return len(self.problems) >= PROBLEMS_MAX or self.total > self._lines_max

    def check(self, line: bytes) -> None:
        """Check the next line."""
        self._number += 1
        if not line:
            return
        self.total += 1
        if self.total > self._lines_max:
            problem = f"the file has more than {self._lines_max} requests (batches.lines_max in gateway.toml)"
            self._add("too_many_requests", problem)
            return
        try:
            request = LINE.decode(line)
            _OBJECT.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._add("invalid_json_line", f"the line is not a JSON object of this form: {str(error)[:SHOWN_MAX]}")
            return
        self._check_request(request)

    def end(self) -> None:
        """Check what is known at the end of the file."""
        if not self.total:
            self.problems.append(Problem(code="empty_file", message="the input file has no requests"))

    def too_long(self, bytes_max: int) -> None:
        """Note that the next line is too long to be read."""
        self._number += 1
        self._add("line_too_long", f"the line is longer than {bytes_max} bytes (body_bytes_max in gateway.toml)")

    def _check_request(self, request: Line) -> None:
        if not 0 < len(request.custom_id) <= CUSTOM_ID_LENGTH_MAX:
            self._add("invalid_custom_id", f"must have 1 to {CUSTOM_ID_LENGTH_MAX} characters", "custom_id")
        digest = hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            shown = request.custom_id[:SHOWN_MAX]
            self._add("duplicate_custom_id", f"{shown!r} is the id of an earlier line, too", "custom_id")
        self._ids.add(digest)
        if request.method != "POST":
            self._add("invalid_method", f"is {request.method[:SHOWN_MAX]!r}; it must be 'POST'", "method")
        if request.url != self._endpoint:
            problem = f"is {request.url[:SHOWN_MAX]!r}; the endpoint of this batch is {self._endpoint!r}"
            self._add("mismatched_endpoint", problem, "url")

    def _add(self, code: str, message: str, param: str | None = None) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(code=code, message=message, line=self._number, param=param))
