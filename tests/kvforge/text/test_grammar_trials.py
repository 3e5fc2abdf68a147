"""Trials of grammars beside the loop that requests them."""

from __future__ import annotations

from typing import Any, cast

from kvforge.text.grammar_helper import GrammarHelper, TrialLimits
from kvforge.text.grammar_trials import GrammarTrials

DEADLINE_S = 30.0


class GatedHelper:
    """Gives the verdict named in the grammar's text once its gate is open."""

    def __init__(self, waiting_max: int = 2) -> None:
        self.limits = TrialLimits(waiting_max=waiting_max)
        self.gate = self.closed = False
        self.tries: list[str] = []

    def start(self) -> None:
        """Nothing to start."""

    def begin(self, grammar: str) -> None:
        self.tries.append(grammar)

    def poll(self, seconds: float = 0.0) -> tuple[str, bool] | None:
        if not self.gate:
            return None
        grammar = self.tries[-1]
        return (f"{grammar} is bad" if grammar in ("bad", "failed") else ""), grammar != "failed"

    def close(self) -> None:
        self.closed = True


def trials_of(helper: Any) -> GrammarTrials:
    return GrammarTrials(cast(GrammarHelper, helper))


def test_an_answer_is_none_until_it_is_known_and_then_stays() -> None:
    helper = GatedHelper()
    trials = trials_of(helper)
    try:
        assert trials.problem("good") is None and trials.problem("bad") is None
        assert trials.waited_s("good") > 0 and trials.waited_s("other") == 0
        helper.gate = True
        trials.wait(DEADLINE_S)
        assert [trials.problem(each) for each in ("good", "bad", "good")] == ["", "bad is bad", ""]
        assert helper.tries == ["good", "bad"]
    finally:
        trials.close()
    assert helper.closed


def test_the_queue_is_bounded_and_what_found_it_full_may_come_again() -> None:
    helper = GatedHelper(waiting_max=2)
    trials = trials_of(helper)
    try:
        assert [trials.problem(f"good{each}") for each in range(4)] == [None] * 4
        helper.gate = True
        trials.wait(DEADLINE_S)
        assert helper.tries == ["good0", "good1"]
        assert trials.problem("good3") is None
        trials.wait(DEADLINE_S)
        assert trials.problem("good3") == ""
    finally:
        trials.close()


def test_a_trial_that_failed_is_made_again_for_who_asks_next() -> None:
    helper = GatedHelper()
    helper.gate = True
    trials = trials_of(helper)
    try:
        for _ in range(2):
            assert trials.problem("failed") is None
            trials.wait(DEADLINE_S)
            assert trials.problem("failed") == "failed is bad"
        assert helper.tries == ["failed", "failed"]
    finally:
        trials.close()


def test_no_answer_is_waited_for_longer_than_was_asked() -> None:
    trials = trials_of(GatedHelper())
    assert trials.problem("good") is None
    trials.wait(0.01)
    assert trials.problem("good") is None and trials.waited_s("good") > 0
