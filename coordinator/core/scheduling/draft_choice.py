"""How many drafts a step verifies: as many as make its time per token shortest, by what earlier steps took.

A draft adds a row to a step, and a token with the chance that it and those before it are accepted. A request has two
chances: that its first draft is accepted, and that one behind an accepted draft is. Where answers repeat a text, runs
of accepted drafts are long, and whether a run goes on is another question than whether one begins. A request learns
both from its results, and without cost from proposals that no step verified: the next token tells whether they were
right. A new request begins with the chances of its group's requests, and waits for the first such comparison. Until
steps with drafts and without were measured, a row gets one draft.

Where drafts would pay if they cost nothing, and no number of them does, the group takes no proposals for a number of
steps that doubles each time, as long as such trials take more than 1 / TRIALS of the time. The step after them has one
draft of each row, so that costs are known anew. Where drafts pay, one step of 32 has none, for the same reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import itemgetter, neg
from typing import NamedTuple

from ..cache.groups import Group
from ..cache.model_drafts import CERTAIN
from ..cache.row_costs import UNKNOWN, RowCosts

GROUP_OF = 32  # the averaging window of a group's chances, in results
CHANCE_KEPT, CHANCE_OF = 7, 8  # CHANCE_KEPT / CHANCE_OF: how much of a chance is kept with each result
WAIT_FIRST, WAIT_MAX = 4, 1024  # steps without drafts
TRIALS = 96  # trials that find nothing take at most 1 / TRIALS of the time
PLAIN_EVERY = 32  # steps, of which one has no drafts
BEGIN_MARGIN = 4  # of drafts that begin within a wait
LOOK_EVERY = 4  # results of a wait until the next look whether drafts pay now
RANKED_KEPT = 8  # the last sets of drafts that were ranked
MARGIN = 16  # drafts must gain 1 / MARGIN: chances and costs are estimates


class Chances(NamedTuple):
    """The chances of a request's drafts, in 1 / CERTAIN.

    Attributes:
        first: That the first draft of a step is accepted.
        later: That a draft behind an accepted one is.
    """

    first: int
    later: int

    def learned(self, drafted: int, accepted: int) -> Chances:
        """Return the chances after a result.

        Args:
            drafted: How many drafts were verified, at least 1.
            accepted: How many of these became tokens.
        """
        first = _kept(self.first, min(accepted, 1), 1)
        if drafted == 1 or not accepted:
            return Chances(first, self.later)
        return Chances(first, _kept(self.later, accepted - 1, min(accepted, drafted - 1)))

    def observed(self, place: int, is_right: bool) -> Chances:
        """Return the chances after a proposed token that no step verified; the proposed ones before it were right.

        Args:
            place: Its place in the proposal.
            is_right: Whether it became a token.
        """
        if place:
            return Chances(self.first, _kept(self.later, is_right, 1))
        return Chances(_kept(self.first, is_right, 1), self.later)

    def doubted(self) -> Chances:
        """Return what a new request begins with if these are its group's chances: its first draft is a toss at most."""
        return Chances(min(self.first, CERTAIN // 2), self.later)

    def of(self, drafts: int) -> list[int]:
        """Return the chance of each of so many drafts to become a token."""
        each, later = self.first, self.later
        return [each, *[each := each * later // CERTAIN for _ in range(drafts - 1)]] if drafts > 0 else []


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


@lru_cache(RANKED_KEPT)
def _ranked(wanted: tuple[int, ...], chances: tuple[Chances, ...], left_out: int) -> Ranked:
    """Rank the drafts of rows that want so many each, without the first `left_out` of each.

    Drafts are ranked when proposals come, and when their step is planned, mostly with nothing changed in between.
    """
    return rank([each.of(most)[left_out:] for each, most in zip(chances, wanted, strict=True)])


def _kept(chance: int, good: int, tried: int) -> int:
    return (CHANCE_KEPT * chance + (CHANCE_OF - CHANCE_KEPT) * CERTAIN * good // tried) // CHANCE_OF


def best(costs: RowCosts, rows: int, ranked: Ranked, *, waited: bool = False, margin: int = MARGIN) -> int:
    """Return how many drafts make the time per token shortest; 0 if none does better than a step without.

    Each draft adds as much time as the one before it, and no more tokens. So those that shorten the time per token come
    first, and bisection finds the last one among hundreds.

    Args:
        costs: The costs of steps.
        rows: Rows of the step.
        ranked: The drafts.
        waited: The step waits for a result in any case.
        margin: They must gain 1 / margin.
    """
    plain, row, each, sums = rows * CERTAIN, costs.line.token, ranked.each, ranked.sums
    base = costs.of(rows, 1) - row
    count, end = min(1, len(each)), len(each)
    while count < end:
        before = (count + end - 1) // 2
        if each[before] * (base + row * before) > (plain + sums[before]) * row:
            count = before + 1
        else:
            end = before
    least = base if waited else costs.of(rows)
    return count if (plain + sums[count]) * least > (plain + plain // margin) * (base + row * count) else 0


def choose(
    group: Group, rows: int, wanted: Mapping[int, int], chances: Mapping[int, Chances], *, asked: bool = False
) -> dict[int, int]:
    """Return how many drafts of each slot a step verifies, and decide when the group takes proposals again.

    Args:
        group: The group.
        rows: Rows of the step.
        wanted: How many drafts of each slot it has room for.
        chances: The chances of each slot's drafts.
        asked: Some of the proposals were asked of a draft model.
    """
    ranked = _ranked(tuple(wanted.values()), tuple([chances[slot] for slot in wanted]), 0)
    costs, is_trial = group.row_costs, group.drafts_from > 0
    if not asked:
        group.drafts_from = 0  # of lookup
    if not costs.has_times or (asked and group.model_drafts.trying):
        count = len(ranked.each)
    elif asked:
        count = best(costs, rows, ranked, waited=True)
    elif costs.plain_way == UNKNOWN:
        count = 0  # this step and one that overlaps it tell what a step without drafts takes
    elif is_trial:
        count = len(wanted)
    elif group.next_step % PLAIN_EVERY == 0:
        count = 0
    elif not costs.is_known:
        count = len(wanted)
    else:
        count = _best_or_wait(group, rows, wanted, ranked)
    return likeliest(wanted, ranked, count)


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
        equal = count - bisect_left(ranked.each, -least, key=neg)
        for slot, run in zip(slots, ranked.runs, strict=True):
            number = bisect_left(run, -least, key=neg)
            while equal and number < len(run) and run[number] == least:
                number, equal = number + 1, equal - 1
            if number:
                numbers.append((-run[0], slot, number))
    numbers.sort(key=itemgetter(0))
    return {slot: number for _, slot, number in numbers}


def pays(
    group: Group, rows: int, wanted: Mapping[int, int], chances: Mapping[int, Chances], *, goes_on: bool = False
) -> bool:
    """Return whether the next step is to wait for the results before it, and verify proposals.

    Waiting costs the overlap of two steps, even if the step then verifies none. While another step is in flight, its
    token takes the place of the first draft: what then follows is of use only if that draft is right. Where proposals
    come with each result, that is lost once, and what the steps behind gain decides.

    Args:
        group: The group.
        rows: Rows of the step.
        wanted: How many drafts of each slot it has room for.
        chances: The chances of each slot's drafts.
        goes_on: Whether most of the slots had proposals with earlier results too, which have been right.
    """
    costs, first = group.row_costs, int(bool(group.sent) and not goes_on)
    ranked = _ranked(tuple(wanted.values()), tuple([chances[slot] for slot in wanted]), first)
    if MARGIN * ranked.sums[-1] <= rows * CERTAIN:
        return False
    if not costs.is_known or not costs.has_times:
        return True
    if group.next_step < group.drafts_from:  # what was proposed meanwhile may have been right more often
        return best(costs, rows, ranked, margin=BEGIN_MARGIN) > 0
    return group.drafts_from > 0 or _best_or_wait(group, rows, wanted, ranked) > 0


def _best_or_wait(group: Group, rows: int, wanted: Mapping[int, int], ranked: Ranked) -> int:
    """Return how many drafts pay; if none does, decide when the group takes proposals again."""
    costs = group.row_costs
    count = best(costs, rows, ranked)
    group.draft_wait = 0 if count else min(2 * group.draft_wait or WAIT_FIRST, _longest_wait(costs, rows, wanted))
    group.drafts_from = 0 if count else group.next_step + group.draft_wait
    return count


def put_off(group: Group) -> None:
    """Note that the group waited for a result and kept no proposals: a trial that measured nothing."""
    if group.drafts_from:
        group.draft_wait = min(2 * group.draft_wait or WAIT_FIRST, WAIT_MAX)
        group.drafts_from = group.next_step + group.draft_wait


def _longest_wait(costs: RowCosts, rows: int, wanted: Mapping[int, int]) -> int:
    """Return for how many steps to wait at most until one draft of each row is tried again."""
    without = costs.of(rows)
    more = max(0, costs.of(rows, len(wanted)) - without)
    return min(max(WAIT_FIRST, TRIALS * more // without), WAIT_MAX)
