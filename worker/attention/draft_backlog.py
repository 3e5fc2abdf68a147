"""The generated tokens for which a draft model or a head has no K and V yet.

A step of generated tokens computes nothing for what drafts. It stores the id of each token in the token's slot, and a
proposal computes the K and V of the tokens that lack them first. Steps compute those of prompt tokens.

Ids lie on the device with the K and V, so that copies of a block bring them along (`KvGeometry.keeps_tokens`). They
are stored as id + 1, and 0 stands for a prompt token. What a proposal has computed since is known on the host alone:
behind a copy from the host tier, the K and V of all generated tokens of a block are computed again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .batch import Int32Array, IntArray, PagedBatch

BoolArray = npt.NDArray[np.bool_]


class DraftBacklog:
    """Which tokens of a pool lack the drafter's K and V; see the module.

    Args:
        blocks: Blocks of the drafter's pool, its scratch blocks included.
        block_size: Tokens per block.
        tokens: [blocks, block_size, 1] int32 on the device, as the module describes them.
    """

    def __init__(self, blocks: int, block_size: int, tokens: torch.Tensor) -> None:
        self._block_size, self._tokens = block_size, tokens
        self._lacking = np.zeros((blocks, block_size), np.bool_)
        self._suspect = np.zeros(blocks, np.bool_)  # blocks that may have such tokens
        self._unread = np.zeros(blocks, np.bool_)  # blocks for which only the device knows it

    def write(self, tables: Int32Array, starts: Int32Array, counts: Int32Array, generated: BoolArray) -> None:
        """Note the tokens of a step.

        Args:
            tables: [rows, width] int32, pool-local block ids.
            starts: [rows] int32.
            counts: [rows] int32.
            generated: [sum(counts)] bool, the generated tokens: they have no K and V of the drafter.
        """
        rows, positions = np.arange(len(counts)), starts.astype(np.int64)
        if len(generated) != len(counts):
            rows = np.repeat(rows, counts)
            positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
        blocks = tables[rows, positions // self._block_size]
        self._lacking[blocks, positions % self._block_size] = generated
        self._suspect[blocks[generated]] = True

    def copy(self, copies: Int32Array) -> None:
        """Note copies of blocks; see `KvPool.copy_blocks`."""
        sources, targets, _ = copies.T
        before = self._lacking[sources]
        for (_, target, tokens), lacking in zip(copies.tolist(), before, strict=True):
            self._lacking[target, :tokens] = lacking[:tokens]
        self._suspect[targets] |= self._suspect[sources]
        self._unread[targets] |= self._unread[sources]

    def clear(self, blocks: Int32Array) -> None:
        """Note that blocks were zeroed."""
        self._lacking[blocks] = self._suspect[blocks] = self._unread[blocks] = False

    def load(self, blocks: Int32Array) -> None:
        """Note that the contents of whole blocks came from another tier."""
        self._suspect[blocks] = self._unread[blocks] = True

    def find(self, tables: Int32Array, ends: Int32Array) -> tuple[IntArray, IntArray]:
        """Return the tokens of rows that lack K and V. Waits for the device if another tier's copies are among them.

        Args:
            tables: [rows, width] int32, pool-local block ids.
            ends: [rows] int32; tokens at positions below are looked at.

        Returns:
            Row and position of each, [n] int64, in this order.
        """
        columns = -(-ends // self._block_size)
        inside = np.arange(int(columns.max(initial=0))) < columns[:, None]
        tables = np.where(inside, tables[:, : inside.shape[1]], 0)
        rows, at = np.nonzero(self._suspect[tables] & inside)
        blocks = tables[rows, at]
        self._read(np.unique(blocks[self._unread[blocks]]))
        which, offsets = np.nonzero(self._lacking[blocks])
        self._suspect[blocks] = self._lacking[blocks].any(1)
        rows, positions = rows[which], at[which] * self._block_size + offsets
        below = positions < ends[rows]
        return rows[below], positions[below]

    def settle(self, slots: IntArray) -> None:
        """Note that the tokens in these slots have K and V, [n] int64."""
        self._lacking.reshape(-1)[slots] = False

    def _read(self, blocks: Int32Array) -> None:
        """Ask the device which tokens of blocks are generated ones."""
        if len(blocks):
            index = torch.from_numpy(blocks.astype(np.int64)).to(self._tokens.device)
            self._lacking[blocks] = self._tokens[index, :, 0].cpu().numpy() != 0
            self._unread[blocks] = False


def store_tokens(token_ids: torch.Tensor, tokens: torch.Tensor, batch: PagedBatch, slots: torch.Tensor) -> None:
    """Store the ids of a step's generated tokens, and 0 for its prompt tokens.

    Args:
        token_ids: [tokens] int64 on the device.
        tokens: [blocks, block_size, 1] int32 on the device.
        batch: The step.
        slots: [tokens] int64 on the device, from `slots_or_spare`.
    """
    stored = token_ids.int() + 1
    if not batch.generated.all():
        stored = stored * batch.device_array("generated tokens", generated_tokens)
    tokens.view(-1).index_copy_(0, slots, stored)


def stored_tokens(tokens: torch.Tensor, slots: torch.Tensor, below: int) -> torch.Tensor:
    """Return the ids of generated tokens in slots [n] int64, [n] int32 on the device.

    Kernels read a table of embeddings unchecked, and a step that failed may have left anything: ids are made to be in
    [0, below).
    """
    return tokens.view(-1).index_select(0, slots).sub_(1).clamp_(0, below - 1)


def slots_or_spare(batch: PagedBatch, spare: int) -> torch.Tensor:
    """Return the slot of each token, [tokens] int64 on the device; for padding of a static batch, the slot `spare`."""
    slots = batch.kv_slots_on_device.long()
    # A number in `torch.where` would be copied from the host, which no capture allows.
    return slots.masked_fill(slots < 0, spare)


def generated_tokens(batch: PagedBatch) -> Int32Array:
    """Return 1 for each generated token of a batch and 0 for the others, [tokens] int32."""
    found = np.zeros(len(batch.kv_slots), np.int32)
    found[batch.query_starts[:-1][batch.generated]] = 1
    return found
