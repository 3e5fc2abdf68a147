"""Output constraints, in the terms of `kvforge.SamplingParams`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """An output constraint.

    Attributes:
        name: The field of `kvforge.SamplingParams`, or "" for any text.
        value: Its value.
        field: Its path in the request.
    """

    name: str = ""
    value: Any = None
    field: str = ""

    @property
    def named(self) -> dict[str, Any]:
        """The keyword argument for `SamplingParams`."""
        return {self.name: self.value} if self.name else {}


ANY = Shape()
