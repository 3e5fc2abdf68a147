"""Checkpoints of recurrent states: copies behind an exact number of tokens, which prefix hits start from.

A state cannot be shared or cut back, so the KV of a prefix is of use only together with the state behind it. A
checkpoint is taken in two steps of the worker. The step that computes the row up to the position leaves the state in
the sequence's own blocks; the next one first copies these to fresh blocks. The checkpoint becomes an entry when both
have been acknowledged and the KV block before the position is indexed: it hangs on that block's entry, and goes with
it. An entry without holders is cached like KV, and evicted as a whole.

Only free and cached blocks are used. No sequence is evicted and no request preempted for a checkpoint.
"""

from __future__ import annotations

import numpy as np

from ..limits import Limits
from .blocks import CHECKPOINT, NO_BLOCKS, BlockIds, Blocks
from .checkpoint_positions import CheckpointPositions
from .entry_parts import NO_KEY
from .groups import FormingCheckpoint, Group
from .hashing import BlockHasher
from .indexing import Indexing
from .sequences import Sequences
from .supply import Spare


class Checkpoints:
    """Takes checkpoints of the sequences of all groups."""

    def __init__(
        self, limits: Limits, sequences: Sequences, blocks: Blocks, indexing: Indexing, hasher: BlockHasher
    ) -> None:
        self._sequences, self._blocks, self._indexing, self._hasher = sequences, blocks, indexing, hasher
        self._checkpoint_tokens = limits.cache.checkpoint_tokens

    def positions(self, group: Group) -> CheckpointPositions:
        """Return the positions for the group's model."""
        return CheckpointPositions(self._sequences.block_size, group.prompt_chunk, self._checkpoint_tokens)

    def following(self, group: Group, slot: int, prompt: int, start: int) -> int:
        """Return the first position of a sequence behind `start` at which a checkpoint is wanted.

        Args:
            group: The group of the sequence.
            slot: Its slot.
            prompt: Tokens of its request's prompt.
            start: Tokens computed so far.
        """
        s = self._sequences
        return self.positions(group).following(s.tokens[slot], prompt, int(s.shared_end[slot]), start)

    @staticmethod
    def last(group: Group, ids: BlockIds) -> int:
        """Return the most leading blocks of a sequence, [n] ids, that a checkpoint is behind; 0 for none."""
        found = group.pool.parts.checkpoints
        keys = group.index.keys(ids).tolist() if found else []
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in found), 0)

    def take_wanted(self, group: Group, slot: int, prompt: int, start: int) -> None:
        """Take a checkpoint of a running row if the planned steps leave its state where one is wanted.

        Args:
            group: The group.
            slot: The slot of the row.
            prompt: Tokens of its request's prompt.
            start: Where the tokens of its last step began.
        """
        s = self._sequences
        if s.running[slot] and s.scheduled[slot] == self.following(group, slot, prompt, start):
            self.take(group, slot)

    def take(self, group: Group, slot: int) -> None:
        """Make the next step copy the state of a sequence, which the planned steps leave behind `scheduled` tokens.

        Nothing happens without room, or if there is such a checkpoint.
        """
        s, pool, size = self._sequences, group.pool, self._blocks.block_size
        tokens, tenant = int(s.scheduled[slot]), int(s.tenant[slot])
        value = self._chained(slot, tokens)
        entry = pool.index.find(value)
        if entry is not None and pool.index.key(entry) in pool.parts.checkpoints:
            return
        if any(forming.value == value for forming in group.forming):
            return
        if not pool.has(tenant, group.state_blocks, NO_BLOCKS, Spare(group.running + 1, 1)):
            return
        fresh = pool.allocate(tenant, group.state_blocks)
        self._blocks.kind[fresh] = CHECKPOINT
        step = group.next_step
        for source, target in zip(s.states_of(slot).tolist(), fresh.tolist(), strict=True):
            group.copy_held(source, target, size)
        s.last_step[slot] = step
        pool.await_step(step)
        forming = FormingCheckpoint(slot, int(s.id[slot]), tokens, tuple(fresh.tolist()), step, value)
        group.forming.append(forming)

    def _chained(self, slot: int, tokens: int) -> int:
        """Return the chained hash of a sequence's first tokens, which end a block."""
        s, size = self._sequences, self._blocks.block_size
        first = int(s.hashed[slot])
        values = self._hasher.chain(int(s.chain[slot]), self._indexing.contents(s.tokens[slot, first * size : tokens]))
        return int(values[-1]) if values.size else int(s.chain[slot])

    def computed(self, group: Group) -> None:
        """Note the entries that forming checkpoints hang on, once the rows before them are acknowledged."""
        s, size = self._sequences, self._blocks.block_size
        for forming in group.forming:
            slot, full = forming.slot, forming.tokens // size
            if forming.key != NO_KEY or s.id[slot] != forming.sequence_id or s.computed[slot] < forming.tokens:
                continue
            if s.hashed[slot] < full or not group.index.alive(int(s.parent[slot])):
                self._indexing.filled_by(group, slot, full)
            if s.hashed[slot] == full:
                forming.key = int(s.parent[slot])

    def settle(self, group: Group) -> None:
        """End the taking of checkpoints with a step that is done: they become entries, or are dropped."""
        pool = group.pool
        over = [forming for forming in group.forming if forming.step <= pool.done_step]
        group.forming = [forming for forming in group.forming if forming.step > pool.done_step]
        for forming in over:
            if forming.key != NO_KEY and pool.index.alive(forming.key) and forming.key not in pool.parts.checkpoints:
                pool.add_checkpoint(forming.key, forming.blocks)
            pool.release(np.array(forming.blocks, np.int64), 0)

    def leave(self, group: Group, slot: int) -> None:
        """Drop the checkpoints that are being taken of a sequence that gives up its blocks before its row's result."""
        lost = [each for each in group.forming if each.slot == slot and each.key == NO_KEY]
        group.forming = [each for each in group.forming if each.slot != slot or each.key != NO_KEY]
        for forming in lost:
            group.release(np.array(forming.blocks, np.int64), forming.step)
