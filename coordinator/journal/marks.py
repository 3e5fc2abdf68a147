"""How a declared field is kept in a snapshot, where it is no plain value."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np


class Array(NamedTuple):
    """Marks a field that is an array: in the file, the index of an array in the table behind the state."""

    dtype: np.dtype[Any]
    axes: int = 1


class Kept(NamedTuple):
    """Marks a field by the container that its attribute is; in the file it is a list or a map."""

    kind: Any


class Decimal(NamedTuple):
    """Marks an integer of any size: in the file, its decimal digits."""


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
    """The state of one object."""
