"""Hands steps to workers through shared memory: a worker polls a word before it sleeps on its socket.

Waking a process by a message takes 28 us on one core and about 95 us across two; polling sees a change in less than
one. The coordinator therefore also writes each step for a polling worker into a ring in the tables file: the frames
first, then the head, and the polled word of the head last. The same step is always sent over ZeroMQ too; the ring is
only faster. No step is lost if the worker sleeps, if the step is too long for the ring, or if it is overwritten before
the worker reads it.

Steps are numbered from 1 since the pool was registered (`epoch`), with the same numbers on both ways. mail_head[pool]
holds for each place of the ring: number (0 during a write), epoch, bytes of the body, bytes of the arrays. As in
`tables`, x86-64 shows plain stores to other cores in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .layout import STEP_RING_SLOTS, STEP_SLOT_BYTES
from .messages import Int64Array

HEAD = 4


class StepRing:
    """The coordinator's side.

    Args:
        heads: [pools, 4 STEP_RING_SLOTS] int64.
        slots: [pools, STEP_RING_SLOTS STEP_SLOT_BYTES] uint8.
    """

    def __init__(self, heads: Int64Array, slots: npt.NDArray[np.uint8]) -> None:
        self._heads = [row.data for row in heads]
        self._slots = [row.data for row in slots]

    def put(self, pool: int, epoch: int, number: int, frames: Sequence[bytes | memoryview]) -> None:
        """Publish one step of a registration. A step that does not fit into the ring is left to ZeroMQ.

        Args:
            pool: The number of the pool.
            epoch: The registration.
            number: The number of the step, from 1.
            frames: One or two frames.
        """
        head, slots = self._heads[pool], self._slots[pool]
        place = number % STEP_RING_SLOTS
        at, start = HEAD * place, STEP_SLOT_BYTES * place
        body, arrays = frames[0], frames[1] if len(frames) > 1 else b""
        middle = start + len(body)
        end = middle + len(arrays)
        head[at] = 0
        if end - start <= STEP_SLOT_BYTES:
            slots[start:middle] = body
            slots[middle:end] = arrays
            head[at + 1], head[at + 2], head[at + 3] = epoch, len(body), len(arrays)
            head[at] = number


class StepRingReader:
    """A worker's side, from one registration on.

    Args:
        head: [4 STEP_RING_SLOTS] int64.
        slots: [STEP_RING_SLOTS STEP_SLOT_BYTES] uint8.
        epoch: The registration.

    Attributes:
        last_step: The number of the last step read, from the ring or from the socket.
    """

    def __init__(self, head: Int64Array, slots: npt.NDArray[np.uint8], epoch: int) -> None:
        self._head, self._slots, self._epoch = head.data, slots.data, epoch
        self.last_step = 0

    def read_step(self) -> list[bytes] | None:
        """Return the frames of the next step if it is there and complete, else None."""
        head, number = self._head, self.last_step + 1
        place = number % STEP_RING_SLOTS
        at = HEAD * place
        if head[at] != number or head[at + 1] != self._epoch:
            return None
        start = STEP_SLOT_BYTES * place
        middle = start + head[at + 2]
        end = middle + head[at + 3]
        if not start <= middle <= end <= start + STEP_SLOT_BYTES:
            return None  # torn: it is being overwritten
        frames = [bytes(self._slots[start:middle])]
        if end > middle:
            frames.append(bytes(self._slots[middle:end]))
        if head[at] != number:
            return None
        self.last_step = number
        return frames
