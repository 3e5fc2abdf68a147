"""Snapshots of a machine's whole state as bytes, equal before and after an event that must change nothing.

Most objects of a machine last: its parts for its whole life, a worker's group while the worker is connected. These
objects are searched for now and then. A snapshot writes the contents of each, and a number for each reference to it
(through pickle's memo, filled in advance). All other reachable objects are written in place. Nothing is left out, and a
replaced object shows.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict, deque
from functools import cache
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import msgspec
import numpy as np

from kvforge.coordinator.core.cache.groups import SentStep
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.requests.idempotency import IdempotencyKey
from kvforge.coordinator.core.requests.request import Request
from kvforge.coordinator.core.waits import Wait
from kvforge.protocol.messages import Grammar, RowStart, SamplingParams, Step
from tools.simulation.attributes import getter

# values that pickle writes as a name only
CONSTANT = (int, float, str, bytes, bool, type(None))
PART, FROZEN, ARRAY, NAME, OTHER = "part", "frozen", "array", "name", "other"
NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, np.dtype)
# Objects that come and go with requests and steps. They have no numbers: a turn may put an equal one in their place.
STRUCTS = (Grammar, SamplingParams, Wait, IdempotencyKey, RowStart)
Snapshot = tuple[bytes, bytes]
NOTHING: Snapshot = (b"", b"")
Reduced = tuple[Any, ...]
# A request without its arrays, which have one dtype each and are not shared.
_of_request = attrgetter(*sorted(set(Request.__slots__) - {"prompt", "tokens", "logprobs"}))
_of_sent = attrgetter("step_id", "sent_us", "decodes", "prefill_tokens", "tenant", "message")
_arrays_of_sent = attrgetter("slots", "runs", "counts", "samples", "sampled")
_arrays_of_step = attrgetter(*(name for name, _ in Step.FRAMES))


class Finder(pickle.Pickler):
    """Pickler that walks through all reachable objects and collects those that are neither plain nor containers."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), 5)
        self.found: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        """Record an object; for some classes, only the objects reachable from it matter."""
        self.found.append(value)
        kind: Any = type(value)
        if kind is np.ndarray:
            return list, (value.dtype,)
        if _kind(kind) == PART:
            return list, (getter(value)(value),)
        if not issubclass(kind, NAMED):
            return NotImplemented
        owner = getattr(value, "__self__", None)
        return list, (() if _is_alone(owner) else (owner,))


class Known:
    """Numbered objects and their contents.

    Attributes:
        parts: parts of the machine.
        values: other objects that can change; constants cannot.
    """

    def __init__(self, found: list[Any]) -> None:
        of_kind: dict[str, list[Any]] = {PART: [], FROZEN: [], ARRAY: [], NAME: [], OTHER: []}
        for value in found:
            of_kind[_kind(cast(Any, type(value)))].append(value)
        self.parts, frozen, named = of_kind[PART], of_kind[FROZEN], of_kind[NAME]
        self.arrays = [value for value in of_kind[ARRAY] if value.flags.c_contiguous]
        owners = {id(owner): owner for value in named if not _is_alone(owner := getattr(value, "__self__", None))}
        fields = [getattr(value, name) for value in frozen for name in value.__struct_fields__]
        self.values = [value for value in (*fields, *owners.values()) if not isinstance(value, CONSTANT)]
        self.objects = [*self.parts, *frozen, *self.arrays, *named]
        self.getters = list(map(getter, self.parts))


class Snapshots:
    """Takes snapshots of one machine; two are comparable without a `renew` in between.

    Finished requests count by their ids only, and a refused sender does not count. A snapshot also shows which
    references are the same object, so only an untouched state is sure to give the same bytes.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._reducers: dict[Any, Any] = {
            **copyreg.dispatch_table,
            np.ndarray: _array,
            deque: _deque,
            OrderedDict: _ordered,
            Request: _request,
            SentStep: _sent,
            Step: _step,
            **dict.fromkeys(STRUCTS, _struct),
        }
        self._lasting: Known | None = None
        self._renewed = False

    def renew(self) -> None:
        """Mark that a worker's group is new: the next snapshot searches for lasting objects again."""
        self._renewed = False

    def _find(self) -> None:
        machine = self._machine
        if self._lasting is None:
            self._lasting = Known(
                [machine, *_found(getter(machine)(machine), None), *self._reducers, bytes, list, dict]
            )
            self._lasting_memo = _memo(self._lasting.objects)
        self._renewed, lasting = True, self._lasting
        passing = Known(_found((self._machine.cache.groups, self._machine.workers), self._lasting_memo))
        self._objects = [*lasting.objects, *passing.objects]  # kept alive, so that no id is reused
        self._memo = _memo(self._objects)
        self._parts = [*lasting.parts, *passing.parts]
        self._getters = [*lasting.getters, *passing.getters]
        self._values = [*lasting.values, *passing.values]
        self._arrays = [*lasting.arrays, *passing.arrays]

    def capture(self) -> Snapshot:
        """Return the current state."""
        if not self._renewed:
            self._find()
        machine = self._machine
        requests: Any = machine.requests
        clock = machine.cache.clock
        finished, clients = requests.finished, machine.clients
        refused_total, now_us = requests.refused_total, clock.now_us
        requests.finished, machine.clients, requests.refused_total, clock.now_us = tuple(finished), {}, 0, 0
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5)
        pickler.memo, pickler.dispatch_table = self._memo, self._reducers
        try:
            pickler.dump(([get(part) for get, part in zip(self._getters, self._parts, strict=True)], self._values))
            return file.getvalue(), b"".join(self._arrays)
        finally:
            requests.finished, machine.clients, requests.refused_total = finished, clients, refused_total
            clock.now_us = now_us

    def close(self) -> None:
        """Release the machine: before Python 3.11.4 the collector does not look into a pickler's memo."""
        if self._lasting is not None:
            self._memo.clear()
            self._lasting_memo.clear()
        self._lasting, self._renewed = None, False


def _found(root: Any, memo: Any) -> list[Any]:
    """Return the objects that are reachable from `root` and have no number yet."""
    finder = Finder()
    finder.memo = _memo([list]) if memo is None else memo
    finder.dump(root)
    return finder.found


def _memo(objects: list[Any]) -> Any:
    """Return a pickler memo with numbers for the objects."""
    pickler = pickle.Pickler(io.BytesIO(), 5)
    pickler.memo = {id(value): (number, value) for number, value in enumerate(objects)}
    return pickler.memo


@cache
def _kind(cls: type) -> str:
    """Return how a snapshot treats objects of a class.

    PART is an object of the core, described by its attributes alone.
    """
    if cls is np.ndarray:
        return ARRAY
    if issubclass(cls, NAMED):
        return NAME
    if issubclass(cls, STRUCTS):
        return OTHER
    if issubclass(cls, msgspec.Struct) and cls.__struct_config__.frozen:
        return FROZEN
    own = cls.__module__.startswith("kvforge.coordinator.") and cls.__dictoffset__ != 0
    is_part = own and not any("__slots__" in vars(base) for base in cls.__mro__)
    return PART if is_part or issubclass(cls, Machine) else OTHER  # any subclass of the machine


def _is_alone(owner: Any) -> bool:
    """Return whether the owner of a function is missing or a module, so that it is not a method."""
    return owner is None or isinstance(owner, ModuleType)


# Reducers that are faster than the objects' own: a name, and the contents.


def _array(value: Any) -> Reduced:
    return bytes, (value.dtype, value.shape, value.tobytes())


def _deque(value: deque[Any]) -> Reduced:
    return list, (), None, iter(value)


def _ordered(value: OrderedDict[Any, Any]) -> Reduced:
    return dict, (), None, None, iter(value.items())


def _request(value: Request) -> Reduced:
    return Request, (), (_of_request(value), value.prompt.tobytes(), value.tokens.tobytes(), value.logprobs.tobytes())


def _sent(value: SentStep) -> Reduced:
    arrays = _arrays_of_sent(value)
    return SentStep, (), (_of_sent(value), [array.size for array in arrays], b"".join(arrays))


def _step(value: Step) -> Reduced:
    arrays = _arrays_of_step(value)
    return Step, (), (value.step_id, value.begins, [array.size for array in arrays], b"".join(arrays))


def _struct(value: msgspec.Struct) -> Reduced:
    return type(value), (), msgspec.structs.astuple(value)
