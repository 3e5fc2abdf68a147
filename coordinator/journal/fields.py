"""Conversion between the attributes of an object and the fields of its declared struct (`declared.py`)."""

from __future__ import annotations

import typing
from collections import deque
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from .field_markers import Array, Decimal, Saved, SpecialContainer
from .memory import AnyArray, ArrayWriter

_Saved = TypeVar("_Saved", bound=Saved)


class FieldKind(NamedTuple):
    """A field: its name, which is also that of the attribute, and its encoding; `mark` is None for a plain value."""

    name: str
    mark: Array | SpecialContainer | Decimal | None


@cache
def fields_of(cls: type[msgspec.Struct]) -> tuple[FieldKind, ...]:
    """Return the fields of a declared struct."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(FieldKind(name, _mark(hints[name])) for name in cls.__struct_fields__)


def _mark(hint: Any) -> Array | SpecialContainer | Decimal | None:
    for part in (hint, *typing.get_args(hint)):
        for mark in getattr(part, "__metadata__", ()):
            if isinstance(mark, Array | SpecialContainer | Decimal):
                return mark
    return None


def save(cls: type[_Saved], part: object, arrays: ArrayWriter, **given: Any) -> _Saved:
    """Return the struct of a part. `given` has the fields that are not attributes as they are."""
    values = {}
    for name, mark in fields_of(cls):
        if name in given:
            continue
        value = getattr(part, name)
        if mark is not None and value is not None:
            if isinstance(mark, Array):
                value = arrays.add(value)
            elif isinstance(mark, Decimal):
                value = str(value)
            elif mark.kind is deque:
                value = list(value)
        values[name] = value
    return cls(**values, **given)


class Restorer:
    """Sets attributes from structs, with arrays from the table that follows the state."""

    def __init__(self, arrays: list[AnyArray]) -> None:
        self._arrays = arrays

    def array(self, index: int, mark: Array) -> AnyArray:
        """Return the array with this index.

        Raises:
            ValueError: There is none, or it has another dtype or number of axes.
        """
        if not 0 <= index < len(self._arrays):
            raise ValueError(f"array {index} of {len(self._arrays)}")
        array = self._arrays[index]
        if array.dtype != mark.dtype or array.ndim != mark.axes:
            raise ValueError(f"array {index} is {array.dtype} with {array.ndim} axes, not {mark.dtype}, {mark.axes}")
        return array

    def restore(self, part: Any, saved: msgspec.Struct, *but: str) -> Any:
        """Set the attributes of a part and return it. An existing array determines the expected shape.

        Args:
            part: The object.
            saved: Its struct.
            *but: Fields that are not attributes as they are.

        Raises:
            ValueError: An array has another dtype or shape.
        """
        for name, mark in fields_of(type(saved)):
            if name in but:
                continue
            value = getattr(saved, name)
            there = getattr(part, name, None) if isinstance(mark, Array) else None
            if value is None and there is not None:
                continue  # the writer did not know this array: keep that of the new machine
            if mark is not None and value is not None:
                if isinstance(mark, Array):
                    value = self.array(value, mark)
                    if there is not None and there.shape != value.shape:
                        raise ValueError(f"{type(part).__name__}.{name} is {value.shape}, not {there.shape}")
                elif isinstance(mark, Decimal):
                    value = int(value)
                else:
                    value = mark.kind(value)
            setattr(part, name, value)
        return part
