"""Lengths given in one word; scaled, and cut to fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvforge.loadtest.load.content import cut_turn
from kvforge.loadtest.load.lengths import Empirical, fitted, parse, scaled
from kvforge.protocol.errors import InvalidRequest


def _drawn(text: str, count: int = 20_000) -> np.ndarray:
    return parse("input", text).draw(np.random.default_rng(1), count)


def test_the_forms_and_what_they_mean() -> None:
    assert set(_drawn("7")) == {7}
    assert set(_drawn("3:5")) == {3, 4, 5}
    lognormal = _drawn("lognormal:512,0.8")
    assert np.median(lognormal) == pytest.approx(512, rel=0.03)
    assert np.log(lognormal).std() == pytest.approx(0.8, rel=0.03)
    assert np.array_equal(_drawn("lognormal:512,0.8", 10), lognormal[:10])
    drawn = Empirical([5, 9, 30], [1, 0, 3]).draw(np.random.default_rng(1), 20_000)
    assert set(drawn) == {5, 30} and (drawn == 30).mean() == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(
    "text", ["", "0", "5:3", "x", "1:2:3", "lognormal:5", "lognormal:0,1", "lognormal:5,-1", "99999999999"]
)
def test_what_is_no_length_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse("output", text)
    assert refused.value.field == "output" and "LOW:HIGH" in str(refused.value)


def test_scaled_lengths_keep_a_token_and_long_ones_fit() -> None:
    assert scaled(np.array([1, 10, 100]), 0.05).tolist() == [1, 1, 5]
    inputs, outputs, cut = fitted(np.array([10, 90, 90, 10]), np.array([10, 11, 90, 200]), 100)
    assert inputs.tolist() == [10, 89, 50, 10]
    assert outputs.tolist() == [10, 11, 50, 50]
    assert cut.tolist() == [False, True, True, True]
    assert fitted(inputs, outputs, None)[2].sum() == 0


@given(st.integers(0, 99), st.integers(1, 99), st.integers(1, 99), st.integers(2, 99))
def test_a_turn_that_was_cut_fits_and_asks_for_something_new(
    kept: int, new: int, output: int, context_max: int
) -> None:
    was, (left, added, made, cut) = (kept, new, output), cut_turn(kept, new, output, context_max)
    assert left + added + made <= context_max and added >= 1 and made >= 1 and left >= 0
    assert cut == (sum(was) > context_max) and (cut or (left, added, made) == was)
    assert left <= kept and added <= new and made <= output
    if not kept:
        inputs, outputs, over = fitted(np.array([new]), np.array([output]), context_max)
        assert (inputs[0], outputs[0], over[0]) == (added, made, cut)
