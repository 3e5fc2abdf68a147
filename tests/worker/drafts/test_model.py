"""Which rows a draft model continues, how many tokens it drafts, and when it proposes none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvforge.protocol.messages import Int32Array
from kvforge.worker.drafts.drafter import Proposals, RowEnd
from kvforge.worker.drafts.lookup import LookupDrafter
from kvforge.worker.drafts.model import DraftRow, ModelDrafter
from kvforge.worker.drafts.pacing import ACCEPTED_FIRST, SHARE_FIRST, SHARE_MAX, TRIAL, DraftPacing

MOST, TABLE, PASSES_NS = 6, np.zeros(4, np.int32), 10


class Counting:
    """A draft model that counts up from a row's last token."""

    block_bytes = 7
    device_bytes, name, rows_max, tokens_max, context_tokens_max = 100, "counting", 3, 8, 40

    def __init__(self) -> None:
        self.asked: list[list[DraftRow]] = []
        self.broken, self.took_ns, self.step_ns = False, PASSES_NS, 0
        self.behind: set[int] = set()  # slots with too much to catch up

    def continue_rows(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        self.asked.append([*rows])
        counts = [0 if row.slot in self.behind else row.count for row in rows]
        found = [[row.token + 1 + place for place in range(count)] for row, count in zip(rows, counts, strict=True)]
        return [] if self.broken else found


def i4(*tokens: int) -> Int32Array:
    return np.array(tokens, np.int32)


def end(token: int = 100, position: int = 9, drafted: int = 0, accepted: int = 0) -> RowEnd:
    return RowEnd(token, position, TABLE, drafted, accepted)


def by_slot(found: Proposals) -> dict[int, list[int]]:
    parts = np.split(found.tokens, np.cumsum(found.counts)[:-1]) if len(found.slots) else []
    return {slot: part.tolist() for slot, part in zip(found.slots.tolist(), parts, strict=True)}


@pytest.fixture
def model() -> Counting:
    return Counting()


@pytest.fixture
def drafter(model: Counting) -> ModelDrafter:
    """Slots 0 to 5: the prompt of slot 1 repeats three tokens, that of slot 2 two."""
    drafter = ModelDrafter(LookupDrafter(8), model)
    prompts = {1: i4(1, 2, 3, 4, 5, 1, 2, 3), 2: i4(1, 2, 3, 4, 9, 2, 3)}
    for slot in range(6):
        drafter.begin(slot, prompts.get(slot, i4(slot)), i4(), MOST)
    return drafter


FIRST = min(MOST, 2 + int(1.5 * ACCEPTED_FIRST))


def test_a_long_run_is_looked_up_and_the_model_continues_other_rows(drafter: ModelDrafter, model: Counting) -> None:
    found = by_slot(drafter.propose([0, 1, 2], {slot: end(100 * slot) for slot in range(3)}))
    assert found[1][:2] == [4, 5]
    assert found[0] == [1 + place for place in range(FIRST)]
    assert found[2] == [201 + place for place in range(FIRST)]
    ((first, second),) = model.asked
    assert (first.token, first.position, second.token) == (0, 9, 200)


def test_rows_that_the_model_leaves_are_looked_up_by_shorter_runs(drafter: ModelDrafter, model: Counting) -> None:
    found = by_slot(drafter.propose([0, 1, 2]))  # no row has an end: another is in flight
    assert found.keys() == {1, 2}
    assert found[2][:1] == [4]
    assert not model.asked
    model.broken = True
    assert by_slot(drafter.propose([0, 2], {0: end(), 2: end()})).keys() == {2}
    model.broken, model.behind = False, {2}
    found = by_slot(drafter.propose([0, 2], {0: end(), 2: end()}))
    assert (found[0][0], found[2][0]) == (101, 4)


def test_lookup_is_used_while_it_is_right(drafter: ModelDrafter, model: Counting) -> None:
    """Behind 1, 2, 3 it names 4. One wrong token of a new request is enough to leave it, a right one to return."""
    assert by_slot(drafter.propose([1], {1: end()}))[1][0] == 4
    assert not model.asked
    for token, is_used in ((9, False), (4, False), (4, True), (9, False), (9, True)):
        drafter.append(1, [token, 1, 2, 3])  # the run again
        assert drafter.lookup.found([1])[1][0] == token, "the latest occurrence"
        asked = len(model.asked)
        drafter.propose([1], {1: end()})
        assert (len(model.asked) == asked) is is_used, token
        drafter.pacing.verified([(1, 2, 2)])  # the model stays due


def test_more_rows_than_the_model_takes_get_none_of_its_tokens(drafter: ModelDrafter, model: Counting) -> None:
    ends = {slot: end() for slot in (0, 3, 4, 5)}
    assert by_slot(drafter.propose([*ends], ends)) == {}
    assert not model.asked
    del ends[5]
    assert by_slot(drafter.propose([*ends], ends)).keys() == {0, 3, 4}


@pytest.mark.parametrize(
    ("most", "position", "count"), [(MOST, 9, FIRST), (2, 9, 2), (0, 9, 0), (MOST, 38, 2), (MOST, 40, 0), (MOST, 50, 0)]
)
def test_drafts_end_with_what_a_row_may_have_and_with_the_models_context(
    most: int, position: int, count: int, drafter: ModelDrafter
) -> None:
    drafter.begin(0, i4(7), i4(), most)
    found = by_slot(drafter.propose([0], {0: end(position=position)}))
    assert len(found.get(0, [])) == count


def test_a_row_gets_about_as_many_drafts_as_it_accepts(drafter: ModelDrafter) -> None:
    def count(accepted: int | None, steps: int) -> int:
        for _ in range(steps):
            drafted = len(by_slot(drafter.propose([0], {0: end()}))[0])
            accepts = drafted if accepted is None else accepted
            drafter.propose([0], {0: end(drafted=drafted, accepted=accepts)})
        return len(by_slot(drafter.propose([0], {0: end(drafted=1, accepted=accepted or 1)}))[0])

    assert count(0, 12) == 2
    assert count(None, 12) == MOST
    drafter.begin(0, i4(7), i4(), MOST)
    found = len(by_slot(drafter.propose([0], {0: end()}))[0])
    assert found > FIRST, "another request begins with the average"


def tried(pacing: DraftPacing, now_ns: int, until_ns: int, rows: int = 3) -> list[int]:
    """Return when proposals are made that no step verifies, each with passes of 10 ns. A result comes each ns."""
    at = []
    while now_ns < until_ns:
        if pacing.is_due(now_ns, rows):
            at.append(now_ns)
            now_ns += PASSES_NS
            pacing.proposed(now_ns, PASSES_NS, rows, 1)
        now_ns += 1
    return at


def test_unused_proposals_become_rare_and_used_ones_bring_them_back() -> None:
    pacing, trial_ns = DraftPacing(), TRIAL * PASSES_NS
    assert tried(pacing, 0, 100 * trial_ns) == [
        0,
        11,
        22,
        *(32 + SHARE_FIRST * trial_ns + each for each in (0, 11, 22)),
    ]
    assert tried(pacing, 100 * trial_ns, 190 * trial_ns) == [], "twice as long as before"
    pacing.verified([(0, 2, 1)])
    assert len(tried(pacing, 200 * trial_ns, 300 * trial_ns)) == TRIAL, (
        "one alone may have been the coordinator's trial"
    )
    for _ in range(2):
        pacing.verified([(0, 2, 1)])
    now_ns = 400 * trial_ns
    assert len(tried(pacing, now_ns, now_ns + (SHARE_FIRST + 4) * trial_ns)) == TRIAL + 3 == 2 * TRIAL
    seen = tried(pacing, 10**6, 2 * 10**6)
    assert seen[-1] - seen[-TRIAL - 1] == pytest.approx(SHARE_MAX * trial_ns, rel=0.01)
    assert len(seen) * PASSES_NS < 10**6 / 500


def test_half_of_the_rows_are_tried_at_once() -> None:
    pacing = DraftPacing()
    assert len(tried(pacing, 0, 100, rows=9)) == TRIAL
    assert not pacing.is_due(100, 5)
    assert pacing.is_due(100, 4)


def test_drafts_of_lookup_teach_nothing_about_the_model(drafter: ModelDrafter) -> None:
    """What a step verified counts for the model if the model proposed it."""
    before = drafter.pacing.count(1)
    drafter.propose([1], {1: end()})
    for _ in range(9):
        drafter.propose([1], {1: end(drafted=6, accepted=6)})
    assert drafter.pacing.count(1) == before


def test_the_costs_name_the_model_and_its_passes(drafter: ModelDrafter) -> None:
    costs = drafter.costs
    assert (costs.device_bytes, costs.block_bytes, costs.passes) == (100, 7, 8)
    assert "counting" in costs.note
    assert costs.host_bytes_max == drafter.lookup.costs.host_bytes_max


def test_a_forgotten_slot_gets_nothing(drafter: ModelDrafter, model: Counting) -> None:
    drafter.append(1, [4])
    assert drafter.remembered(1)[-1] == 4
    drafter.forget()
    assert by_slot(drafter.propose([0, 1], {0: end(), 1: end()})) == {}
    assert not model.asked
