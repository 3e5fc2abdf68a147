"""Markers for the encoding of declared fields in a snapshot that are not plain values."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np


class Array(NamedTuple):
    """Marks a field that is an array: the file has its index in the table of arrays."""

    dtype: np.dtype[Any]
    axes: int = 1


class SpecialContainer(NamedTuple):
    """Marks a field with a special container; the file has a list or a map."""

    kind: Any


class Decimal(NamedTuple):
    """Marks an integer of any size: the file has its decimal digits."""


I64: TypeAlias = Annotated[int, Array(np.dtype("<i8"))]
U64: TypeAlias = Annotated[int, Array(np.dtype("<u8"))]
I32: TypeAlias = Annotated[int, Array(np.dtype("<i4"))]
F64: TypeAlias = Annotated[int, Array(np.dtype("<f8"))]
F32: TypeAlias = Annotated[int, Array(np.dtype("<f4"))]
I8: TypeAlias = Annotated[int, Array(np.dtype("|i1"))]
Flags: TypeAlias = Annotated[int, Array(np.dtype("|b1"))]
I64Table: TypeAlias = Annotated[int, Array(np.dtype("<i8"), 2)]
I32Table: TypeAlias = Annotated[int, Array(np.dtype("<i4"), 2)]
F32Table: TypeAlias = Annotated[int, Array(np.dtype("<f4"), 2)]
Big: TypeAlias = Annotated[str, Decimal()]
Frames: TypeAlias = list[bytes]  # a message of the protocol, as `codec` encodes it


class Saved(msgspec.Struct, kw_only=True, rename=lambda name: name.lstrip("_")):
    """The saved state of one object."""
