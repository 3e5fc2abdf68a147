"""Whether two machines of one process are in the same state: what `state_digest` says, in a third of its time.

It is pickle that walks through them, and it says each object with attributes once, by a number, in the order in which
they are found: what is in it follows. The order of sets, which pickle does not hide, is taken from those that parts
hold.
"""

from __future__ import annotations

import enum
import hashlib
import io
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import msgspec
import numpy as np

from tools.simulation.attributes import WATCHERS, attributes
from tools.simulation.digest import PUBLISH_LISTS

IGNORED = PUBLISH_LISTS | WATCHERS
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, type)
SETS = frozenset((set, frozenset))
# A callable that is not called, and what it would be given.
Told = tuple[Any, ...]
NOTHING: Told = (list, ())


def likeness(machine: Any) -> str:
    """32 hex digits, the same for machines in the same state, whichever class they are of and whoever watches them."""
    file = io.BytesIO()
    walk = _Walk(file)
    walk.dump(_what_is_in(machine))
    while walk.found:
        found, walk.found = walk.found, []
        walk.dump(list(map(_what_is_in, found)))
    hasher = hashlib.blake2b(file.getbuffer(), digest_size=16)
    hasher.update(b"".join(walk.arrays))
    return hasher.hexdigest()


class _Walk(pickle.Pickler):
    """found: objects with attributes, to be said next. arrays: the bytes of arrays, which are kept apart."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.fast = True  # that two equal values are one object does not count
        self.memo = {id(told): (number, told) for number, told in enumerate((list, dict))}
        self.found: list[Any] = []
        self.arrays: list[bytes] = []
        self._numbers: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Told:
        """Called for all but plain values and containers."""
        if type(value) is np.ndarray:
            self.arrays.append(value.tobytes())
            return list, (value.dtype.str, value.shape)
        tell = _told_by(cast(Any, type(value)))
        if tell is not None:
            return tell(value)
        numbers, key = self._numbers, id(value)
        if key not in numbers:
            numbers[key] = len(numbers)
            self.found.append(value)
        return list, (type(value).__name__, numbers[key])


def _what_is_in(value: Any) -> Any:
    """The attributes of an object, or what is in its slots."""
    if (in_slots := _slots(cast(Any, type(value)))) is not None:
        return in_slots(value)
    if isinstance(value, BaseException):
        return value.args
    fields = attributes(value, IGNORED)
    for name, item in fields.items():
        if type(item) in _HOLDERS:
            fields[name] = _without_order(item)
    return fields


_HOLDERS = frozenset((set, frozenset, dict))


def _without_order(value: Any) -> Any:
    """A set, or a dict of sets, so that their order does not show; another dict as it is."""
    if type(value) is not dict:
        return ("set", sorted(value))
    if SETS.isdisjoint(map(type, value.values())):
        return value
    return {key: _without_order(item) for key, item in value.items()}


@cache
def _slots(cls: type) -> Callable[[Any], Any] | None:
    """What asks for all slots of an object; None for a class that has none."""
    names = getattr(cls, "__slots__", None)
    return None if names is None else attrgetter(*names)


@cache
def _told_by(cls: type) -> Callable[[Any], Told] | None:
    """How something of a class is told at once; None for an object, whose attributes are."""
    for kinds, tell in _TELL:
        if issubclass(cls, kinds):
            return tell
    return None


_TELL: tuple[tuple[Any, Callable[[Any], Told]], ...] = (
    (FUNCTIONS, lambda _: NOTHING),
    ((np.generic, enum.Enum), lambda value: (list, (repr(value),))),
    (msgspec.Struct, lambda value: (list, (type(value).__name__, msgspec.structs.astuple(value)))),
    (tuple, lambda value: (list, tuple(value))),
    (deque, lambda value: (list, (), None, iter(value))),
    (OrderedDict, lambda value: (dict, (), None, None, iter(value.items()))),
)
