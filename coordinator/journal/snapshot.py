"""Snapshots: the whole machine in one file, so that what came before it need not be kept, nor applied again.

The objects are pickled; the memory of arrays is written beside them, and of that only the pages that hold anything:
most of a default machine is room for what may come. A snapshot is read by the same code that wrote it
(`recovery.STATE_VERSION`), from a folder that only its owner can write to.
"""

from __future__ import annotations

import copyreg
import io
import logging
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from kvforge.protocol.errors import JournalCorrupt

from ..core.machine import Machine

MAGIC = b"kvfS"
STATE = "state-{:016d}"
PAGE_BYTES = 4096
_SIZE = struct.Struct("<Q")
_PAGES = struct.Struct("<QQ")
_CRC = struct.Struct("<I")
# What a state is made of: classes of the core and of its messages, and of others these.
OWN = ("coordinator.core.", "kvforge.protocol.messages.", "kvforge.protocol.errors")
OTHERS = {
    "builtins": {"set", "frozenset", "bytearray", "slice", "range", "complex"},
    "collections": {"OrderedDict", "deque"},
    "msgspec._utils": {"rebuild"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"scalar", "_reconstruct"},
    "numpy._core.numeric": {"_frombuffer"},
}
log = logging.getLogger("coordinator")
Attributes = Callable[[Any], dict[str, Any]]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """version: of the code's state. now_us: the time of the last event. numbers: of connections, given out so far."""

    version: int
    now_us: int
    numbers: int


class _Checked:
    """A file whose bytes are summed up as they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc = file, 0

    def write(self, data: bytes | memoryview) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)


def write(path: Path, machine: Machine, head: Head, attributes: Attributes = vars) -> None:
    """Writes the file under another name, and gives it its own when it is whole and on the disk. Raises OSError, and
    then leaves nothing: whoever waits for room would wait for ever.

    attributes: of a part of the machine. With `vars` the machine is slower from then on, which is nothing to a child
    that ends here.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, buffers, attributes).dump(machine)
    objects = pickled.getbuffer()
    unfinished = path.with_suffix(".part")
    try:
        _write(unfinished, head, objects, buffers)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.rename(path)


def _write(unfinished: Path, head: Head, objects: memoryview, buffers: list[pickle.PickleBuffer]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as file:
        out = _Checked(file)
        out.write(MAGIC)
        for part in (msgspec.msgpack.encode(head), objects):
            out.write(_SIZE.pack(len(part)))
            out.write(part)
        out.write(_SIZE.pack(len(buffers)))
        for buffer in buffers:
            _write_used(out, buffer.raw())
        file.write(_CRC.pack(out.crc))
        file.flush()
        os.fsync(file.fileno())


def _write_used(out: _Checked, memory: memoryview) -> None:
    """The pages that are not all zeros: how large all is, how many they are, which, and what is in them."""
    whole = len(memory) // PAGE_BYTES
    if not whole:  # as most arrays of a small machine
        out.write(_PAGES.pack(len(memory), 0))
        out.write(memory)
        return
    words = np.frombuffer(memory, np.uint64, whole * PAGE_BYTES // 8).reshape(whole, PAGE_BYTES // 8)
    used = np.flatnonzero(words.any(axis=1)).astype(np.uint32)
    out.write(_PAGES.pack(len(memory), used.size))
    out.write(used.tobytes())
    out.write(words[used].tobytes())
    out.write(memory[whole * PAGE_BYTES :])


def read(path: Path) -> tuple[Head, Any]:
    """The head, and the machine once its head was looked at: `objects()` of what is returned. Raises JournalCorrupt."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < len(MAGIC) + _CRC.size:
            raise JournalCorrupt(path.name, 0)
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if data[: len(MAGIC)] != MAGIC:
        raise JournalCorrupt(path.name, 0)
    if _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(data[: -_CRC.size]):
        raise JournalCorrupt(path.name, len(data))
    parts = _Parts(data[len(MAGIC) : -_CRC.size], path.name)
    with parts.meant():
        head = msgspec.msgpack.decode(parts.sized(), type=Head)
    return head, parts


class _Parts:
    """What follows the magic of a file."""

    def __init__(self, data: memoryview, name: str) -> None:
        self._data, self._name, self._at = data, name, 0

    @contextmanager
    def meant(self) -> Iterator[None]:
        """Bytes that are as they were written may mean nothing all the same. Raises JournalCorrupt."""
        try:
            yield
        except Exception as error:
            log.error("%s makes no state: %s: %s", self._name, type(error).__name__, error)
            raise JournalCorrupt(self._name, len(MAGIC) + self._at) from error

    def sized(self) -> memoryview:
        """The next part, which says its size."""
        return self._take(self._number())

    def objects(self) -> Machine:
        """The machine. Raises JournalCorrupt."""
        with self.meant():
            objects = self.sized()
            buffers = [self._memory() for _ in range(self._number())]
            machine = _Unpickler(io.BytesIO(objects), buffers).load()
            if not isinstance(machine, Machine):
                raise pickle.UnpicklingError(f"it holds a {type(machine).__name__}")
        return machine

    def _number(self) -> int:
        number: int = _SIZE.unpack(self._take(_SIZE.size))[0]
        return number

    def _take(self, size: int) -> memoryview:
        self._at += size
        return self._data[self._at - size : self._at]

    def _memory(self) -> np.ndarray[Any, Any]:
        """An array's memory: zeros but for the pages that were written."""
        size, count = self._number(), self._number()
        whole = size // PAGE_BYTES
        if not whole:
            return np.frombuffer(bytearray(self._take(size)), np.uint8)
        memory = np.zeros(size, np.uint8)
        if count:
            used = np.frombuffer(self._take(count * 4), np.uint32)
            pages = np.frombuffer(self._take(count * PAGE_BYTES), np.uint8).reshape(count, PAGE_BYTES)
            memory[: whole * PAGE_BYTES].reshape(whole, PAGE_BYTES)[used] = pages
        memory[whole * PAGE_BYTES :] = np.frombuffer(self._take(size - whole * PAGE_BYTES), np.uint8)
        return memory


class _Pickler(pickle.Pickler):
    """Leaves the memory of all arrays to be written by itself."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], attributes: Attributes) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.dispatch_table = _Reducers(attributes)


class _Reducers(dict[type, Callable[[Any], Any]]):
    """What says how an object is pickled, by its class.

    Parts of the machine have their attributes set one by one when they are read: given as a whole, they would be kept
    in a dictionary, and whatever looks at them would take longer from then on.
    """

    def __init__(self, attributes: Attributes) -> None:
        super().__init__(copyreg.dispatch_table)
        self[np.ndarray] = _whole
        self._attributes = attributes

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if not _is_part(cls):
            raise KeyError(cls)
        self[cls] = self._part
        return self._part

    def _part(self, value: Any) -> Any:
        return copyreg.__newobj__, (type(value),), (None, self._attributes(value))  # type: ignore[attr-defined]


@cache
def _is_part(cls: type) -> bool:
    """Whether an object of the class is its attributes and nothing besides, and is made and pickled as most are."""
    own = cls.__module__.startswith("coordinator.core.") and cls.__dictoffset__ != 0
    asked = ("__new__", "__setattr__", "__getstate__", "__reduce__", "__reduce_ex__")
    plain = all(getattr(cls, name) is getattr(object, name) for name in asked) and not hasattr(cls, "__setstate__")
    return own and plain and not any("__slots__" in vars(base) for base in cls.__mro__)


# What makes an array of its memory, as numpy tells pickle by itself, in a third of the time.
_from_memory: Callable[..., Any] = np.zeros(1).__reduce_ex__(5)[0]  # type: ignore[assignment]


def _whole(value: np.ndarray[Any, Any]) -> Any:
    """A part of a larger array would be pickled number by number."""
    whole = np.ascontiguousarray(value)
    memory = pickle.PickleBuffer(whole)  # type: ignore[arg-type]
    return _from_memory, (memory, whole.dtype, whole.shape, "C")


_known: dict[tuple[str, str], Any] = {}  # what was found: to look again takes longer than all else about a small part


class _Unpickler(pickle.Unpickler):
    """Knows the classes that a machine is made of, and no others: whoever could write this file can run nothing."""

    def __init__(self, file: io.BytesIO, buffers: Iterable[Any]) -> None:
        super().__init__(file, buffers=buffers)

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError."""
        if (found := _known.get((module, name))) is None:
            found = _known[module, name] = self._find(module, name)
        return found

    def _find(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _method
        if name in OTHERS.get(module, ()):
            return super().find_class(module, name)
        # What a module of ours only imports is not its own, nor is what it defines for others to call.
        if module.startswith(OWN) and getattr(found := super().find_class(module, name), "__module__", "") == module:
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a machine")


def _method(owner: Any, name: str) -> Any:
    """A method that a part of a machine knows of another part. Raises UnpicklingError."""
    kind = type(owner)
    if not kind.__module__.startswith("coordinator.core.") or name.startswith("__"):
        raise pickle.UnpicklingError(f"{name} of a {kind.__module__}.{kind.__name__} is no part of a machine")
    return getattr(owner, name)
