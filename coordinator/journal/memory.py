"""The arrays of a snapshot: a table with the dtype and shape of each, and the memory pages that are in use.

Most memory of a default machine is zero, reserved for later. The reader checks every length against the rest of the
file, and the total memory of all arrays against `bytes_max`, before it allocates anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
AXES_MAX = 2
_HEAD = struct.Struct("<BB6xQQQ")  # dtype, number of axes, two lengths (1 for a missing axis), pages in use
DTYPES = tuple(np.dtype(code) for code in ("<i8", "<u8", "<i4", "<f8", "<f4", "|i1", "|b1"))
AnyArray = npt.NDArray[Any]
Write = Callable[[bytes | memoryview], object]


class ArrayWriter:
    """Assigns an index to each array. The same object always gets the same index."""

    def __init__(self) -> None:
        self._arrays: list[AnyArray] = []
        self._indices: dict[int, int] = {}

    def add(self, array: AnyArray) -> int:
        """Return the index of the array."""
        index = self._indices.get(id(array))
        if index is None:
            index = self._indices[id(array)] = len(self._arrays)
            self._arrays.append(array)  # also keeps it alive, so that its id stays unique
        return index

    def write(self, write: Write) -> None:
        """Write the table."""
        write(struct.pack("<Q", len(self._arrays)))
        for array in self._arrays:
            _write_array(array, write)


def _write_array(array: AnyArray, write: Write) -> None:
    whole = np.ascontiguousarray(array)
    code, lengths = DTYPES.index(whole.dtype), (*array.shape, 1)[:AXES_MAX]
    memory = whole.reshape(-1).view(np.uint8).data
    pages = memory.nbytes // PAGE_BYTES
    if not pages:  # most arrays of a small machine
        write(_HEAD.pack(code, array.ndim, *lengths, 0))
        write(memory)
        return
    words = np.frombuffer(memory, np.uint64, pages * PAGE_BYTES // 8).reshape(pages, PAGE_BYTES // 8)
    used = np.flatnonzero(words.any(axis=1)).astype(np.uint32)
    write(_HEAD.pack(code, array.ndim, *lengths, used.size))
    write(used.tobytes())
    write(words[used].tobytes())
    write(memory[pages * PAGE_BYTES :])


class Bytes:
    """A buffer that is read sequentially."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.at = data, 0

    def read(self, size: int) -> memoryview:
        """Return the next `size` bytes.

        Raises:
            ValueError: Fewer are left.
        """
        if size > self.left:
            raise ValueError(f"expected {size} bytes, but only {self.left} are left")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self) -> int:
        """Return the next number."""
        value: int = struct.unpack("<Q", self.read(8))[0]
        return value

    @property
    def left(self) -> int:
        """Number of bytes that are left."""
        return len(self._data) - self.at


def read_arrays(data: Bytes, bytes_max: int) -> list[AnyArray]:
    """Read the arrays of a table, in order.

    Args:
        data: The bytes, beginning with the table.
        bytes_max: The maximum memory of all arrays together.

    Raises:
        ValueError: A length, a dtype or a page number is invalid.
    """
    count = data.number()
    if count > data.left // _HEAD.size:
        raise ValueError(f"the file is too short for {count} arrays")
    return list(_read_arrays(data, count, bytes_max))


def _read_arrays(data: Bytes, count: int, bytes_max: int) -> Iterator[AnyArray]:
    for _ in range(count):
        code, axes, first, second, used = _HEAD.unpack(data.read(_HEAD.size))
        if code >= len(DTYPES) or not 1 <= axes <= AXES_MAX or (axes == 1 and second != 1):
            raise ValueError(f"invalid array: dtype {code} with {axes} axes")
        dtype, shape = DTYPES[code], (first, second)[:axes]
        size = prod(shape) * dtype.itemsize
        bytes_max -= size
        if bytes_max < 0 or used > size // PAGE_BYTES:
            raise ValueError(f"an array of shape {shape} with {used} pages is larger than it can be")
        yield _memory(data, size, used).view(dtype).reshape(shape)


def _memory(data: Bytes, size: int, used: int) -> npt.NDArray[np.uint8]:
    """Read the memory of one array: pages in use, then the rest after the last whole page; all other bytes are 0."""
    pages = size // PAGE_BYTES
    if not pages:
        return np.frombuffer(bytearray(data.read(size)), np.uint8)
    numbers = np.frombuffer(data.read(used * 4), np.uint32)
    contents = np.frombuffer(data.read(used * PAGE_BYTES), np.uint8).reshape(used, PAGE_BYTES)
    rest = data.read(size - pages * PAGE_BYTES)
    memory = np.zeros(size, np.uint8)
    memory[: pages * PAGE_BYTES].reshape(pages, PAGE_BYTES)[numbers] = contents
    memory[pages * PAGE_BYTES :] = np.frombuffer(rest, np.uint8)
    return memory
