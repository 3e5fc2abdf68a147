"""Ignored fields and tools of a request: listed in a response header, and logged once for each name.

Clients choose the names, so their number is bounded.
"""

from __future__ import annotations

import logging
import re

from kvforge.protocol.errors import InvalidRequest

HEADER = "x-kvforge-ignored"
NAMES_MAX, NAME_LENGTH_MAX = 32, 80  # in one response header
LOOKED_MAX = 400_000  # inspected fields and items of one body
LOGGED_MAX = 256  # names logged by one process
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # other than visible ASCII, or the comma that separates names
_INDEX = re.compile(r"\[\d+\]")
log = logging.getLogger(__name__)


class Ignored:
    """The ignored fields and tools of one request. With `strict` they are refused instead.

    Attributes:
        count: The number of fields and tools; the same field of several items in an array counts once.
    """

    __slots__ = ("_looked", "_names", "count", "strict")

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._looked = 0
        self.count = 0
        self._names: dict[str, str] = {}  # the first path of each, by the path without indices

    def add(self, name: str, problem: str, value: str = "") -> None:
        """Note a field, or a tool by its type.

        Args:
            name: The path in the body.
            problem: The reason, for a refusal.
            value: The value, where it matters.

        Raises:
            InvalidRequest: The request is read strictly; the error names the field.
        """
        if self.strict:
            raise InvalidRequest(name, problem)
        if len(self._names) >= NAMES_MAX:
            self.count += 1
            return
        name = f"{name}={value}" if value else name
        kind = _INDEX.sub("[]", name)[: 2 * NAME_LENGTH_MAX]
        if kind in self._names:
            return
        self.count += 1
        self._names[kind] = shown = printable(name)
        LOGGED.log(printable(kind), shown)

    def look(self, parts: int, name: str) -> None:
        """Count fields and items that are inspected one by one.

        Raises:
            InvalidRequest: They exceed LOOKED_MAX, which would stall other requests.
        """
        self._looked += parts
        if self._looked > LOOKED_MAX:
            problem = f"the body has more than {LOOKED_MAX} fields and items, and some are unknown"
            raise InvalidRequest(name or "body", problem)

    @property
    def header(self) -> str:
        """The names as a header lists them, or ""."""
        more = self.count - len(self._names)
        return ", ".join([*self._names.values(), *([f"and {more} more"] if more else [])])


class Logged:
    """The names that were logged."""

    def __init__(self, names_max: int = LOGGED_MAX) -> None:
        self._names: set[str] = set()
        self._names_max = names_max

    def log(self, kind: str, shown: str) -> None:
        """Log a name, unless it was logged before or too many were."""
        if kind in self._names or len(self._names) >= self._names_max:
            return
        self._names.add(kind)
        log.warning("ignored: unsupported %s (set strict_fields = true to refuse it)", shown)
        if len(self._names) == self._names_max:
            log.warning("ignored: no further names are logged after %d", self._names_max)


LOGGED = Logged()


def printable(name: str) -> str:
    """Return a name as a header can hold it: visible ASCII, at most NAME_LENGTH_MAX characters."""
    shown = _UNPRINTABLE.sub("?", name[: NAME_LENGTH_MAX + 1])
    return shown if len(shown) <= NAME_LENGTH_MAX else f"{shown[: NAME_LENGTH_MAX - 3]}..."
