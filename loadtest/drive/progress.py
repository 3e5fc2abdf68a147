"""The progress of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run.

    Attributes:
        due: Requests that were due so far.
        under_way: Requests in flight.
        ends: Ended requests by state.
        output_tokens: Tokens of ended requests.
    """

    due: int = 0
    under_way: int = 0
    ends: Mapping[str, int] = field(default_factory=dict)
    output_tokens: int = 0


def together(parts: Iterable[Progress]) -> Progress:
    """Add up the progress of several driver processes."""
    due = under_way = output_tokens = 0
    ends: Counter[str] = Counter()
    for part in parts:
        due += part.due
        under_way += part.under_way
        output_tokens += part.output_tokens
        ends.update(part.ends)
    return Progress(due=due, under_way=under_way, ends=dict(ends), output_tokens=output_tokens)
