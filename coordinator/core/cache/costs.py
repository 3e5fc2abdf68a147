"""What a group's steps cost: a fixed part, and so much for each token of prompts; from how long they took.

A line is fitted to the last steps, each counting for less than the one after it. Where they were all of about the same
size no line can be told from another: then both parts grow or shrink as the steps did. Whole numbers throughout: the
same steps give the same line in any process.
"""

from __future__ import annotations

UNIT = 1 << 10  # parts of a microsecond that are counted
OF = 8
KEPT = 6  # of OF: what a step counts for, one step later
AIM = 7  # of OF: what of a bound is planned with, for no step takes exactly what the line says
SPREAD = 16  # sizes tell a line where their variance is at least this part of their mean's square
FACTOR_MAX = 4  # what a step that takes longer than expected counts for at most
FIXED_STEPS = 4  # how many steps without prompts weigh as much as all before them
DURATION_US_MAX = 1 << 40


class StepCosts:
    """fixed: of a step, whatever it holds of prompts; token: of each of their tokens; 0 before the first. In parts of a
    microsecond, 1/UNIT each."""

    def __init__(self) -> None:
        self.fixed = self.token = 0
        # Sums over the steps: how many, tokens, durations, squares of tokens, tokens times durations.
        self._steps = self._tokens = self._took = self._squares = self._products = 0

    def add(self, tokens: int, duration_us: int) -> None:
        """A step with so many tokens of prompts took so long."""
        took = UNIT * max(0, min(duration_us, DURATION_US_MAX))
        if not tokens:
            # Many follow each other, all alike: they count as one.
            self.fixed += (took - self.fixed) // FIXED_STEPS if self.fixed else took
            self._steps = self._tokens = self._took = self._squares = self._products = 0
            self._keep(0, self.fixed)
            return
        self._keep(tokens, took)
        self._fit(tokens, took)

    def _keep(self, tokens: int, took: int) -> None:
        """Sums with the weight of the step that is new: UNIT."""
        self._steps = self._steps * KEPT // OF + UNIT
        self._tokens = self._tokens * KEPT // OF + UNIT * tokens
        self._took = self._took * KEPT // OF + UNIT * took
        self._squares = self._squares * KEPT // OF + UNIT * tokens * tokens
        self._products = self._products * KEPT // OF + UNIT * tokens * took

    def _fit(self, tokens: int, took: int) -> None:
        variance = self._steps * self._squares - self._tokens * self._tokens
        together = self._steps * self._products - self._tokens * self._took
        if SPREAD * variance >= self._tokens * self._tokens and together > 0:
            # A slow step or two may look as if tokens cost nothing, and steps all the same.
            self.token = max(1, self.token // 2, together // variance)
            self.fixed = (self._took - self.token * self._tokens) // self._steps
            if self.fixed < 0:
                self.fixed, self.token = 0, max(1, self._took // self._tokens)
        elif not self.token:
            self.token = max(1, took // tokens)
        else:
            expected = self.fixed + self.token * tokens
            scale, whole = 3 * expected + min(took, FACTOR_MAX * expected), 4 * expected
            self.fixed, self.token = self.fixed * scale // whole, max(1, self.token * scale // whole)

    def chunk(self, gap_us: int) -> int:
        """Tokens of prompts beside decodes. A step shall take `gap_us` at most, but prompts get half of its time at
        least: less of them would make it hardly shorter, and all of them wait for longer. 0: nothing is known yet."""
        if not self.token:
            return 0
        return max(UNIT * gap_us * AIM // OF - self.fixed, self.fixed) // self.token
