"""Sections of a tensor's dimension that ranks divide by whole units, such as heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """Consecutive numbers of one dimension.

    Attributes:
        size: The numbers.
        units: The equal units that they consist of.
        what: The name of the units, for people.
        is_shared: Whether ranks that outnumber the units share them.
    """

    size: int
    units: int
    what: str
    is_shared: bool = False

    def problem(self, count: int) -> str:
        """Return why `count` ranks cannot divide the section, in the form "3 heads, which ..."; "" if they can."""
        if self.units % count == 0 or (self.is_shared and count % self.units == 0):
            return ""
        good = [str(each) for each in range(2, self.units + 1) if self.units % each == 0][:6]
        return f"{self.units} {self.what}, which {count} ranks cannot divide: {', '.join(good) or 'no number'} could"

    def part(self, rank: int, count: int) -> tuple[int, int]:
        """Return a rank's numbers, [first, end), in whole units."""
        assert not self.problem(count), "the caller has checked the section"
        if self.units % count == 0:
            width = self.size // count
            return rank * width, (rank + 1) * width
        width, mine = self.size // self.units, rank * self.units // count
        return mine * width, (mine + 1) * width

    def sharing(self, rank: int, count: int) -> range:
        """Return the ranks with the same units as a rank, itself included."""
        if self.units % count == 0:
            return range(rank, rank + 1)
        together = count // self.units
        return range(rank // together * together, (rank // together + 1) * together)


def ranges_of(sections: tuple[Section, ...], rank: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return a rank's numbers of sections that follow each other, [first, end) each."""
    ranges, start = [], 0
    for each in sections:
        first, end = each.part(rank, count)
        ranges.append((start + first, start + end))
        start += each.size
    return tuple(ranges)
