"""When a draft model proposes again after proposals that no step took."""

from __future__ import annotations

import pytest

from kvforge.worker.drafts.pacing import SHARE_FIRST, TRIAL, DraftPacing

MS = 1_000_000


@pytest.mark.parametrize("slow", range(TRIAL))
def test_one_slow_proposal_counts_as_any_other(slow: int) -> None:
    pacing = DraftPacing()
    for number in range(TRIAL):
        assert pacing.is_due(0, 1)
        pacing.proposed(0, (500 if number == slow else 2) * MS, 1)
    waits = SHARE_FIRST * TRIAL * 2 * MS
    assert not pacing.is_due(waits - 1, 1)
    assert pacing.is_due(waits, 1)


def test_a_verified_proposal_begins_another_count() -> None:
    pacing = DraftPacing()
    pacing.proposed(0, 2 * MS, 1)
    pacing.verified([(0, 1, 1)])
    for _ in range(TRIAL):
        assert pacing.is_due(0, 1)
        pacing.proposed(0, 5 * MS, 1)
    waits = SHARE_FIRST * TRIAL * 5 * MS
    assert not pacing.is_due(waits - 1, 1)
    assert pacing.is_due(waits, 1)
