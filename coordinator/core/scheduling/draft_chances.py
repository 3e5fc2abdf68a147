"""The chances of drafts: how requests learn them, and which drafts of a step are the likeliest.

Chances are pairs of numbers, in 1 / CERTAIN: that the first draft of a step is accepted, and that a draft behind an
accepted one is. Each result of a step with drafts makes some for each row while the device waits, and a plain pair
takes a hundredth of the time of an object.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from ..cache.model_drafts import CERTAIN
from ..limits import DRAFTS_MOST

GROUP_OF = 32  # the averaging window of a group's chances, in results
CHANCE_KEPT, CHANCE_OF = 7, 8  # CHANCE_KEPT / CHANCE_OF: how much of a chance is kept with each token
# How much is kept after so many tokens, in 1 / CERTAIN.
KEPT = [round(CERTAIN * (CHANCE_KEPT / CHANCE_OF) ** tokens) for tokens in range(DRAFTS_MOST + 1)]

Chances = tuple[int, int]


def learned(chances: Chances, drafted: int, accepted: int) -> Chances:
    """Return the chances after a result, with one step for each draft that was verified behind accepted ones.

    Args:
        chances: Those before it.
        drafted: How many drafts were verified, at least 1.
        accepted: How many of these became tokens.
    """
    first, later = chances
    first = _kept(first, accepted > 0)
    if accepted:
        later = CERTAIN - (CERTAIN - later) * KEPT[accepted - 1] // CERTAIN
        if accepted < drafted:
            later = _kept(later, False)
    return first, later


def observed(chances: Chances, place: int, is_right: bool) -> Chances:
    """Return the chances after a proposed token that no step verified; the proposed ones before it were right.

    Args:
        chances: Those before it.
        place: Its place in the proposal.
        is_right: Whether it became a token.
    """
    first, later = chances
    return (first, _kept(later, is_right)) if place else (_kept(first, is_right), later)


def doubted(chances: Chances) -> Chances:
    """Return what a new request begins with if these are its group's chances: its first draft is a toss at most."""
    return min(chances[0], CERTAIN // 2), chances[1]


def run_of(chances: Chances, drafts: int) -> list[int]:
    """Return the chance of each of so many drafts to become a token."""
    each, later = chances
    return [each, *[each := each * later // CERTAIN for _ in range(drafts - 1)]] if drafts > 0 else []


def _kept(chance: int, is_right: bool) -> int:
    return (CHANCE_KEPT * chance + (CHANCE_OF - CHANCE_KEPT) * CERTAIN * is_right) // CHANCE_OF


class Ranked(NamedTuple):
    """The drafts that a step may verify.

    Attributes:
        runs: The chances of each row's drafts.
        each: All of these, the highest first.
        sums: The sums of the first 0, 1, 2, ... of `each`.
    """

    runs: Sequence[Sequence[int]]
    each: Sequence[int]
    sums: Sequence[int]


def rank(runs: Sequence[Sequence[int]]) -> Ranked:
    """Rank the drafts of rows by the chances of each row's drafts."""
    each = sorted(chain.from_iterable(runs), reverse=True)
    return Ranked(runs, each, list(accumulate(each, initial=0)))


def ranked_of(wanted: tuple[int, ...], chances: tuple[Chances, ...], left_out: int) -> Ranked:
    """Rank the drafts of rows that want so many each, without the first `left_out` of each.

    Drafts are ranked when proposals come, and when their step is planned, mostly with nothing changed in between. So
    the last ranking is kept.
    """
    key = wanted, chances, left_out
    if (found := _LAST.get(key)) is None:
        _LAST.clear()
        found = _LAST[key] = rank([run_of(each, most)[left_out:] for each, most in zip(chances, wanted, strict=True)])
    return found


_LAST: dict[tuple[tuple[int, ...], tuple[Chances, ...], int], Ranked] = {}


def likeliest(slots: Iterable[int], ranked: Ranked, count: int) -> dict[int, int]:
    """Return how many of the `count` likeliest drafts each slot has; of equal ones, those of the first slots count.

    Args:
        slots: The slots of the rows.
        ranked: Their drafts.
        count: How many drafts to choose.

    Returns:
        By slot, the one with the likeliest draft first.
    """
    if not count:
        return {}
    if count == len(ranked.each):
        numbers = [(-run[0], slot, len(run)) for slot, run in zip(slots, ranked.runs, strict=True) if run]
    else:
        least, numbers = ranked.each[count - 1], list[tuple[int, int, int]]()
        equal = count - bisect_left(ranked.each, -least, key=_negative)
        for slot, run in zip(slots, ranked.runs, strict=True):
            number = bisect_left(run, -least, key=_negative)
            while equal and number < len(run) and run[number] == least:
                number, equal = number + 1, equal - 1
            if number:
                numbers.append((-run[0], slot, number))
    numbers.sort(key=lambda each: each[0])
    return {slot: number for _, slot, number in numbers}


def _negative(chance: int) -> int:
    return -chance
