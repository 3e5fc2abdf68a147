"""Reads the header of a safetensors file: names, types, shapes and extents of its tensors. Tensor data is not read.

Format: https://github.com/huggingface/safetensors#format. A client has no safetensors library installed, and this
reader names the tensor that a damaged file lacks.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvforge.protocol.errors import UnsupportedModel

_HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library
_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file.

    Attributes:
        name: Its name.
        type_name: The format's name of its type, like BF16.
        shape: Its shape.
        size: Its bytes.
        offset: Position of its first byte in the file.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    size: int
    offset: int = 0


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors of a file in storage order, after checking that they fill it exactly.

    Raises:
        UnsupportedModel: The file is not safetensors or is damaged.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        try:
            if size < 8 or length > min(size - 8, _HEADER_BYTES_MAX):
                raise ValueError(f"it declares a header of {length} bytes in a file of {size}")
            return _tensors(json.loads(file.read(length)), 8 + length, size - 8 - length)
        except (ValueError, TypeError, KeyError, RecursionError) as error:  # ValueError: JSON's and Unicode's too
            raise UnsupportedModel(
                str(path), f"it is damaged: its safetensors header cannot be read ({error})"
            ) from error


def _tensors(header: Any, header_bytes: int, data_bytes: int) -> tuple[StoredTensor, ...]:
    """Return the tensors of a header {name: {dtype, shape, data_offsets}}, with offsets from the end of the header."""
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    entries.sort(key=lambda item: tuple(item[1]["data_offsets"]))
    end, tensors = 0, []
    for name, entry in entries:
        type_name, shape = str(entry["dtype"]), tuple(entry["shape"])
        first, last = entry["data_offsets"]
        if not all(isinstance(number, int) and number >= 0 for number in (first, last, *shape)) or last < first:
            raise ValueError(f"the tensor {name} has an invalid shape or offsets")
        if last > data_bytes:
            raise ValueError(f"the tensor {name} ends at byte {last} of {data_bytes} bytes of data")
        if first != end:
            raise ValueError(f"the tensor {name} begins at byte {first}, the one before it ends at {end}")
        if type_name in _BITS and prod(shape) * _BITS[type_name] != (last - first) * 8:
            raise ValueError(f"the tensor {name} has {last - first} bytes, which do not fit {list(shape)} {type_name}")
        tensors.append(StoredTensor(name, type_name, shape, last - first, header_bytes + first))
        end = last
    if end != data_bytes:
        raise ValueError(f"its tensors end at byte {end} of {data_bytes} bytes of data")
    return tuple(tensors)
