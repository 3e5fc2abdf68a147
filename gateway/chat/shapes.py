"""What an answer must look like, in the words of `kvforge.Sampling`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """name: of the field of `kvforge.Sampling`, or "": any text will do. field: what the request calls it."""

    name: str = ""
    value: Any = None
    field: str = ""

    @property
    def named(self) -> dict[str, Any]:
        """For `Sampling`."""
        return {self.name: self.value} if self.name else {}


ANY = Shape()
