"""A group whose rows all decode, step after step: what the next step needs is known but for a handful of numbers.

Most steps are like the one before: the same rows, each one token further. As long as nobody joins or leaves, each
row's block has room or can be followed by a free one, and no new holder shares a block, planning is a few additions.
Whatever else happens, the scheduler plans the long way and starts a new one of these.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .sequences import Slots


class Steady:
    """Rows that decode together. Arrays are [rows].

    version, holds: of the group and of its blocks when this was true. starts: positions that the next step feeds.
    room: tokens that fit into the blocks held after that. left: steps until the first row has all that it asked for.
    tenant: of every row, or -1.
    """

    def __init__(
        self, version: int, holds: int, slots: Slots, serials: Slots, starts: Slots, room: Slots, left: int, tenant: int
    ) -> None:
        self.version, self.holds, self.tenant = version, holds, tenant
        self.slots, self.serials = slots, serials
        self.starts, self.room, self.left = starts, room, left
        self.ones = np.ones(slots.size, np.int64)
        self.samples = np.ones(slots.size, np.bool_)
        self.slots32 = slots.astype(np.int32)
        self.ones32 = np.ones(slots.size, np.int32)
        self.unknown = np.full(slots.size, -1, np.int32)
        for array in (self.ones, self.samples, self.slots32, self.ones32, self.unknown):
            array.setflags(write=False)

    def advance(self) -> npt.NDArray[np.int32]:
        """Every row goes one token further. Returns where this step starts, as int32."""
        starts = self.starts.astype(np.int32)
        self.starts += 1
        self.room -= 1
        self.left -= 1
        return starts
