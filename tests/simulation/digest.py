"""A canonical digest of any object: equal states give equal digests, in any process.

Walks plain values, containers, numpy arrays, msgspec structs and objects with attributes. Sets are sorted, dicts keep
their order (the core's own orders matter: least recently used first). What is only owed to the outside is left out:
the lists of published changes, and functions.
"""

from __future__ import annotations

import enum
import hashlib
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

# Lists of what is still to be published: publishing the same twice is harmless. `watcher` is the simulator's own.
PUBLISH_LISTS = frozenset({"changed", "changed_rows", "changed_lengths", "changed_cells", "watcher"})
# A refusal is counted, its sender is known from then on, and time passes; nothing else may change.
REFUSAL_COUNTERS = frozenset({"refused_total", "clients", "now_us"})
# What the simulator puts between the parts of a machine.
WATCHERS = frozenset({"watcher", "plan", "end", "_start", "add", "requeue", "_make_way"})
_ATOMS = (int, float, str, bytes, bool, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial, type)

Feed = Callable[[bytes], None]


def digest(value: Any, ignore: frozenset[str] = PUBLISH_LISTS) -> str:
    """The digest of `value`: 32 hex digits. ignore: names of attributes that do not count."""
    hasher = hashlib.blake2b(digest_size=16)
    _walk(value, hasher.update, ignore, {})
    return hasher.hexdigest()


def state_digest(machine: Any) -> str:
    """The digest of a machine, whichever class it is of and whoever watches it."""
    state = {name: value for name, value in vars(machine).items() if name not in WATCHERS}
    return digest(state, PUBLISH_LISTS | WATCHERS)


def refusal_digest(machine: Any) -> str:
    """The digest of everything that a refused command must leave as it was."""
    return digest(machine, PUBLISH_LISTS | REFUSAL_COUNTERS)


def _walk(value: Any, feed: Feed, ignore: frozenset[str], seen: dict[int, int]) -> None:
    kind = type(value)
    if kind in _ATOMS:
        feed(f"{kind.__name__}{value!r};".encode())
    elif kind is np.ndarray:
        feed(f"a{value.dtype.str}{value.shape}".encode())
        feed(value.tobytes())
    elif isinstance(value, np.generic | enum.Enum):
        feed(repr(value).encode())
    elif isinstance(value, _FUNCTIONS):
        return
    elif isinstance(value, tuple | msgspec.Struct):  # values: whether two are the same object means nothing
        _walk_container(value, feed, ignore, seen)
    elif id(value) in seen:
        feed(f"again{seen[id(value)]};".encode())
    else:
        seen[id(value)] = len(seen)
        _walk_container(value, feed, ignore, seen)


def _walk_container(value: Any, feed: Feed, ignore: frozenset[str], seen: dict[int, int]) -> None:
    if isinstance(value, dict):
        feed(b"{")
        for key, item in value.items():
            _walk(key, feed, ignore, seen)
            _walk(item, feed, ignore, seen)
        feed(b"}")
    elif isinstance(value, list | tuple | deque):
        feed(b"[")
        for item in value:
            _walk(item, feed, ignore, seen)
        feed(b"]")
    elif isinstance(value, set | frozenset):
        feed(f"s{sorted(value)!r}".encode())
    else:
        feed(f"({type(value).__name__}".encode())
        for name, item in _attributes(value):
            if name not in ignore:
                feed(f".{name}=".encode())
                _walk(item, feed, ignore, seen)
        feed(b")")


def _attributes(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        return [(name, getattr(value, name)) for name in value.__struct_fields__]
    names = getattr(type(value), "__slots__", None)
    if names is not None:
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    if isinstance(value, BaseException):
        return [("args", value.args)]
    return list(vars(value).items())
