"""Scores of given tokens against a plain float64 reference: ties, infinities, rows alone and beside others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvforge.worker.sampling.scoring import COLUMNS, FINITE_COLUMN, LOGITS_MAX, score, tokens_at_a_time

VOCAB = 37


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    """Return logits of few different values, so that most tokens have equals: [rows, VOCAB] float32."""
    return torch.randint(-3, 4, (rows, VOCAB), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("width", [0, 1, 5, VOCAB])
def test_a_rank_is_the_place_in_the_order_of_the_top_tokens(width: int) -> None:
    """Higher logits come first, and of equal ones the lowest id."""
    logits = logits_of(VOCAB)
    following = torch.arange(VOCAB)
    found = score(logits, following, width).numpy()
    assert found.shape == (VOCAB, COLUMNS + 2 * width) and found.dtype == np.int32
    for row, token in enumerate(following.tolist()):
        values = logits[row].double().tolist()
        order = sorted(range(VOCAB), key=lambda other: (-values[other], other))
        normaliser = math.log(math.fsum(math.exp(value) for value in values))
        assert found[row, 1] == order.index(token) + 1
        assert found[row, COLUMNS : COLUMNS + width].tolist() == order[:width]
        floats = found[row].view(np.float32)
        assert floats[0] == pytest.approx(values[token] - normaliser, abs=1e-5)
        expected = [values[other] - normaliser for other in order[:width]]
        assert floats[COLUMNS + width :].tolist() == pytest.approx(expected, abs=1e-5)


def test_no_bit_depends_on_other_rows_or_on_the_width() -> None:
    logits, following = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(1)), torch.arange(20)
    together = score(logits, following, 4)
    for row in range(20):
        alone = score(logits[row : row + 1], following[row : row + 1], 2)
        assert torch.equal(alone[0, :COLUMNS], together[row, :COLUMNS])
        assert torch.equal(alone[0, COLUMNS : COLUMNS + 2], together[row, COLUMNS : COLUMNS + 2])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_marked(wrong: float) -> None:
    logits = logits_of(3)
    logits[1, 5] = wrong
    assert score(logits, torch.zeros(3, dtype=torch.int64), 0)[:, FINITE_COLUMN].tolist() == [1, 0, 1]


def test_logits_of_a_large_vocabulary_are_few_at_a_time() -> None:
    assert tokens_at_a_time(150_000) * 150_000 <= LOGITS_MAX < (tokens_at_a_time(150_000) + 1) * 150_000
    assert tokens_at_a_time(2 * LOGITS_MAX) == 1
