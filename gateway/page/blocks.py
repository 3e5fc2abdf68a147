"""The block map: the state of every block, and packed deltas for viewers.

A viewer names its last frame and receives all changes since then, however old that frame is.
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
LEVEL = 1  # zlib's fastest; the data is mostly runs of equal bytes


class Frame(msgspec.Struct, frozen=True):
    """A delta of the map, or the complete map.

    `data` is zlib-compressed, little-endian, and saturates values that do not fit. It holds, for a delta, [n] uint32
    block ids; then for each of the n blocks its reference count [n] uint8, the number of the tenant that is charged for
    it [n] uint16 (0: free), the age of its content [n] uint8 (see `ages`), its kind [n] uint8 (a place in
    `layout.BLOCK_KINDS`), and its state [n] uint8 (a place in `layout.BLOCK_STATES`).

    Attributes:
        frame: The number of this frame.
        base: The frame that it updates; 0 if it holds all `count` blocks.
        count: The number of blocks in the map.
        n: The number of blocks in this frame.
        data: The cells.
    """

    frame: int
    base: int
    count: int
    n: int
    data: bytes


class BlockMap:
    """The last known state of every block, and the frame in which each last changed."""

    def __init__(self) -> None:
        self.number = 0
        self._whole_at = 0  # a viewer with an older frame gets the whole map
        none, no_places = np.zeros(0, np.int32), np.zeros(0, np.int8)
        self._seen = BlockColumns(none, none, none, no_places, no_places)
        self._changed = np.zeros(0, np.int64)
        self._since_s = np.zeros(0)
        self._packed: dict[int, bytes] = {}

    @property
    def count(self) -> int:
        """The number of blocks."""
        return self._changed.size

    def look(self, found: BlockColumns, now_s: float) -> bool:
        """Update from the shared tables. Return whether anything changed.

        Args:
            found: The current state.
            now_s: The monotonic clock.
        """
        seen, count = self._seen, found.owner.size
        if count != self.count:
            self.number += 1
            self._whole_at = self.number
            self._changed, self._since_s = np.full(count, self.number), np.full(count, now_s)
        else:
            moved = (found.generation != seen.generation) | (found.owner != seen.owner)
            changed = moved | (found.refcount != seen.refcount)
            changed |= (found.kind != seen.kind) | (found.state != seen.state)
            if not changed.any():
                return False
            self.number += 1
            self._changed[changed] = self.number
            self._since_s[moved] = now_s
        self._seen = found
        self._packed.clear()
        return True

    def since(self, base: int, now_s: float) -> bytes:
        """Return a JSON frame for a viewer at frame `base` (0: none); empty if it is up to date."""
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
        kinds, states = self._seen.kind[at].astype("u1"), self._seen.state[at].astype("u1")
        parts = [holders, owners, ages(now_s - self._since_s[at]), kinds, states]
        if base:
            parts.insert(0, ids.astype("<u4"))
        data = zlib.compress(b"".join(part.tobytes() for part in parts), LEVEL)
        return Frame(self.number, base, self.count, holders.size, data)


def ages(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Encode ages in seconds logarithmically, in 16 steps per doubling: 0 is now, 255 is 17 hours or more.

    Args:
        seconds: [n] float64.

    Returns:
        [n] uint8.
    """
    scaled = np.rint(AGES_PER_DOUBLING * np.log2(1 + np.maximum(seconds, 0.0)))
    fitting: npt.NDArray[np.uint8] = np.minimum(scaled, AGE_MAX).astype(np.uint8)
    return fitting
