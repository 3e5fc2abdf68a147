"""The cost of steps on the host and on the device, as sums and as a line for the log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvforge.worker.device.queue import DeviceEvent

from .pending import PendingStep


@dataclass
class Meter:
    """Sums since the last `reset`. Host times are in nanoseconds, device times in milliseconds.

    Attributes:
        last_ns: Launch time of the last step on the monotonic clock.
        steps: Steps launched.
        rows: Rows of these steps.
        launch_ns: Time from the step's arrays to the device's queue.
        wait_ns: Time waiting for the device.
        gather_ns: Time from the fetched results to the outcome.
        read_ns: Time reading block tables.
        send_ns: Time encoding and sending results.
        graphs: Decode graphs finished.
        busy_ms: Time of decode graphs from their first kernel to their last.
        busy_of_rows: Number of graphs and sum of their times in milliseconds, by number of rows.
        pairs: Consecutive decode graphs where the second was queued before the first had ended.
        pair_busy_ms: Busy time of the second graph of these pairs.
        idle_ms: Time between the two graphs of these pairs.
    """

    last_ns: int = 0
    steps: int = 0
    rows: int = 0
    launch_ns: int = 0
    wait_ns: int = 0
    gather_ns: int = 0
    read_ns: int = 0
    send_ns: int = 0
    graphs: int = 0
    busy_ms: float = 0.0
    busy_of_rows: dict[int, tuple[int, float]] = field(default_factory=dict)
    pairs: int = 0
    pair_busy_ms: float = 0.0
    idle_ms: float = 0.0
    _last_end: DeviceEvent | None = field(default=None, repr=False)

    def launched(self, rows: int, took_ns: int) -> None:
        """Record a queued step."""
        self.last_ns = time.monotonic_ns()
        self.steps += 1
        self.rows += rows
        self.launch_ns += took_ns

    def finished(self, pending: PendingStep, wait_ns: int, gather_ns: int) -> None:
        """Record a finished step; its device events have passed."""
        self.wait_ns += wait_ns
        self.gather_ns += gather_ns
        last, self._last_end = self._last_end, None
        if pending.busy is None or pending.errors:
            return
        begin, end = pending.busy
        busy_ms = end.ms_since(begin)
        self.graphs += 1
        self.busy_ms += busy_ms
        times, sum_ms = self.busy_of_rows.get(len(pending.slots), (0, 0.0))
        self.busy_of_rows[len(pending.slots)] = times + 1, sum_ms + busy_ms
        if last is not None and pending.queued_behind:
            self.pairs += 1
            self.pair_busy_ms += busy_ms
            self.idle_ms += begin.ms_since(last)
        self._last_end = end

    @property
    def idle_share(self) -> float:
        """Idle share of the device between consecutive steps, 0 to 1."""
        total = self.idle_ms + self.pair_busy_ms
        return self.idle_ms / total if total else 0.0

    def line(self) -> str:
        """Return a line for the log: times per step, in microseconds."""

        def each(total_ns: float, count: int) -> float:
            return total_ns / 1e3 / max(count, 1)

        host = " ".join(
            f"{name} {each(getattr(self, f'{name}_ns'), self.steps):.0f}"
            for name in ("read", "launch", "wait", "gather", "send")
        )
        often = max(self.busy_of_rows, key=lambda rows: self.busy_of_rows[rows][0], default=0)
        times, sum_ms = self.busy_of_rows.get(often, (0, 0.0))
        return (
            f"{self.steps} steps of {self.rows / max(self.steps, 1):.1f} rows; host us/step: {host}; "
            f"{self.graphs} from graphs, device us/step: busy {each(self.busy_ms * 1e6, self.graphs):.0f}, "
            f"of the {times} with {often} rows {each(sum_ms * 1e6, times):.0f}; "
            f"{self.pairs} back to back: idle {each(self.idle_ms * 1e6, self.pairs):.1f} us "
            f"({100 * self.idle_share:.2f} %)"
        )

    def reset(self) -> None:
        """Clear the sums, but keep the end of the last step."""
        last = self._last_end
        self.__init__()  # type: ignore[misc]  # every field has a default
        self._last_end = last
