"""Sizes of the processes of a chaos run, and the check that none grows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# A coordinator with all its connections has 42 descriptors, four clients have 28; a process may be sampled while it
# reconnects.
DESCRIPTORS_MAX = 64


@dataclass(frozen=True)
class Sample:
    """Size of a process: anonymous resident memory in bytes, and open descriptors."""

    bytes: int
    descriptors: int


@dataclass(frozen=True)
class Span:
    """Sizes of one process: once warm, and last."""

    warm: Sample
    last: Sample


def sample(pid: int) -> Sample | None:
    """Return the current size, or None if the process does not exist."""
    with suppress(OSError, StopIteration):
        proc = Path(f"/proc/{pid}")
        lines = (proc / "status").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
        return Sample(kib << 10, len(list((proc / "fd").iterdir())))
    return None


def growth(spans: Sequence[Span]) -> Sample:
    """Return the largest growth among the successive processes of a member.

    The last process, which starts from the state that the others saved, is also compared with the first one.
    """
    pairs = [(span.warm, span.last) for span in spans] + [(span.warm, spans[-1].last) for span in spans[:1]]
    return Sample(
        max((last.bytes - warm.bytes for warm, last in pairs), default=0),
        max((last.descriptors - warm.descriptors for warm, last in pairs), default=0),
    )


def too_large(member: str, spans: Sequence[Span], bytes_max: int) -> list[str]:
    """Return a problem per growth above the limits."""
    grown, faults = growth(spans), []
    if grown.bytes > bytes_max:
        faults.append(f"{member} has grown by {grown.bytes} bytes, more than {bytes_max}")
    if grown.descriptors > DESCRIPTORS_MAX:
        faults.append(f"{member} has grown by {grown.descriptors} descriptors, more than {DESCRIPTORS_MAX}")
    return faults
