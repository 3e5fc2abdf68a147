"""How large the processes of a chaos run are, and whether one of them grows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# All connections of a coordinator take 42, four clients' 28: they may just be made anew when a process is looked at.
DESCRIPTORS_MAX = 64


@dataclass(frozen=True)
class Sample:
    """A process's size: resident memory that is no file's, and open descriptors."""

    bytes: int
    descriptors: int


@dataclass(frozen=True)
class Span:
    """One process: its size once it had all that it needs, and its last one."""

    warm: Sample
    last: Sample


def sample(pid: int) -> Sample | None:
    """As it is now; None where there is no such process any more."""
    with suppress(OSError, StopIteration):
        proc = Path(f"/proc/{pid}")
        lines = (proc / "status").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
        return Sample(kib << 10, len(list((proc / "fd").iterdir())))
    return None


def growth(spans: Sequence[Span]) -> Sample:
    """Of the processes in one place, one after the other: how much the one that grew most has grown, or by how much the
    last one, which begins with what the others wrote down, is larger than the first."""
    pairs = [(span.warm, span.last) for span in spans] + [(span.warm, spans[-1].last) for span in spans[:1]]
    return Sample(
        max((last.bytes - warm.bytes for warm, last in pairs), default=0),
        max((last.descriptors - warm.descriptors for warm, last in pairs), default=0),
    )


def too_large(member: str, spans: Sequence[Span], bytes_max: int) -> list[str]:
    """What is wrong with the growth of the processes in a member's place."""
    grown, faults = growth(spans), []
    if grown.bytes > bytes_max:
        faults.append(f"{member} has grown by {grown.bytes} bytes, more than {bytes_max}")
    if grown.descriptors > DESCRIPTORS_MAX:
        faults.append(f"{member} has grown by {grown.descriptors} descriptors, more than {DESCRIPTORS_MAX}")
    return faults
