"""Outcomes as columns, for fast aggregation with numpy.

Invariants: every latency counts from the intended arrival `due_s`, so that neither a late driver nor a full server
looks fast by delaying the send. A value that does not exist is NaN.
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
class OutcomeColumns:
    """The columns, [requests] each.

    Attributes:
        outcomes: The outcomes.
        tokens_s: The arrival of each token, since the start of the run.
        due_s: The intended arrival, since the start of the run.
        first_s: From the intended arrival to the first token.
        queue_s: From the intended arrival to the first step.
        whole_s: From the intended arrival to the end; NaN if it did not finish.
        gap_s: The mean time between tokens.
        finished: Whether it finished.
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
        """Build the columns of outcomes."""
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
        """Select requests by a [requests] bool mask."""
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
        """Select the requests that were due in the span."""
        return self.where(span.holds(self.due_s))

    def gaps_s(self) -> FloatArray:
        """Return all times between neighbouring tokens of a request, [gaps]."""
        gaps = np.diff(self.all_tokens_s())
        begins = np.cumsum([times.size for times in self.tokens_s], dtype=np.int64)[:-1]
        between = np.ones(gaps.size, np.bool_)
        # Drop the gaps between the last token of a request and the first of the next one.
        between[begins[(begins > 0) & (begins <= gaps.size)] - 1] = False
        return gaps[between]

    def all_tokens_s(self) -> FloatArray:
        """Return the arrival of all tokens, [tokens], request after request."""
        return np.concatenate([np.zeros(0), *self.tokens_s])

    def ended_s(self) -> FloatArray:
        """Return the ends since the start of the run, [requests]; NaN if it did not finish."""
        return self.whole_s + self.due_s


def _scheduled_s(outcome: Outcome) -> float:
    # The coordinator counts from its receipt of the request, microseconds after `sent_s`.
    if outcome.timings.first_scheduled_us < 0 or outcome.sent_s < 0:
        return NAN
    return outcome.sent_s + outcome.timings.first_scheduled_us / 1e6
