"""Findings of a check: the state, its severity and the remedy."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, WARNING, WRONG = "ok", "warning", "wrong"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        kind: WRONG: it cannot serve, or not safely; WARNING: it can serve, but needs attention; GOOD: nothing to do.
        what: The state.
        remedy: The action that fixes it.
    """

    kind: str
    what: str
    remedy: str = ""

    def line(self) -> str:
        """Return the finding as a line for people."""
        return f"{self.kind}: {self.what}" + (f": {self.remedy}" if self.remedy else "")

    def document(self) -> dict[str, str]:
        """Return the finding as a dictionary for programs."""
        return {"kind": self.kind, "what": self.what, "remedy": self.remedy}


def good(what: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(GOOD, what)


def warning(what: str, remedy: str) -> Finding:
    """Return a finding that needs attention."""
    return Finding(WARNING, what, remedy)


def wrong(what: str, remedy: str) -> Finding:
    """Return a finding that prevents serving."""
    return Finding(WRONG, what, remedy)
