"""What a check has found: what is so, what is wrong with it, what to do."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, WARNING, WRONG = "ok", "warning", "wrong"


@dataclass(frozen=True)
class Finding:
    """kind: WRONG: it cannot serve, or not safely; WARNING: it can, and somebody should know. remedy: what to do."""

    kind: str
    what: str
    remedy: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{self.kind}: {self.what}" + (f": {self.remedy}" if self.remedy else "")

    def document(self) -> dict[str, str]:
        """For a program."""
        return {"kind": self.kind, "what": self.what, "remedy": self.remedy}


def good(what: str) -> Finding:
    return Finding(GOOD, what)


def warning(what: str, remedy: str) -> Finding:
    return Finding(WARNING, what, remedy)


def wrong(what: str, remedy: str) -> Finding:
    return Finding(WRONG, what, remedy)
