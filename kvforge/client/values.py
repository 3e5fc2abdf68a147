"""Checks of numbers of any type, including numpy's integers, which the shared tables return."""

from __future__ import annotations

import math
import numbers
import operator

import numpy as np

from kvforge.protocol.errors import InvalidRequest

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
SHOWN_LENGTH_MAX = 30


def whole(field: str, value: object, low: int, high: int) -> int:
    """Convert an integer of any type from `low` to `high` to int; True and False are refused.

    Raises:
        InvalidRequest: Names `field`.
    """
    if not isinstance(value, bool | np.bool_):
        try:
            integer = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
        else:
            if low <= integer <= high:
                return integer
    raise InvalidRequest(field, f"is {shown(value)}; it must be an integer from {low} to {high}")


def number(
    field: str, value: object, low: float, high: float, low_words: str = "", *, also: float | None = None
) -> float:
    """Convert a number of any type from `low` to `high` to float.

    Args:
        field: The argument's name.
        value: The value.
        low: The lowest value.
        high: The highest value.
        low_words: Describes `low` in the error.
        also: One more allowed value.

    Raises:
        InvalidRequest: Names `field`.
    """
    if not isinstance(value, bool | np.bool_) and isinstance(value, numbers.Real):
        real = float(value)
        if (math.isfinite(real) and low <= real <= high) or (also is not None and real == also):
            return real
    raise InvalidRequest(field, f"is {shown(value)}; it must be a number from {low_words or f'{low:g}'} to {high:g}")


def flag(field: str, value: object) -> bool:
    """Check for True or False.

    Raises:
        InvalidRequest: Names `field`.
    """
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequest(field, f"is {shown(value)}; it must be True or False")
    return bool(value)


def shown(value: object) -> str:
    """Return a wrong value as it appears in an error text."""
    text = repr(value)
    return text if len(text) <= SHOWN_LENGTH_MAX else text[: SHOWN_LENGTH_MAX - 3] + "..."
