"""The whole state of one machine as bytes of this process: equal before and after what must change nothing.

Most of what a machine is made of stays the same objects: the machine's parts all its life, a worker's group as long as
it is there. They are found now and then; a snapshot says what is in each, and names it by a number wherever it is
referred to (pickle's memo, filled beforehand). Whatever else is reachable is written out where it is found. So nothing
is left out, and an object that took another one's place shows.
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
from kvforge.coordinator.core.requests.lifecycle import Request
from kvforge.coordinator.core.waits import Wait
from kvforge.protocol.messages import Grammar, RowStart, Sampling, Step
from tools.simulation.attributes import getter

# What pickle says nothing of but a name.
CONSTANT = (int, float, str, bytes, bool, type(None))
PART, FROZEN, ARRAY, NAME, OTHER = "part", "frozen", "array", "name", "other"
NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, np.dtype)
# Those that come and go with requests and steps.
STRUCTS = (Grammar, Sampling, Wait, IdempotencyKey, RowStart)
Snapshot = tuple[bytes, bytes]
NOTHING: Snapshot = (b"", b"")
Reduced = tuple[Any, ...]
# A request without its arrays, which are of one type each and nobody else's.
_of_request = attrgetter(*sorted(set(Request.__slots__) - {"prompt", "tokens", "logprobs"}))
_of_sent = attrgetter("step_id", "sent_us", "decodes", "prefill_tokens", "tenant", "message")
_arrays_of_sent = attrgetter("slots", "runs", "counts", "samples", "sampled")
_arrays_of_step = attrgetter(*(name for name, _ in Step.FRAMES))


class Finder(pickle.Pickler):
    """Walks through everything that is reachable, and keeps what is no plain value or container."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), 5)
        self.found: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        """Called once for each of them. Of some it is enough to know what else is reached by them."""
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
    """Objects that have numbers, and what is in them.

    parts: of the machine. values: what else can be changed; constants cannot.
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
    """Takes snapshots of one machine; two can be compared that were taken without a `renew` between them.

    Of requests that ended only the ids count, and nothing of whoever was refused. A snapshot also says which objects
    are the same object, so only an untouched state is sure to give the same bytes.
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
        """A worker's group is new: the next snapshot looks for what stays for a while, so that those after it are quick
        again."""
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
        self._objects = [*lasting.objects, *passing.objects]  # kept: while it lives its id is nobody else's
        self._memo = _memo(self._objects)
        self._parts = [*lasting.parts, *passing.parts]
        self._getters = [*lasting.getters, *passing.getters]
        self._values = [*lasting.values, *passing.values]
        self._arrays = [*lasting.arrays, *passing.arrays]

    def take(self) -> Snapshot:
        """The state as it is now."""
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
        """Lets go of the machine: before Python 3.11.4 the collector does not look into the memo of a pickler."""
        if self._lasting is not None:
            self._memo.clear()
            self._lasting_memo.clear()
        self._lasting, self._renewed = None, False


def _found(root: Any, memo: Any) -> list[Any]:
    """All that is reachable from `root` and has no number yet."""
    finder = Finder()
    finder.memo = _memo([list]) if memo is None else memo
    finder.dump(root)
    return finder.found


def _memo(objects: list[Any]) -> Any:
    """Numbers for them, as picklers take them."""
    pickler = pickle.Pickler(io.BytesIO(), 5)
    pickler.memo = {id(value): (number, value) for number, value in enumerate(objects)}
    return pickler.memo


@cache
def _kind(cls: type) -> str:
    """What it is to a snapshot that an object is of a class. PART: of the core, its attributes and nothing besides."""
    if cls is np.ndarray:
        return ARRAY
    if issubclass(cls, NAMED):
        return NAME
    if issubclass(cls, msgspec.Struct) and cls.__struct_config__.frozen:
        return FROZEN
    own = cls.__module__.startswith("kvforge.coordinator.") and cls.__dictoffset__ != 0
    is_part = own and not any("__slots__" in vars(base) for base in cls.__mro__)
    return PART if is_part or issubclass(cls, Machine) else OTHER  # a machine: whichever class it is of


def _is_alone(owner: Any) -> bool:
    """A function that is nobody's method has no owner, or a module."""
    return owner is None or isinstance(owner, ModuleType)


# What pickle is told of an object, quicker than the object says it by itself: a name, and what is in it.


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
