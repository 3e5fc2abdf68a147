"""Faults of a kernel: raised at once (`Fault`), or collected until the launch ends (`Findings`)."""

from __future__ import annotations

from dataclasses import dataclass, field


class Fault(Exception):
    """An operation that may crash a GPU or yields undefined results there; the message names the instruction."""


class Unsupported(NotImplementedError):
    """An instruction that the interpreter does not implement; the kernel may still be correct."""


@dataclass
class Findings:
    """The findings of one launch, each named by the text of the offending instruction.

    Attributes:
        races: races in LDS.
        uninitialised: reads of LDS that no wave has written.
        unreleased: atomic operations that run while earlier stores may be outstanding.
        instructions: executed instructions, counted once per wave.
    """

    races: set[str] = field(default_factory=set)
    uninitialised: set[str] = field(default_factory=set)
    unreleased: set[str] = field(default_factory=set)
    instructions: int = 0

    def problems(self) -> list[str]:
        """Return one line per finding."""
        named = {
            "race in LDS": self.races,
            "uninitialised LDS": self.uninitialised,
            "stores that nothing waited for": self.unreleased,
        }
        return [f"{what}: {text}" for what, texts in named.items() for text in sorted(texts)]
