"""What is found wrong with a kernel: at once (`Fault`), or gathered until it has ended (`Findings`)."""

from __future__ import annotations

from dataclasses import dataclass, field


class Fault(Exception):
    """A kernel did what may crash a GPU or gives nonsense there: the message names the instruction."""


class Unsupported(NotImplementedError):
    """An instruction that the interpreter does not know: nothing is said about the kernel."""


@dataclass
class Findings:
    """Of one launch. Each is named by the text of the instruction that shows it.

    races: in LDS. uninitialised: reads of LDS that nothing has written. unreleased: atomic operations before which
    stores may still be under way. instructions: executed, each once for each wave.
    """

    races: set[str] = field(default_factory=set)
    uninitialised: set[str] = field(default_factory=set)
    unreleased: set[str] = field(default_factory=set)
    instructions: int = 0

    def problems(self) -> list[str]:
        named = {
            "race in LDS": self.races,
            "uninitialised LDS": self.uninitialised,
            "stores that nothing waited for": self.unreleased,
        }
        return [f"{what}: {text}" for what, texts in named.items() for text in sorted(texts)]
