"""Which rows a draft model continues, and how many tokens it drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvforge.protocol.messages import Int32Array
from kvforge.worker.drafts.drafter import Proposals, RowEnd
from kvforge.worker.drafts.lookup import LookupDrafter
from kvforge.worker.drafts.model import DraftRow, ModelDrafter

MOST, TABLE, PASSES_NS = 6, np.zeros(4, np.int32), 12_000


class Counting:
    """A draft model that counts up from a row's last token."""

    block_bytes = 7
    device_bytes, name, rows_max, tokens_max, context_tokens_max = 100, "counting", 3, 8, 40

    def __init__(self) -> None:
        self.asked: list[list[DraftRow]] = []
        self.broken, self.took_ns = False, PASSES_NS
        self.behind: set[int] = set()  # slots with too much to catch up

    def continue_rows(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        self.asked.append([*rows])
        counts = [0 if row.slot in self.behind else row.count for row in rows]
        found = [[row.token + 1 + place for place in range(count)] for row, count in zip(rows, counts, strict=True)]
        return [] if self.broken else found


def i4(*tokens: int) -> Int32Array:
    return np.array(tokens, np.int32)


def end(token: int = 100, position: int = 9) -> RowEnd:
    return RowEnd(token, position, TABLE)


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


ASKED = 3


def test_a_long_run_is_looked_up_and_the_model_continues_other_rows(drafter: ModelDrafter, model: Counting) -> None:
    found = by_slot(drafter.propose([0, 1, 2], {slot: end(100 * slot) for slot in range(3)}, ASKED))
    assert found[1][:2] == [4, 5]
    assert found[0] == [1 + place for place in range(ASKED)]
    assert found[2] == [201 + place for place in range(ASKED)]
    ((first, second),) = model.asked
    assert (first.token, first.position, second.token) == (0, 9, 200)


def test_rows_that_the_model_leaves_are_looked_up_by_shorter_runs(drafter: ModelDrafter, model: Counting) -> None:
    found = by_slot(drafter.propose([0, 1, 2], asked=ASKED))  # no row has an end: all failed
    assert found.keys() == {1, 2}
    assert found[2][:1] == [4]
    assert not model.asked
    model.broken = True
    assert by_slot(drafter.propose([0, 2], {0: end(), 2: end()}, ASKED)).keys() == {2}
    model.broken, model.behind = False, {2}
    found = by_slot(drafter.propose([0, 2], {0: end(), 2: end()}, ASKED))
    assert (found[0][0], found[2][0]) == (101, 4)


def test_lookup_is_used_while_it_is_right(drafter: ModelDrafter, model: Counting) -> None:
    """Behind 1, 2, 3 it names 4. One wrong token of a new request is enough to leave it, a right one to return."""
    assert by_slot(drafter.propose([1], {1: end()}, ASKED))[1][0] == 4
    assert not model.asked
    for token, is_used in ((9, False), (4, False), (4, True), (9, False), (9, True)):
        drafter.append(1, [token, 1, 2, 3])  # the run again
        assert drafter.lookup.found([1])[1][0] == token, "the latest occurrence"
        asked = len(model.asked)
        drafter.propose([1], {1: end()}, ASKED)
        assert (len(model.asked) == asked) is is_used, token


def test_more_rows_than_the_model_takes_get_none_of_its_tokens(drafter: ModelDrafter, model: Counting) -> None:
    ends = {slot: end() for slot in (0, 3, 4, 5)}
    assert by_slot(drafter.propose([*ends], ends, ASKED)) == {}
    assert not model.asked
    del ends[5]
    assert by_slot(drafter.propose([*ends], ends, ASKED)).keys() == {0, 3, 4}


@pytest.mark.parametrize(
    ("most", "position", "asked", "count"),
    [
        (MOST, 9, 3, 3),
        (MOST, 9, 20, MOST),
        (2, 9, 3, 2),
        (0, 9, 3, 0),
        (MOST, 38, 3, 2),
        (MOST, 40, 3, 0),
        (MOST, 50, 3, 0),
    ],
)
def test_drafts_end_with_what_a_row_may_have_and_with_the_models_context(
    most: int, position: int, asked: int, count: int, drafter: ModelDrafter
) -> None:
    drafter.begin(0, i4(7), i4(), most)
    found = by_slot(drafter.propose([0], {0: end(position=position)}, asked))
    assert len(found.get(0, [])) == count


def test_the_models_rows_come_first_with_what_they_took(drafter: ModelDrafter, model: Counting) -> None:
    found = drafter.propose([0, 1, 2], {slot: end(100 * slot) for slot in range(3)}, ASKED)
    assert found.slots.tolist() == [0, 2, 1]
    assert (found.model_rows, found.took_us) == (2, PASSES_NS // 1000)
    assert drafter.propose([1], {1: end()}, ASKED).model_rows == 0, "looked up"


def test_without_a_question_the_model_proposes_nothing(drafter: ModelDrafter, model: Counting) -> None:
    found = drafter.propose([0, 1, 2], {slot: end(100 * slot) for slot in range(3)})
    assert set(by_slot(found)) == {1, 2}
    assert (found.model_rows, found.took_us, model.asked) == (0, 0, [])


def test_the_costs_name_the_model_and_its_passes(drafter: ModelDrafter) -> None:
    costs = drafter.costs
    assert (costs.device_bytes, costs.block_bytes, costs.passes) == (100, 7, 8)
    assert "counting" in costs.note
    assert costs.host_bytes_max == drafter.lookup.costs.host_bytes_max


def test_a_forgotten_slot_gets_nothing(drafter: ModelDrafter, model: Counting) -> None:
    drafter.append(1, [4])
    assert drafter.remembered(1)[-1] == 4
    drafter.forget()
    assert by_slot(drafter.propose([0, 1], {0: end(), 1: end()}, ASKED)) == {}
    assert not model.asked
