"""How many drafts a step verifies: as many as make its time per token shortest, by what earlier steps took.

A draft adds a row to a step, and a token with the chance that it and those before it are accepted. A request has two
chances: that its first draft is accepted, and that one behind an accepted draft is. Where answers repeat a text, runs
of accepted drafts are long, and whether a run goes on is another question than whether one begins. A request learns
both from its results, and without cost from proposals that no step verified: the next token tells whether they were
right. A new request begins with the chances of its group's requests, and waits for the first such comparison. Until
steps with drafts and without were measured, a row gets one draft.

Where drafts would pay if they cost nothing, and no number of them does, the group takes no proposals for a number of
steps that doubles each time. The step after the longest wait has one draft of each row, a trial: costs are known anew,
and trials take at most 1 / TRIALS of the time. So has the step after any wait until two steps with drafts were
measured. After other waits only drafts that pay begin, since their chances were learned meanwhile without cost. Where
drafts pay, one step of 32 has none, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..cache.groups import Group
from ..cache.model_drafts import CERTAIN
from ..cache.row_costs import UNKNOWN, RowCosts
from .draft_chances import Chances, Ranked, likeliest, ranked_of

WAIT_FIRST, WAIT_MAX = 4, 1024  # steps without drafts
TRIALS = 96  # trials take at most 1 / TRIALS of the time
PLAIN_EVERY = 32  # steps, of which one has no drafts
BEGIN_MARGIN = 4  # of drafts that begin within a wait
LOOK_EVERY = 4  # results of a wait until the next look whether drafts pay now
MARGIN = 16  # drafts must gain 1 / MARGIN: chances and costs are estimates


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
    ranked = ranked_of(tuple(wanted.values()), tuple([chances[slot] for slot in wanted]), 0)
    costs, is_trial = group.row_costs, _is_trial(group, rows, wanted)
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
    ranked = ranked_of(tuple(wanted.values()), tuple([chances[slot] for slot in wanted]), first)
    if MARGIN * ranked.sums[-1] <= rows * CERTAIN:
        return False
    if not costs.is_known or not costs.has_times:
        return True
    if group.next_step < group.drafts_from:  # what was proposed meanwhile may have been right more often
        return best(costs, rows, ranked, margin=BEGIN_MARGIN) > 0
    return _is_trial(group, rows, wanted) or _best_or_wait(group, rows, wanted, ranked) > 0


def _is_trial(group: Group, rows: int, wanted: Mapping[int, int]) -> bool:
    """Return whether the longest wait is over, or any while few steps with drafts were measured.

    rows, wanted: see `choose`.
    """
    costs = group.row_costs
    return group.drafts_from > 0 and (costs.few_drafted or group.draft_wait >= _longest_wait(costs, rows, wanted))


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
