"""Pauses of the device between the ends of steps and the begins of the next ones."""

from __future__ import annotations

from kvforge.worker.device.queue import DeviceEvent

from .pending import PendingStep


class DevicePauses:
    """Measures how long the device had nothing to do before each step.

    Args:
        is_measured: False where passes of a draft model run between steps: they are no pause.
    """

    def __init__(self, is_measured: bool) -> None:
        self._is_measured = is_measured
        self._last_end: DeviceEvent | None = None  # of the step that was finished last

    def idle_us(self, pending: PendingStep) -> int:
        """Return how long the device was idle before a step that has ended, in microseconds; -1: not measured.

        Called for every step, in the order of their ends.
        """
        last, self._last_end = self._last_end, pending.end
        if last is None or pending.begin is None or pending.errors or not self._is_measured:
            return -1
        return max(0, round(1000 * pending.begin.ms_since(last)))

    def forget(self) -> None:
        """Forget the last step: no pause is measured before the next one."""
        self._last_end = None
