"""How many tokens a draft model proposes with a step: as many as make the time per token shortest.

Its passes come behind the step, and the next step waits for its result. A step with `k` drafts of each row therefore
takes what its rows take, the way of a result, and `k` passes. All three are measured, and so are the chances of its
tokens (`cache.model_drafts`). No step follows one that asks until the result is there, so that nothing overlaps, and
the proposals are of use at once.

A new worker's model is tried with some steps, whatever it seems to be worth. Where it does not pay, because its tokens
are wrong too often or too many rows run, the number of rows is looked at anew with each plan, and chances and times by
a trial now and then, which take at most 1 / TRIALS of the time, and less with each one that finds nothing. Where the
estimate says that drafts pay and the measured steps with so many rows say that they do not (`cache.draft_gains`), there
are none for a while.
"""

from __future__ import annotations

from ..cache.costs import DURATION_US_MAX, UNIT
from ..cache.draft_gains import size_of
from ..cache.groups import Group
from ..cache.model_drafts import CERTAIN, UNKNOWN
from .draft_chances import Chances, run_of
from .draft_choice import MARGIN, TRIALS

DECIDE_EVERY = 8  # steps that repeat the one before without a look at drafts
TRIAL_FIRST, TRIAL = 8, 2  # steps of a new worker's trial, and of a later one
TRIAL_ROWS = 20  # verified rows with which the first one is over, once TRIAL_LEAST of its steps have been sent
TRIAL_LEAST = 5
TRIAL_TOKENS = 4  # that these ask for
BEGIN_MARGIN = 8  # drafts begin if they gain 1 / BEGIN_MARGIN: a beginning and an end overlap nothing
BEGIN_WAYS = 3  # ways of results that nothing overlaps then: behind the step before, the verification, and the end
PLAIN, PLAIN_EVERY = 2, 128  # steps in a row that ask for nothing, of how many; the first one may have drafts
WAIT_LEAST, WAIT_MOST = 32, 8192  # steps between two trials
WAITS_MOST = 4  # trials in a row behind which the wait no longer doubles


def ask(group: Group, rows: int, most: int, chances: Chances, verifies: bool, left: int) -> int:
    """Return how many tokens to propose for each row; 0: none.

    Args:
        group: The group, with a draft model.
        rows: Rows of the step, none with prompt tokens.
        most: The most tokens of a row for which there is room.
        chances: The mean chances of the rows.
        verifies: Whether the step verifies drafts, so that drafting goes on and does not begin.
        left: Tokens that the rows have left at most, in the mean.
    """
    model, costs, step = group.model_drafts, group.row_costs, group.next_step
    if not costs.has_times:
        return most
    gains = model.gains
    if not gains.knows(rows) or _is_plain(step):
        return 0  # these steps and one that overlaps them show what steps without drafts cost
    if step < gains.until[size_of(rows)]:
        return 0
    if not model.trial:
        count = _best(group, rows, most, chances, 0 if verifies else max(1, left))
        if count and gains.loses(rows):
            gains.put_off(rows, step, TRIALS, WAIT_MOST)
            return 0
        if count:
            model.trying, model.waits = False, 0
            return count
        if step < model.next_trial:
            return 0
        model.trial = TRIAL if model.next_trial else TRIAL_FIRST
    model.trial, model.trying = model.trial - 1, True
    if model.first_tried >= TRIAL_ROWS and model.trial <= TRIAL_FIRST - TRIAL_LEAST:
        model.trial = 0
    if not model.trial:
        put_off(group, rows)
    return min(most, TRIAL_TOKENS)


def repeats_max(group: Group) -> int:
    """Return how many steps may repeat the last one before there is another look at drafts."""
    return 0 if _is_plain(group.last_step) else DECIDE_EVERY


def _is_plain(step: int) -> bool:
    return (step + 1) % PLAIN_EVERY < PLAIN


def put_off(group: Group, rows: int) -> None:
    """Decide when the next trial comes, if the model does not pay until then."""
    model, costs = group.model_drafts, group.row_costs
    with_drafts = costs.of(rows, rows) + TRIAL_TOKENS * max(0, model.pass_time)
    more = TRIAL * max(0, with_drafts - costs.of(rows))
    wait = TRIALS * more // costs.of(rows) << model.waits
    model.trial, model.waits = 0, min(model.waits + 1, WAITS_MOST)
    model.next_trial = group.next_step + min(max(WAIT_LEAST, wait), WAIT_MOST)


def tried(group: Group, rows: int, passes: int, draft_us: int) -> None:
    """Note what the passes of a step of a trial took: with tokens that lacked K and V, more than others.

    The next trial comes later for what they took longer.
    """
    model, plain_us = group.model_drafts, group.model_drafts.gains.plain_us[size_of(rows)]
    model.trial_us += max(0, min(draft_us, DURATION_US_MAX) - passes * model.pass_time // UNIT)
    if not model.trial and plain_us > 0:
        wait = TRIALS * model.trial_us // plain_us << max(0, model.waits - 1)
        model.next_trial, model.trial_us = model.next_trial + min(wait, WAIT_MOST), 0


def _best(group: Group, rows: int, most: int, chances: Chances, begins: int) -> int:
    """Return how many tokens make the time per token shortest.

    begins: of drafts that begin, the tokens that are left; 0: they go on.

    0: none gains a part of the time of steps that overlap, or too little of it until the rows end.
    """
    model, costs = group.model_drafts, group.row_costs
    if not costs.is_known or model.pass_time == UNKNOWN:
        return 0
    count, tokens, took = 0, CERTAIN, costs.of(rows, rows) - rows * costs.line.token
    plain = least = UNIT * model.gains.plain_us[size_of(rows)]
    way = max(0, took - plain)
    best = CERTAIN + CERTAIN // (BEGIN_MARGIN if begins else MARGIN)
    for number, chance in enumerate(run_of(chances, most), 1):
        tokens += chance
        took += rows * costs.line.token + model.pass_time
        if tokens * least > best * took:
            count, best, least = number, tokens, took
    if count and begins and begins * (plain - CERTAIN * least // best) < BEGIN_WAYS * way:
        return 0
    return count
