"""What a request asks for follows from the seed and its index."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.protocol.errors import InvalidRequest
from loadtest.prompts import Lengths, Prompts


def prompts(**changes: object) -> Prompts:
    values: dict[str, object] = {"seed": 1, "vocab": 50, "input": Lengths(4, 9), "output": Lengths(2, 3), **changes}
    return Prompts(**values)  # type: ignore[arg-type]


def test_lengths_are_exact_or_uniform_with_both_ends() -> None:
    assert Lengths.parse("128") == Lengths(128, 128)
    assert Lengths.parse("64:512") == Lengths(64, 512)
    assert str(Lengths.parse("64:512")) == "64:512"
    made = [prompts().make(index) for index in range(300)]
    assert {len(prompt) for prompt, _ in made} == set(range(4, 10))
    assert {output for _, output in made} == {2, 3}
    assert {len(prompts(input=Lengths(5, 5)).make(index)[0]) for index in range(10)} == {5}


@pytest.mark.parametrize("text", ["", "a", "0", "-1", "5:4", "1:", ":2", "1:2:3", "99999999999"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Lengths.parse(text)


def test_a_request_does_not_depend_on_the_others() -> None:
    one, two = prompts(), prompts()
    later = [one.make(index) for index in (5, 3, 5)]
    for index, (prompt, output) in zip((5, 3, 5), later, strict=True):
        again = two.make(index)
        assert np.array_equal(again[0], prompt) and again[1] == output
    assert not np.array_equal(prompts(input=Lengths(9, 9)).make(0)[0], prompts(input=Lengths(9, 9), seed=2).make(0)[0])
    assert later[0][0].dtype == np.int32 and later[0][0].min() >= 0 and later[0][0].max() < 50


def test_a_common_prefix() -> None:
    made = [prompts(prefix=4, vocab=1000).make(index)[0] for index in range(5)]
    assert len({tuple(prompt[:4].tolist()) for prompt in made}) == 1
    assert len({tuple(prompt.tolist()) for prompt in made}) == 5
    for wrong in ({"prefix": 5}, {"prefix": -1}, {"vocab": 0}):
        with pytest.raises(InvalidRequest):
            prompts(**wrong)
