"""Kinds of layers add few calls to a decode turn, however many window blocks its rows gain and leave behind."""

from __future__ import annotations

from benchmarks import turn_kinds

MORE_CALLS_MAX = 20


def test_windows_and_states_add_few_calls_to_a_turn() -> None:
    _, turns = turn_kinds.measure(["one kind", "three kinds"], sequences=16, steps=0)
    one, three = (len(turn_kinds.usual(each)) for each in turns.values())
    assert one < three <= one + MORE_CALLS_MAX
