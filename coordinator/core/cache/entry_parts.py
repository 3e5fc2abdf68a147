"""Parts of a pool's index entries: the window blocks and the checkpoints that hang on them.

An entry is for a KV block. A hit also needs the layers with a window, or the recurrent state, as they were behind the
block's tokens. So blocks with these hang on the entry, by its key, and go with it. The parts of an entry are held,
cached and evicted as a whole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .blocks import CHECKPOINT, KV, WINDOW, Blocks
from .host_parts import CHECKPOINT as CHECKPOINT_PART
from .prefix_cache import PrefixCache

NO_KEY = -1


class EntryParts:
    """The parts of the entries of one pool.

    Attributes:
        checkpoints: Blocks of the checkpoints of recurrent states, by the key of the KV block before their position.
        checkpoint_of: The key of the entry for each of these blocks.
        windows: Window blocks for the tokens of KV blocks, by the key of these. See `windows`.
        window_keys: The entry that each window block hangs on, or NO_KEY: [end] int64.
    """

    def __init__(self, blocks: Blocks, index: PrefixCache, end: int) -> None:
        """Begin without parts. All ids of window blocks will be below `end`, which is 0 for a model without them."""
        self._blocks, self._index = blocks, index
        self.checkpoints: dict[int, tuple[int, ...]] = {}
        self.checkpoint_of: dict[int, int] = {}
        self.windows: dict[int, tuple[int, ...]] = {}
        self.window_keys = np.full(end, NO_KEY)

    def restore(self, checkpoints: dict[int, tuple[int, ...]], windows: dict[int, tuple[int, ...]]) -> None:
        """Set the parts to those of a snapshot. The flags of their blocks are restored elsewhere."""
        self.checkpoints, self.windows = checkpoints, windows
        self.checkpoint_of = {block: key for key, blocks in checkpoints.items() for block in blocks}
        for key, blocks in windows.items():
            self.window_keys[list(blocks)] = key

    def part_of(self, block: int) -> tuple[int, int] | None:
        """Return the entry that a window block or a block of a checkpoint hangs on, and the number of the part."""
        if self.windows and (key := self.window_keys.item(block)) != NO_KEY:
            return key, self.windows[key].index(block)
        if (held := self.checkpoint_of.get(block)) is not None:
            return held, CHECKPOINT_PART + self.checkpoints[held].index(block)
        return None

    # ------------------------------------------------------------------------------------------------- checkpoints

    def add_checkpoint(self, key: int, blocks: tuple[int, ...]) -> None:
        """Make held blocks the checkpoint that hangs on an index entry without one."""
        assert key not in self.checkpoints and self._index.alive(key)
        self.checkpoints[key] = blocks
        self.checkpoint_of.update(dict.fromkeys(blocks, key))
        self._blocks.indexed[np.array(blocks, np.int64)] = True

    def drop_checkpoint(self, key: int) -> tuple[int, ...]:
        """Remove a checkpoint from its entry, and return its blocks. They keep their marks of indexed blocks."""
        blocks = self.checkpoints.pop(key)
        for block in blocks:
            del self.checkpoint_of[block]
        return blocks

    # ----------------------------------------------------------------------------------------------- window blocks

    def add_windows(self, keys: list[int], ids: npt.NDArray[np.integer]) -> None:
        """Hang held window blocks on live index entries, unless either has others already.

        Args:
            keys: Keys of the entries, [n].
            ids: The window blocks of each, [n, window_pages].
        """
        windows, key_of = self.windows, self.window_keys
        if windows.keys().isdisjoint(keys) and np.count_nonzero(key_of[ids[:, 0]] == NO_KEY) == len(keys):
            parts, column = dict(zip(keys, map(tuple, ids.tolist()), strict=True)), np.array(keys)[:, None]
            key_of[ids] = column
            if len(parts) == len(keys) and np.count_nonzero(key_of[ids] == column) == ids.size:
                windows.update(parts)  # nearly always: no two rows have the same block
                self._blocks.indexed[ids] = True
                return
            key_of[ids] = NO_KEY
        added: list[int] = []
        for place, (key, blocks) in enumerate(zip(keys, ids.tolist(), strict=True)):
            if key not in windows and key_of[blocks[0]] == NO_KEY:
                windows[key] = tuple(blocks)
                key_of[blocks] = key
                added.append(place)
        self._blocks.indexed[ids[added]] = True

    def drop_window(self, key: int) -> tuple[int, ...]:
        """Remove the window blocks of an entry, and return them. They keep their marks of indexed blocks."""
        blocks = self.windows.pop(key)
        for block in blocks:
            self.window_keys[block] = NO_KEY
        return blocks

    # ------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self, base: int, count: int) -> None:
        """Check that entries and their parts agree, which are blocks [base, base + count)."""
        self._check_checkpoints()
        self._check_windows()
        region = np.arange(base, base + count)
        indexed = region[self._blocks.indexed[region] & (self._blocks.kind[region] != KV)]
        keyed = np.flatnonzero(self.window_keys != NO_KEY).tolist()
        assert set(indexed.tolist()) == {*self.checkpoint_of, *keyed}, "indexed blocks of other kinds"

    def _check_windows(self) -> None:
        blocks = [block for each in self.windows.values() for block in each]
        keyed = np.flatnonzero(self.window_keys != NO_KEY).tolist()
        assert len(set(blocks)) == len(blocks) and set(blocks) == set(keyed), "window blocks of entries"
        assert all(self.window_keys[block] == key for key, each in self.windows.items() for block in each)
        assert all(map(self._index.alive, self.windows)), "window blocks outlive the entry that they hang on"
        ids = np.array(blocks, np.int64)
        assert (self._blocks.kind[ids] == WINDOW).all() and self._blocks.indexed[ids].all(), "window blocks of an entry"
        for each in self.windows.values():
            assert len(set(self._blocks.state[list(each)].tolist())) == 1, "a part of an entry's window blocks is held"

    def _check_checkpoints(self) -> None:
        blocks = [block for each in self.checkpoints.values() for block in each]
        assert len(set(blocks)) == len(blocks) and self.checkpoint_of.keys() == set(blocks), "blocks of checkpoints"
        assert all(self.checkpoint_of[block] == key for key, each in self.checkpoints.items() for block in each)
        assert all(map(self._index.alive, self.checkpoints)), "a checkpoint outlives the entry that it hangs on"
        ids = np.array(blocks, np.int64)
        assert (self._blocks.kind[ids] == CHECKPOINT).all() and self._blocks.indexed[ids].all(), "a checkpoint's blocks"
        for each in self.checkpoints.values():
            assert len(set(self._blocks.state[list(each)].tolist())) == 1, "a part of a checkpoint is held"
