"""The attributes of a machine's parts, without asking a part for its `__dict__`.

Python makes one when it is asked, and from then on whatever looks at the part's attributes takes longer. So the first
part of a class is asked, once, and all others of that class have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

# What the simulator puts between the parts of a machine.
WATCHERS = frozenset({"watcher", "plan", "end", "_start", "add", "requeue", "_make_way"})


class _Attributes(NamedTuple):
    """Their names, and what gets one more than these: so that a tuple is what comes of a single one too."""

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
    """What gets the values of all attributes of parts of this class."""
    return _of_class(part, frozenset()).get


def attributes(part: Any, but: frozenset[str] = WATCHERS) -> dict[str, Any]:
    """The attributes by name. but: those that do not count."""
    names, get = _of_class(part, but)
    return dict(zip(names, get(part), strict=False))
