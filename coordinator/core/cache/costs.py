"""A cost model of a group's steps, fitted to measured durations: a fixed cost plus a cost for each prompt token.

The model is an exponentially weighted least-squares line. If the recent steps had almost the same size, the slope is
undetermined; both parts are then scaled by the ratio of measured to expected duration. All arithmetic is on integers,
so the same steps give the same line in any process.
"""

from __future__ import annotations

UNIT = 1 << 10  # internal units for each microsecond
OF = 8
KEPT = 6  # KEPT/OF: decay of a step's weight with each later step
AIM = 7  # AIM/OF: share of the time bound that is planned for, as a margin for deviations from the line
SPREAD = 16  # a line is fitted if the variance of the sizes is at least mean^2 / SPREAD
FACTOR_MAX = 4  # cap on measured / expected duration, which limits the effect of outliers
FIXED_STEPS = 4  # the averaging window for steps without prompt tokens
DURATION_US_MAX = 1 << 40


class StepCosts:
    """The fitted cost of steps, in units of 1/UNIT microseconds; 0 before the first step.

    Attributes:
        fixed: Cost of a step without prompt tokens.
        token: Additional cost of each prompt token.
    """

    def __init__(self) -> None:
        self.fixed = self.token = 0
        # Weighted sums over the steps: count, tokens, durations, tokens squared, tokens times durations.
        self._steps = self._tokens = self._took = self._squares = self._products = 0

    def add(self, tokens: int, duration_us: int) -> None:
        """Add a measured step with `tokens` prompt tokens."""
        took = UNIT * max(0, min(duration_us, DURATION_US_MAX))
        if not tokens:
            # Decode steps come in long, uniform series: they count as one.
            self.fixed += (took - self.fixed) // FIXED_STEPS if self.fixed else took
            self._steps, self._took = UNIT, UNIT * self.fixed
            self._tokens = self._squares = self._products = 0
            return
        self._keep(tokens, took)
        self._fit(tokens, took)

    def _keep(self, tokens: int, took: int) -> None:
        """Add a step to the weighted sums with weight UNIT."""
        self._steps = self._steps * KEPT // OF + UNIT
        self._tokens = self._tokens * KEPT // OF + UNIT * tokens
        self._took = self._took * KEPT // OF + UNIT * took
        self._squares = self._squares * KEPT // OF + UNIT * tokens * tokens
        self._products = self._products * KEPT // OF + UNIT * tokens * took

    def _fit(self, tokens: int, took: int) -> None:
        variance = self._steps * self._squares - self._tokens * self._tokens
        together = self._steps * self._products - self._tokens * self._took
        if SPREAD * variance >= self._tokens * self._tokens:
            # A few slow steps can make tokens look free, or less than that: limit how fast their cost falls.
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

    def of(self, tokens: int) -> int:
        """Return what a step with so many tokens takes, in units."""
        return self.fixed + self.token * tokens

    def stretched(self, percent: int, tokens: int = 0) -> int:
        """Return how many tokens more make a step of `tokens` so many percent longer; 0 while no cost is known.

        At least one, once costs are known.
        """
        return max(1, self.of(tokens) * percent // (100 * self.token)) if self.token else 0

    def chunk(self, gap_us: int) -> int:
        """Return how many prompt tokens to mix into a decode step so that it takes at most `gap_us`.

        Prompts get at least half of the step's time: a smaller share would barely shorten the step and delay every
        prompt.

        Returns:
            Tokens, or 0 while no cost is known.
        """
        if not self.token:
            return 0
        return max(UNIT * gap_us * AIM // OF - self.fixed, self.fixed) // self.token
