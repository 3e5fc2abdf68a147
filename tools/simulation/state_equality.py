"""Equality of two machines' states within one process: like `state_digest`, in a third of its time.

Pickle walks through the machine and replaces each object with attributes by a number, in the order of discovery; the
object's contents follow. The order of sets, which pickle would show, is removed where parts hold them.
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

from kvforge.coordinator.core.cache.host_free import FreeBlocks
from tools.simulation.attributes import WATCHERS, attributes
from tools.simulation.digest import PUBLISH_LISTS

IGNORED = PUBLISH_LISTS | WATCHERS
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, type)
SETS = frozenset((set, frozenset))
# a callable that is not called, and its arguments
Reduction = tuple[Any, ...]
NOTHING: Reduction = (list, ())


def equality_digest(machine: Any) -> str:
    """Return 32 hex digits, equal for machines in equal states, independent of class and watcher."""
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
    """Pickler that collects objects with attributes (`found`) and the bytes of arrays (`arrays`)."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.fast = True  # identity of equal values does not count
        self.memo = {id(callable_): (number, callable_) for number, callable_ in enumerate((list, dict))}
        self.found: list[Any] = []
        self.arrays: list[bytes] = []
        self._numbers: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Reduction:
        """Reduce a value that is neither plain nor a container."""
        if type(value) is np.ndarray:
            self.arrays.append(value.tobytes())
            return list, (value.dtype.str, value.shape)
        reducer = _reducer_of(cast(Any, type(value)))
        if reducer is not None:
            return reducer(value)
        numbers, key = self._numbers, id(value)
        if key not in numbers:
            numbers[key] = len(numbers)
            self.found.append(value)
        return list, (type(value).__name__, numbers[key])


def _what_is_in(value: Any) -> Any:
    """Return the attributes of an object, or the values of its slots."""
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
    """Return a set, or a dict of sets, without its order; return another dict as it is."""
    if type(value) is not dict:
        return ("set", sorted(value))
    if SETS.isdisjoint(map(type, value.values())):
        return value
    return {key: _without_order(item) for key, item in value.items()}


@cache
def _slots(cls: type) -> Callable[[Any], Any] | None:
    """Return a getter of all slots, or None for a class without slots."""
    names = getattr(cls, "__slots__", None)
    return None if names is None else attrgetter(*names)


@cache
def _reducer_of(cls: type) -> Callable[[Any], Reduction] | None:
    """Return the reducer of a class, or None for an object that is reduced by its attributes."""
    for kinds, reducer in _REDUCERS:
        if issubclass(cls, kinds):
            return reducer
    return None


_REDUCERS: tuple[tuple[Any, Callable[[Any], Reduction]], ...] = (
    (FUNCTIONS, lambda _: NOTHING),
    ((np.generic, enum.Enum), lambda value: (list, (repr(value),))),
    (FreeBlocks, lambda value: (list, tuple(value))),
    (msgspec.Struct, lambda value: (list, (type(value).__name__, msgspec.structs.astuple(value)))),
    (tuple, lambda value: (list, tuple(value))),
    (deque, lambda value: (list, (), None, iter(value))),
    (OrderedDict, lambda value: (dict, (), None, None, iter(value.items()))),
)
