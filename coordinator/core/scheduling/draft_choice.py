"""How many drafts a step verifies: as many as make its time per token shortest, by what earlier steps took.

A draft adds a row to a step, and a token with the chance that it and those before it are accepted. Until steps with
drafts and without were measured, a row gets one draft.

Where no number of drafts pays, the group takes no proposals for a number of steps that doubles each time. The step
after them has one draft of each row again, so that costs and chances are known anew. Where drafts pay, one step of 32
has none, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..cache.groups import Group
from ..cache.row_costs import RowCosts

CERTAIN = 1 << 10  # the chance of a token that is accepted always
CHANCE_FIRST = CERTAIN // 2  # of a request without a result
CHANCE_KEPT, CHANCE_OF = 7, 8  # CHANCE_KEPT / CHANCE_OF: how much of a chance is kept with each result
WAIT_FIRST, WAIT_MAX = 16, 1024  # steps without drafts
PLAIN_EVERY = 32  # steps, of which one has no drafts
MARGIN = 16  # drafts must gain 1 / MARGIN: chances and costs are estimates


def learned(chance: int, drafted: int, accepted: int) -> int:
    """Return the chance that a request's next draft is accepted, if the one before it is.

    Args:
        chance: What it was.
        drafted: How many drafts were verified.
        accepted: How many of these became tokens.
    """
    tried = accepted + (accepted < drafted)
    return (CHANCE_KEPT * chance + (CHANCE_OF - CHANCE_KEPT) * CERTAIN * accepted // tried) // CHANCE_OF


def chances_of(chance: int, drafts: int) -> list[int]:
    """Return the chance of each of a request's drafts to become a token."""
    found, each = [], CERTAIN
    for _ in range(drafts):
        each = each * chance // CERTAIN
        found.append(each)
    return found


def best(costs: RowCosts, rows: int, chances: Sequence[int]) -> int:
    """Return how many drafts make the time per token shortest; 0 if none does better than a step without.

    Args:
        costs: The costs of steps.
        rows: Rows of the step.
        chances: The chance of each draft, the highest first.
    """
    tokens = rows * CERTAIN
    count, most, least = 0, tokens + tokens // MARGIN, costs.of(rows)
    for number, chance in enumerate(chances, 1):
        tokens += chance
        took = costs.of(rows, number)
        if tokens * least > most * took:
            count, most, least = number, tokens, took
    return count


def choose(group: Group, rows: int, wanted: Mapping[int, int], chances: Mapping[int, int]) -> dict[int, int]:
    """Return how many drafts of each slot a step verifies, and decide when the group takes proposals again.

    Args:
        group: The group.
        rows: Rows of the step.
        wanted: How many drafts of each slot it has room for.
        chances: The chance of each slot's next draft.
    """
    each = [(chance, slot) for slot, most in wanted.items() for chance in chances_of(chances[slot], most)]
    each.sort(key=lambda draft: -draft[0])
    costs, is_trial = group.row_costs, group.drafts_from > 0
    group.drafts_from = 0
    if not costs.has_times:
        count = len(each)
    elif is_trial:
        count = len(wanted)
    elif group.next_step % PLAIN_EVERY == 0:
        count = 0
    elif not costs.is_known:
        count = len(wanted)
    else:
        count = best(costs, rows, [chance for chance, _ in each])
        group.draft_wait = 0 if count else min(2 * group.draft_wait or WAIT_FIRST, WAIT_MAX)
        group.drafts_from = 0 if count else group.next_step + group.draft_wait
    found: dict[int, int] = {}
    for _, slot in each[:count]:
        found[slot] = found.get(slot, 0) + 1
    return found
