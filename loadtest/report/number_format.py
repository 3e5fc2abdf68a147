"""Number formats of the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING = "-"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with this many significant digits, never dropping integer digits: 0.0123, 4.57, 1,235."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if whole >= digits:
        return f"{value:,.0f}"
    if whole:
        return f"{value:.{digits - whole}f}"
    return f"{value:.{digits}g}"


def spread(value: float | None, interval: Mapping[str, Any] | None) -> str:
    """Format a value with the half-width of its interval: 12.3 ±0.4."""
    return number(value) if value is None or interval is None else f"{number(value)} ±{number(interval['half'], 2)}"


def percent(share: float | None) -> str:
    """Format a share as a percentage."""
    return NOTHING if share is None else f"{share:.1%}"


def pairs(values: Mapping[str, Any]) -> str:
    """Format `name value, name value`, without None and empty values."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None and value != "")


def milliseconds(value: float) -> str:
    """Format a duration with a suitable unit: 500 ms, 10 s."""
    return f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms"
