"""When a draft model proposes again after proposals that no step took."""

from __future__ import annotations

import pytest

from kvforge.worker.drafts.pacing import CHEAP_TRIAL, SHARE_FIRST, TRIAL, DraftPacing

MS = 1_000_000


@pytest.mark.parametrize("slow", range(TRIAL))
def test_one_slow_proposal_counts_as_any_other(slow: int) -> None:
    pacing = DraftPacing()
    for number in range(TRIAL):
        assert pacing.is_due(0, 1)
        pacing.proposed(0, (500 if number == slow else 2) * MS, 1, 1)
    waits = SHARE_FIRST * TRIAL * 2 * MS
    assert not pacing.is_due(waits - 1, 1)
    assert pacing.is_due(waits, 1)


def test_a_verified_proposal_begins_another_count() -> None:
    pacing = DraftPacing()
    pacing.proposed(0, 2 * MS, 1, 1)
    pacing.verified([(0, 1, 1)])
    for _ in range(TRIAL):
        assert pacing.is_due(0, 1)
        pacing.proposed(0, 5 * MS, 1, 1)
    waits = SHARE_FIRST * TRIAL * 5 * MS
    assert not pacing.is_due(waits - 1, 1)
    assert pacing.is_due(waits, 1)


@pytest.mark.parametrize(("pass_ms", "trial"), [(2, CHEAP_TRIAL), (3, TRIAL)])
def test_passes_of_a_quarter_of_a_step_are_tried_for_longer(pass_ms: int, trial: int) -> None:
    """Steps take 8 ms, but one of them 100 times as long, and one has prompt tokens."""
    pacing, now_ns, tried = DraftPacing(), 10**12, 0
    for number in range(40):
        took_ns = {3: 800, 20: 40}.get(number, 8) * MS
        now_ns += took_ns
        pacing.stepped(took_ns)
        if number > 18 and pacing.is_due(now_ns, 1):
            now_ns += 2 * pass_ms * MS
            pacing.proposed(now_ns, 2 * pass_ms * MS, 1, 2)
            tried += 1
    assert tried == trial


def test_a_new_request_is_tried_where_drafts_were_used() -> None:
    """The first proposals of a request are only compared, so that a trial is longer there."""
    pacing = DraftPacing()
    for _ in range(2):
        pacing.proposed(0, 5 * MS, 1, 1)
        pacing.verified([(0, 2, 2)])
    for number in range(CHEAP_TRIAL):
        assert pacing.is_due(0, 1), number
        pacing.proposed(0, 5 * MS, 1, 1)
    assert not pacing.is_due(0, 1)
    pacing.begin(1)
    for number in range(CHEAP_TRIAL):
        assert pacing.is_due(0, 1), number
        pacing.proposed(0, 5 * MS, 1, 1)
    pacing.begin(2)
    assert not pacing.is_due(0, 1), "nothing was used in between"


def test_a_new_request_begins_with_what_others_accepted() -> None:
    pacing = DraftPacing()
    pacing.begin(0)
    first = pacing.count(0)
    for _ in range(60):
        pacing.verified([(0, 6, 5)])
    pacing.begin(1)
    assert (first, pacing.count(0), pacing.count(1)) == (2, 2 + 6, 2 + 7)


def test_proposals_are_little_longer_than_what_steps_verify() -> None:
    """Where many requests share the rows of a step, each gets few drafts, and all of them are right."""
    pacing = DraftPacing()
    pacing.begin(0)
    for _ in range(40):
        pacing.verified([(0, 3, 3)])
    assert pacing.count(0) in (4, 5)
    pacing.begin(0)
    assert pacing.count(0) > 5, "a new request may have more"
