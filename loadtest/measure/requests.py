"""Outcomes as columns, so that a run of a million tokens is added up by numpy.

Kept here: every latency counts from the intended arrival, `due_s`, so that neither a late driver nor a full server
looks fast by sending late; a request that something never happened to has NaN there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..drive.outcome import ENDS, FINISHED, Outcome
from ..load.workload import FloatArray
from .span import BoolArray, Span

NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """[requests] each. due_s, ended_s: since the start of the run; of one that did not finish, ended_s is NaN.

    first_s, queue_s, whole_s: from the intended arrival to the first token, to the first step that had it, to the end.
    gap_s: the mean time between its tokens. tokens_s: when each came, since the start of the run.
    """

    outcomes: Sequence[Outcome]
    tokens_s: Sequence[FloatArray]
    due_s: FloatArray
    first_s: FloatArray
    queue_s: FloatArray
    whole_s: FloatArray
    gap_s: FloatArray
    finished: BoolArray

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Self:
        outcomes = list(outcomes)
        found = {outcome.state for outcome in outcomes}
        assert found <= set(ENDS), f"a request is still in {found - set(ENDS)} after the run"
        tokens_s = [np.array(outcome.tokens_s, np.float64) for outcome in outcomes]
        due_s = np.array([outcome.due_s for outcome in outcomes], np.float64)
        first_s = np.array([times[0] if times.size else NAN for times in tokens_s], np.float64)
        gap_s = [(times[-1] - times[0]) / (times.size - 1) if times.size > 1 else NAN for times in tokens_s]
        ended_s = [outcome.ended_s if outcome.state == FINISHED else NAN for outcome in outcomes]
        return cls(
            outcomes=outcomes,
            tokens_s=tokens_s,
            due_s=due_s,
            first_s=first_s - due_s,
            queue_s=np.array([_scheduled_s(outcome) for outcome in outcomes], np.float64) - due_s,
            whole_s=np.array(ended_s, np.float64) - due_s,
            gap_s=np.array(gap_s, np.float64),
            finished=np.array([outcome.state == FINISHED for outcome in outcomes], np.bool_),
        )

    def where(self, mask: BoolArray) -> Self:
        """Those of a [requests] bool."""
        chosen = np.flatnonzero(mask).tolist()
        return type(self)(
            outcomes=[self.outcomes[index] for index in chosen],
            tokens_s=[self.tokens_s[index] for index in chosen],
            due_s=self.due_s[mask],
            first_s=self.first_s[mask],
            queue_s=self.queue_s[mask],
            whole_s=self.whole_s[mask],
            gap_s=self.gap_s[mask],
            finished=self.finished[mask],
        )

    def due_within(self, span: Span) -> Self:
        """Those due in it."""
        return self.where(span.holds(self.due_s))

    def gaps_s(self) -> FloatArray:
        """[gaps] between neighbouring tokens of a request, of all of them."""
        gaps = np.diff(self.all_tokens_s())
        begins = np.cumsum([times.size for times in self.tokens_s], dtype=np.int64)[:-1]
        between = np.ones(gaps.size, np.bool_)
        # From the last token of a request to the first of the next one is no gap; those without a token change nothing.
        between[begins[(begins > 0) & (begins <= gaps.size)] - 1] = False
        return gaps[between]

    def all_tokens_s(self) -> FloatArray:
        """[tokens] when each came, request after request."""
        return np.concatenate([np.zeros(0), *self.tokens_s])

    def ended_s(self) -> FloatArray:
        """[requests] since the start of the run; NaN: it did not finish."""
        return self.whole_s + self.due_s


def _scheduled_s(outcome: Outcome) -> float:
    # The coordinator counts from its own submission, which is as long after `sent_s` as the message took: microseconds.
    if outcome.timings.first_scheduled_us < 0 or outcome.sent_s < 0:
        return NAN
    return outcome.sent_s + outcome.timings.first_scheduled_us / 1e6
