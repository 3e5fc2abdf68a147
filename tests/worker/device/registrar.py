"""A registrar that locks nothing, and remembers what it was asked for."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

WAIT_S = 60.0


class FakeRegistrar:
    """See `kvforge.worker.device.host_memory.Registrar`.

    Args:
        refused: The numbers of calls that are refused.
        stop_at: The number of a call that waits for `go_on`; -1: none does.

    Attributes:
        base: The address of the memory: those below are from there on.
        calls: (address, bytes) of what was to be locked, in order.
        locked: What is locked now: bytes by address.
        unlocked: How often something was unlocked.
        entered: Threads that were prepared.
    """

    def __init__(self, refused: frozenset[int] | set[int] = frozenset(), stop_at: int = -1) -> None:
        self._refused, self._stop_at = refused, stop_at
        self.base = 0
        self.calls: list[tuple[int, int]] = []
        self.locked: dict[int, int] = {}
        self.unlocked = self.entered = 0
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.memory: npt.NDArray[np.uint8] | None = None

    @property
    def places(self) -> list[int]:
        """The numbers of the pieces that were to be locked, if all have the size of the first."""
        return [at // self.calls[0][1] for at, _ in self.calls]

    def enter_thread(self) -> None:
        """Count the thread."""
        self.entered += 1

    def register(self, address: int, size: int) -> str:
        """Lock memory, unless this call is refused."""
        at, number = address - self.base, len(self.calls)
        self.calls.append((at, size))
        if number == self._stop_at:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
        if number in self._refused:
            return "refused"
        overlaps = any(at < there + bytes_there and there < at + size for there, bytes_there in self.locked.items())
        assert not overlaps, "locked twice"
        self.locked[at] = size
        return ""

    def unregister(self, address: int) -> None:
        """Unlock memory."""
        del self.locked[address - self.base]
        self.unlocked += 1

    def holds(self, address: int, size: int) -> bool:
        """Return whether this memory lies in one locked piece."""
        at = address - self.base
        return any(there <= at and at + size <= there + more for there, more in self.locked.items())
