"""Measurements of a group's draft model: how often its tokens are right, and the time that they take.

The tokens of a draft model, or of heads, are about as likely to be right for one request as for another, unlike those
of lookup. Therefore all results of a group tell its chances, and a new request begins with them. A request that differs
moves its own away from these, by what was accepted of what was expected.

A pass computes one token of all rows. The worker reports what the passes of a result took. Some take many times as
long, as where kernels are compiled: of the last three the one in the middle counts, of the first two the shorter one.
"""

from __future__ import annotations

from .costs import DURATION_US_MAX, UNIT
from .draft_gains import DraftGains

CERTAIN = 1 << 10  # the chance of a token that is accepted always
RESULTS_OF = 256  # the window of a group's results: at twice as many, all count half
OWN_OF = 64  # the same of a request's, in expected tokens
OWN_FROM = 16  # expected tokens that count as much as a request's own
PASS_STEPS = 6  # the averaging window of a pass's time
UNKNOWN = -1


class ModelDrafts:
    """The draft model of a group.

    Attributes:
        most: The most tokens that it proposes for a row; 0: the worker has none.
        first_good, first_tried: Results with a right first token, and all results; one of two before the first.
        later_good, later_tried: The same of tokens behind a right one.
        pass_time: The time of a pass, in units of 1/UNIT microseconds; UNKNOWN before the first.
        last_pass, pass_before: The times of the last two results.
        trial: Steps of a trial that are still to ask for proposals.
        trying: The last step that asked was one of a trial.
        trial_us: The time of its passes so far, beyond `pass_time`.
        waits: How many trials in a row found that the model does not pay.
        next_trial: The step from which on the next trial comes, while it does not pay.
        gains: What was measured of steps with its drafts.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.first_good, self.first_tried = 1, 2
        self.later_good, self.later_tried = 1, 2
        self.pass_time = self.last_pass = self.pass_before = UNKNOWN
        self.trial, self.trying, self.trial_us = 0, False, 0
        self.waits = self.next_trial = 0
        self.gains = DraftGains()

    @property
    def first(self) -> int:
        """The chance of the first token, in 1 / CERTAIN."""
        return CERTAIN * self.first_good // self.first_tried

    @property
    def later(self) -> int:
        """The chance of a token behind a right one, in 1 / CERTAIN."""
        return CERTAIN * self.later_good // self.later_tried

    def learned(self, drafted: int, accepted: int) -> tuple[int, int]:
        """Learn from the verified tokens of a row.

        Args:
            drafted: How many were verified, at least 1.
            accepted: How many of these became tokens.

        Returns:
            How many of those that were tried became tokens, and how many were expected to, in 1 / CERTAIN.
        """
        tried = min(accepted, drafted - 1)
        expected = self.first + tried * self.later
        self.first_good += accepted > 0
        self.first_tried += 1
        if tried:
            self.later_good += accepted - 1
            self.later_tried += tried
        if self.first_tried >= 2 * RESULTS_OF:
            self.first_good, self.first_tried = self.first_good // 2, self.first_tried // 2
        if self.later_tried >= 2 * RESULTS_OF:
            self.later_good, self.later_tried = self.later_good // 2, self.later_tried // 2
        return CERTAIN * accepted, expected

    def took(self, draft_us: int, passes: int) -> None:
        """Note what the passes of a result took, in microseconds."""
        each = UNIT * max(0, min(draft_us, DURATION_US_MAX)) // passes
        if self.last_pass == UNKNOWN:
            self.pass_time = each
        elif self.pass_before == UNKNOWN:
            self.pass_time = min(each, self.last_pass)
        else:
            middle = sorted((each, self.last_pass, self.pass_before))[1]
            self.pass_time += (middle - self.pass_time) // PASS_STEPS
        self.last_pass, self.pass_before = each, self.last_pass


def own_chance(chance: int, good: int, expected: int) -> int:
    """Return the chance of a request's tokens, in 1 / CERTAIN.

    Args:
        chance: That of its group.
        good: How many of its tokens were accepted, in 1 / CERTAIN.
        expected: How many were expected to, likewise.
    """
    shared = OWN_FROM * CERTAIN
    return min(CERTAIN, chance * (shared + good) // (shared + expected))


def own_counts(good: int, expected: int) -> tuple[int, int]:
    """Return a request's counts, in 1 / CERTAIN, with a weight of at most OWN_OF expected tokens."""
    return (good // 2, expected // 2) if expected >= OWN_OF * CERTAIN else (good, expected)
