"""How long a device has nothing to do between two steps, and how early the next step must be sent to avoid that.

A step that is sent with the result of the one before lets the device wait: for the way of the result, the plan, the
way of the step and its launch. That pause is the first estimate of the lead with which a step must be sent before the
result. Each step that is sent with a lead corrects it: a step that came too late raises it by much, any other lowers it
by little, so that few steps are late, whatever the deviations of the expected times.
"""

from __future__ import annotations

from .costs import DURATION_US_MAX

PAUSES = 8  # the averaging window of pauses
OUTLIER = 4  # a pause counts as at most so many usual ones
LATE_US = 100  # a device that waited longer got its step too late
RAISE, LOWER = 8, 64  # parts of the lead by which a late step raises it, and another one lowers it
WORTH = 16  # a pause below 1 / WORTH of a step is not worth a lead


class Pauses:
    """The pauses of a worker's device, in microseconds.

    Attributes:
        usual_us: The pause before a step that was sent with the result of the one before; 0: not measured.
        lead_us: How long before a result the next step must be sent.
        total_us: The sum of all pauses, those without work included.
    """

    def __init__(self) -> None:
        self.usual_us = self.lead_us = self.total_us = 0

    def add(self, idle_us: int, duration_us: int, *, with_result: bool, in_time: bool) -> None:
        """Add the pause before a step.

        Args:
            idle_us: The pause.
            duration_us: What the step took.
            with_result: It was sent with the result of the step before.
            in_time: It was to be sent with a lead, where one is worth it.
        """
        idle_us = min(idle_us, DURATION_US_MAX)
        self.total_us += idle_us
        if with_result:
            most_us = OUTLIER * self.usual_us if self.usual_us else max(0, duration_us)
            pause_us = min(idle_us, most_us)
            self.usual_us = max(1, self.usual_us + (pause_us - self.usual_us) // PAUSES) if self.usual_us else pause_us
        if not in_time or not self._is_worth(duration_us):
            self.lead_us = self.usual_us
        elif idle_us > LATE_US:
            self.lead_us = min(self.lead_us + max(1, self.lead_us // RAISE), max(1, duration_us // 2))
        else:
            self.lead_us = max(1, self.lead_us - max(1, self.lead_us // LOWER))

    def lead(self, takes_us: int) -> int:
        """Return how long before the result of a step of `takes_us` the next one is to be sent; 0: with the result."""
        return min(self.lead_us, takes_us // 2) if self._is_worth(takes_us) else 0

    def _is_worth(self, takes_us: int) -> bool:
        return 0 < takes_us <= WORTH * self.usual_us
