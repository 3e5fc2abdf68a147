"""The map of blocks: what is known of each, and what of it a viewer has not seen yet, packed.

A viewer names the last frame that it has; the frame that it gets says what changed since, however long ago that was.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge import BlockColumns

BLOCKS_MAX = 1 << 20
HOLDERS_MAX, OWNER_MAX, AGE_MAX = (1 << 8) - 1, (1 << 16) - 1, (1 << 8) - 1
AGES_PER_DOUBLING = 16
LEVEL = 1  # of compression: most of what it finds are runs of equal bytes


class Frame(msgspec.Struct, frozen=True):
    """Cells of the map. frame: its number. base: the frame that it goes on from; 0: it has all `count` blocks.

    data: zlib; inside, unless it has all, [n] uint32 block ids; then for each of n blocks its holders [n] uint8, the
    number of the tenant that it is charged to [n] uint16 (0: it is free), and how long it has had that content [n]
    uint8, see `ages`. Little-endian; what does not fit is the largest that does.
    """

    frame: int
    base: int
    count: int
    n: int
    data: bytes


class BlockMap:
    """Every block as it was at the last look, with the number of the look in which it last changed."""

    def __init__(self) -> None:
        self.number = 0
        self._whole_at = 0  # who has an older frame gets all
        self._seen = BlockColumns(*(np.zeros(0, np.int32) for _ in range(3)))
        self._changed = np.zeros(0, np.int64)
        self._since_s = np.zeros(0)
        self._packed: dict[int, bytes] = {}

    @property
    def count(self) -> int:
        """How many blocks it has."""
        return self._changed.size

    def look(self, found: BlockColumns, now_s: float) -> bool:
        """Takes what the tables say; whether anything changed. now_s: of a monotonic clock."""
        seen, count = self._seen, found.owner.size
        if count != self.count:
            self.number += 1
            self._whole_at = self.number
            self._changed, self._since_s = np.full(count, self.number), np.full(count, now_s)
        else:
            moved = (found.generation != seen.generation) | (found.owner != seen.owner)
            changed = moved | (found.refcount != seen.refcount)
            if not changed.any():
                return False
            self.number += 1
            self._changed[changed] = self.number
            self._since_s[moved] = now_s
        self._seen = found
        self._packed.clear()
        return True

    def since(self, base: int, now_s: float) -> bytes:
        """A Frame as JSON for whoever has frame `base` (0: none); empty where that is the present one."""
        if base == self.number:
            return b""
        if base < self._whole_at:
            base = 0
        if base not in self._packed:
            self._packed[base] = msgspec.json.encode(self._frame(base, now_s))
        return self._packed[base]

    def _frame(self, base: int, now_s: float) -> Frame:
        ids = np.flatnonzero(self._changed > base)
        if 2 * ids.size > self.count:
            base = 0
        at: Any = slice(None) if not base else ids
        holders = np.minimum(self._seen.refcount[at], HOLDERS_MAX).astype("u1")
        owners = np.minimum(self._seen.owner[at], OWNER_MAX).astype("<u2")
        parts = [holders, owners, ages(now_s - self._since_s[at])]
        if base:
            parts.insert(0, ids.astype("<u4"))
        data = zlib.compress(b"".join(part.tobytes() for part in parts), LEVEL)
        return Frame(self.number, base, self.count, holders.size, data)


def ages(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Ages on a scale of 16 steps a doubling: 0 is now, 255 about 17 hours and more. [n] float64 -> [n] uint8."""
    scaled = np.rint(AGES_PER_DOUBLING * np.log2(1 + np.maximum(seconds, 0.0)))
    fitting: npt.NDArray[np.uint8] = np.minimum(scaled, AGE_MAX).astype(np.uint8)
    return fitting
