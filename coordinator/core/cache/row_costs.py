"""What steps without prompt tokens cost by their rows, with drafts and without.

The worker says how long each step took; a line is fitted to these times. A step with drafts is in flight alone: the
device waits for its result to reach the coordinator, and for the next step. That way is measured apart, as what the
time between two results has more than the step. Steps without drafts overlap; of one that did not, because drafts were
due, the way says little: such steps would overlap if there were no drafts. Until a step with drafts was measured, its
way is the shortest of steps alone: the first step of a worker takes several times as long as others. Such steps come
later too, as where a graph is captured: of the last three ways the one in the middle counts, of the first two the
shorter one.
"""

from __future__ import annotations

from .costs import DURATION_US_MAX, UNIT, StepCosts

WAY_STEPS = 6  # the averaging window of ways
UNKNOWN = -1


class RowCosts:
    """The costs of a group, in units of 1/UNIT microseconds.

    Attributes:
        line: Times of steps by their rows, each draft a row.
        plain_way, drafted_way: What the time between results has more, of steps without and with drafts; or UNKNOWN.
        last_way, way_before: Those of the last two steps with drafts; UNKNOWN before these.
    """

    def __init__(self) -> None:
        self.line = StepCosts()
        self.plain_way = self.drafted_way = UNKNOWN
        self.last_way = self.way_before = UNKNOWN

    def add(self, rows: int, drafts: int, duration_us: int, elapsed_us: int, *, alone: bool = False) -> None:
        """Add a step.

        Args:
            rows: Its rows.
            drafts: Its drafts.
            duration_us: What the worker took.
            elapsed_us: The time from the result before, or from the step itself if that is later, to its result.
            alone: It was sent when no other step was in flight, though two may be.
        """
        self.line.add(rows + drafts, duration_us)
        way = UNIT * max(0, min(elapsed_us, DURATION_US_MAX) - duration_us)
        if drafts:
            if self.last_way == UNKNOWN:
                self.drafted_way = _shortest(self.drafted_way, way)
            elif self.way_before == UNKNOWN:
                self.drafted_way = min(way, self.last_way)
            else:
                self.drafted_way = _averaged(self.drafted_way, sorted((way, self.last_way, self.way_before))[1])
            self.last_way, self.way_before = way, self.last_way
        elif not alone:
            # Down at once, for the first way may be that of a step alone.
            self.plain_way = way if way < self.plain_way else _averaged(self.plain_way, way)
        else:
            self.plain_way = _shortest(self.plain_way, way)
            if self.last_way == UNKNOWN:
                self.drafted_way = _shortest(self.drafted_way, way)  # a step with drafts is as alone

    @property
    def is_known(self) -> bool:
        """Whether steps of both kinds were measured."""
        return self.plain_way != UNKNOWN and self.drafted_way != UNKNOWN

    @property
    def few_drafted(self) -> bool:
        """Whether fewer than two steps with drafts were measured: the first may have taken several times as long."""
        return self.way_before == UNKNOWN

    @property
    def has_times(self) -> bool:
        """Whether steps take a time that the worker measures."""
        return self.line.fixed + self.line.token >= UNIT

    def of(self, rows: int, drafts: int = 0) -> int:
        """Return the cost of a step."""
        return max(1, self.line.of(rows + drafts) + (self.drafted_way if drafts else self.plain_way))


def _shortest(way: int, new: int) -> int:
    return new if way == UNKNOWN else min(way, new)


def _averaged(way: int, new: int) -> int:
    return new if way == UNKNOWN else way + (new - way) // WAY_STEPS
