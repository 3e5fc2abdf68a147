"""Fields and tools that a request names and nothing reads: named in a header of the answer, logged once for each name.

The number of names is bounded: they come from strangers.
"""

from __future__ import annotations

import logging
import re

from kvforge.protocol.errors import InvalidRequest

HEADER = "x-kvforge-ignored"
NAMES_MAX, NAME_LENGTH_MAX = 32, 80  # of one answer's header
LOOKED_MAX = 400_000  # fields and items of one body
LOGGED_MAX = 256  # names, of one process
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # not visible ASCII, or the comma that stands between two names
_INDEX = re.compile(r"\[\d+\]")
log = logging.getLogger(__name__)


class Ignored:
    """The fields and tools of one request that are not read. strict: they are refused instead.

    Attributes:
        count: How many fields and tools; of an array's items, the same field counts once.
    """

    __slots__ = ("_looked", "_names", "count", "strict")

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._looked = 0
        self.count = 0
        self._names: dict[str, str] = {}  # the first place of each, by the name without its indices

    def add(self, name: str, problem: str, value: str = "") -> None:
        """Note a field, or a tool by its type.

        Args:
            name: The place in the body.
            problem: The fault, for the refusal.
            value: The value there, where it matters.

        Raises:
            InvalidRequest: Names it, where requests are read strictly.
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
        """Count fields and items that are looked at one by one.

        Raises:
            InvalidRequest: They are more than LOOKED_MAX, which would take the time of other requests.
        """
        self._looked += parts
        if self._looked > LOOKED_MAX:
            problem = f"the body has more than {LOOKED_MAX} fields and items, and some that are not read"
            raise InvalidRequest(name or "body", problem)

    @property
    def header(self) -> str:
        """The names, as a header has them, or ""."""
        more = self.count - len(self._names)
        return ", ".join([*self._names.values(), *([f"and {more} more"] if more else [])])


class Logged:
    """Which names were logged."""

    def __init__(self, names_max: int = LOGGED_MAX) -> None:
        self._names: set[str] = set()
        self._names_max = names_max

    def log(self, kind: str, shown: str) -> None:
        """Log a name, unless it was logged before or too many were."""
        if kind in self._names or len(self._names) >= self._names_max:
            return
        self._names.add(kind)
        log.warning("ignored: %s is not read here; strict_fields = true refuses it", shown)
        if len(self._names) == self._names_max:
            log.warning("ignored: %d names were logged; further ones are not", self._names_max)


LOGGED = Logged()


def printable(name: str) -> str:
    """A name as a header can hold it: visible ASCII, at most NAME_LENGTH_MAX characters."""
    shown = _UNPRINTABLE.sub("?", name[: NAME_LENGTH_MAX + 1])
    return shown if len(shown) <= NAME_LENGTH_MAX else f"{shown[: NAME_LENGTH_MAX - 3]}..."
