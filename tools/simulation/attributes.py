"""Reads the attributes of a machine's parts without touching `__dict__`.

Python creates an object's `__dict__` on first access, and attribute access is slower from then on. Only the first
object of each class is therefore asked for its `__dict__`; the others have the same attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

# attributes that the simulator installs between the parts of a machine
WATCHERS = frozenset({"watcher", "plan", "end", "_start", "add", "requeue", "_make_way"})


class _Attributes(NamedTuple):
    """Attribute names of a class, and a getter that reads one extra attribute, so that it always returns a tuple."""

    names: tuple[str, ...]
    get: Callable[[Any], tuple[Any, ...]]


_OF_CLASS: dict[tuple[type, frozenset[str]], _Attributes] = {}


def _of_class(part: Any, but: frozenset[str]) -> _Attributes:
    known = _OF_CLASS.get((type(part), but))
    if known is None:
        names = tuple(name for name in vars(part) if name not in but)
        known = _OF_CLASS[type(part), but] = _Attributes(names, attrgetter(*names, "__class__"))
    return known


def getter(part: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return a getter of all attribute values for objects of this class."""
    return _of_class(part, frozenset()).get


def attributes(part: Any, but: frozenset[str] = WATCHERS) -> dict[str, Any]:
    """Return the attributes by name, except those in `but`."""
    names, get = _of_class(part, but)
    return dict(zip(names, get(part), strict=False))
