"""Trials of grammars beside the thread that asks for them."""

from __future__ import annotations

import gc
import threading
from typing import Any, cast

from kvforge.text.grammar_helper import GrammarHelper, TrialLimits
from kvforge.text.grammar_trials import GrammarTrials

DEADLINE_S = 30.0


class GatedHelper:
    """Answers when its gate is open, as the text of the grammar asks."""

    def __init__(self, waiting_max: int = 2) -> None:
        self.limits = TrialLimits(waiting_max=waiting_max)
        self.gate, self.closed = threading.Event(), threading.Event()
        self.tries: list[str] = []

    def start(self) -> None:
        """Nothing to start."""

    def tried(self, grammar: str) -> tuple[str, bool]:
        self.tries.append(grammar)
        assert self.gate.wait(DEADLINE_S)
        return (f"{grammar} is bad" if grammar in ("bad", "failed") else ""), grammar != "failed"

    def close(self) -> None:
        self.closed.set()


def trials_of(helper: Any) -> GrammarTrials:
    return GrammarTrials(cast(GrammarHelper, helper))


def test_an_answer_is_none_until_it_is_known_and_then_stays() -> None:
    helper = GatedHelper()
    trials = trials_of(helper)
    try:
        assert trials.problem("good") is None and trials.problem("bad") is None
        assert trials.waited_s("good") > 0 and trials.waited_s("other") == 0
        helper.gate.set()
        trials.wait(DEADLINE_S)
        assert [trials.problem(each) for each in ("good", "bad", "good")] == ["", "bad is bad", ""]
        assert helper.tries == ["good", "bad"]
    finally:
        trials.close()
    assert helper.closed.is_set()


def test_the_queue_is_bounded_and_what_found_it_full_may_come_again() -> None:
    helper = GatedHelper(waiting_max=2)
    trials = trials_of(helper)
    try:
        assert [trials.problem(f"good{each}") for each in range(4)] == [None] * 4
        helper.gate.set()
        trials.wait(DEADLINE_S)
        assert helper.tries == ["good0", "good1"]
        assert trials.problem("good3") is None
        trials.wait(DEADLINE_S)
        assert trials.problem("good3") == ""
    finally:
        trials.close()


def test_a_trial_that_failed_is_made_again_for_who_asks_next() -> None:
    helper = GatedHelper()
    helper.gate.set()
    trials = trials_of(helper)
    try:
        for _ in range(2):
            assert trials.problem("failed") is None
            trials.wait(DEADLINE_S)
            assert trials.problem("failed") == "failed is bad"
        assert helper.tries == ["failed", "failed"]
    finally:
        trials.close()


def test_trials_that_are_dropped_end_their_thread_and_its_process() -> None:
    helper = GatedHelper()
    helper.gate.set()
    trials = trials_of(helper)
    assert trials.problem("good") is None
    trials.wait(DEADLINE_S)
    del trials
    gc.collect()
    assert helper.closed.wait(DEADLINE_S)
