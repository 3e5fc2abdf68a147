"""Canonical digest of any object: equal states give equal digests in any process.

Covers plain values, containers, numpy arrays, msgspec structs, and objects with attributes. Sets are sorted; dicts keep
their order, because the core's orders matter (least recently used first). The lists of unpublished changes and
functions are left out.
"""

from __future__ import annotations

import enum
import hashlib
import types
from collections import deque
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.host_free import FreeBlocks
from tools.simulation.attributes import WATCHERS

# Lists of unpublished changes: publishing one twice is harmless. `sampled_rows`, `readers_changed`, `bounds_us`,
# `first_us`, `leaves`, `heaps`, `logs` and `rings` are derived from other state, and found again after a recovery.
# `_appender` and `_step_builder` are parts of other objects and have no state of their own. `watcher` belongs to the
# simulator.
PUBLISH_LISTS = frozenset(
    {
        *("changed", "changed_rows", "changed_lengths", "changed_cells", "changed_states", "changed_rings"),
        *("sampled_rows", "readers_changed", "bounds_us", "first_us", "watcher", "leaves", "heaps", "logs", "rings"),
        *("_appender", "_step_builder"),
    }
)
# A refusal is counted, makes its sender known, and takes time; nothing else may change.
REFUSAL_COUNTERS = frozenset({"refused_total", "clients", "now_us"})
_ATOMS = frozenset((int, float, str, bytes, bool, type(None)))
# tuples, because isinstance is faster with them than with unions
_SCALARS = (np.generic, enum.Enum)
_VALUES = (tuple, msgspec.Struct)
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial, type)


def digest(value: Any, ignore: frozenset[str] = PUBLISH_LISTS) -> str:
    """Return the digest of `value` as 32 hex digits, without the attributes named in `ignore`."""
    serialised = _Serialised(ignore)
    serialised.all_of(value)
    hasher = hashlib.blake2b("".join(serialised.words).encode(), digest_size=16)
    hasher.update(b"".join(serialised.arrays))
    return hasher.hexdigest()


def state_digest(machine: Any) -> str:
    """Return the digest of a machine, independent of its class and its watcher."""
    state = {name: value for name, value in vars(machine).items() if name not in WATCHERS}
    return digest(state, PUBLISH_LISTS | WATCHERS)


def refusal_digest(machine: Any) -> str:
    """Return the digest of the state that a refused command must not change."""
    return digest(machine, PUBLISH_LISTS | REFUSAL_COUNTERS)


class _Serialised:
    """Serialised value: words, and the bytes of arrays (their dtype and shape are among the words).

    Containers of atoms, the most common ones, are written with one repr.
    """

    def __init__(self, ignore: frozenset[str]) -> None:
        self.words: list[str] = []
        self.arrays: list[bytes] = []
        self._ignore, self._seen = ignore, dict[int, int]()
        self._kept: list[object] = []  # otherwise another object could have the id of one that is in `_seen`

    def all_of(self, value: Any) -> None:
        """Serialise a value and its contents."""
        kind, words = type(value), self.words
        if kind in _ATOMS:
            words.append(f"{value!r};")
        elif kind is np.ndarray:
            words.append(f"a{value.dtype.str}{value.shape}")
            self.arrays.append(value.tobytes())
        elif isinstance(value, _SCALARS):
            words.append(f"{value!r};")
        elif isinstance(value, _FUNCTIONS):
            return
        elif isinstance(value, _VALUES):  # for values, object identity does not matter
            self._container(value)
        elif id(value) in self._seen:
            words.append(f"again{self._seen[id(value)]};")
        else:
            self._seen[id(value)] = len(self._seen)
            self._container(value)

    def _container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._items("{", [*value, *value.values()])
        elif isinstance(value, _LISTS):
            self._items("[", value)
        elif isinstance(value, _SETS):
            self.words.append(f"s{sorted(value)!r}")
        elif isinstance(value, FreeBlocks):  # all else follows from which blocks are free
            self.words.append(f"f{[*value]!r}")
        else:
            self._object(value)

    def _items(self, bracket: str, items: Collection[Any]) -> None:
        self.words.append(bracket)
        if _ATOMS.issuperset(map(type, items)):
            self.words.append(repr([*items]))
        else:
            for item in items:
                self.all_of(item)
        self.words.append("]")

    def _object(self, value: Any) -> None:
        words, ignore, atoms = self.words, self._ignore, {}
        words.append(f"({type(value).__name__}")
        attributes = _attributes(value)
        if isinstance(value, BlockPool):
            attributes = list(_of_pool(value, dict(attributes)).items())
            self._kept.append(attributes)
        for name, item in attributes:
            if name not in ignore:
                if type(item) in _ATOMS:
                    atoms[name] = item
                else:
                    words.append(f".{name}=")
                    self.all_of(item)
        words.append(f"{atoms!r})")


def _of_pool(pool: BlockPool, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a pool with dicts in place of arrays of the same content, and those of its parts.

    So the digest is what it was when a pool was one object with dicts, and stored digests show that the state is the
    same.
    """
    found: dict[str, Any] = {}
    for name, item in attributes.items():
        if name == "recent":
            each = {tenant: pool.recent.items(tenant) for tenant in pool.recent.counts}
            found["_lru"] = {
                tenant: dict(zip(ids.tolist(), stamps.tolist(), strict=True)) for tenant, (ids, stamps) in each.items()
            }
            found["_stamp"] = pool.recent.stamp
        elif name == "parts":
            keys = pool.parts.window_keys
            found |= {"checkpoints": item.checkpoints, "_checkpoint_of": item.checkpoint_of, "windows": item.windows}
            found["_window_of"] = {block: keys.item(block) for blocks in item.windows.values() for block in blocks}
        elif name == "eviction":
            found["host"] = item.host
        elif name in ("quarantine", "tenants"):
            found[f"_{name}"] = item
        elif name != "touched":  # the largest of `Blocks.touch`
            found[name] = item
    return found


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        return list(zip(value.__struct_fields__, msgspec.structs.astuple(value), strict=True))
    names = getattr(type(value), "__slots__", None)
    if names is not None:
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    if isinstance(value, BaseException):
        return [("args", value.args)]
    return list(vars(value).items())
