"""The recurrent states behind drafted tokens, in pages behind those of the pool that belong to no sequence.

A pass advances the state in a sequence's own pages by its last known token alone, which is no draft. Each drafted token
of the step copies the state before it and advances the copy. Once it is known how many drafts are accepted, the state
behind the last one is copied to the sequence's pages, before anything of the next step is queued.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from kvforge.protocol.messages import Int32Array
from kvforge.worker.attention.pool import KvPool

from .pending import PendingStep


def draft_pages(pool: KvPool, count: int) -> Int32Array:
    """Return the pages of the states behind the drafted tokens of a step.

    Args:
        pool: The pool.
        count: Drafted tokens of the step.

    Returns:
        [count, state blocks] int32, pool-local ids.
    """
    pages = pool.geometry.state_blocks
    assert count <= pool.geometry.draft_states, "more drafted tokens than states"
    first = pool.blocks + 1  # behind the block of spare rows
    return np.arange(first, first + count * pages, dtype=np.int32).reshape(count, pages)


@torch.inference_mode()
def accept_states(
    pool: KvPool, pending: PendingStep, chosen: Mapping[int, Sequence[int]], left_out: Collection[int]
) -> None:
    """Queue the copies that take the states of sequences to their last accepted drafts.

    Args:
        pool: The pool.
        pending: A finished step with drafts.
        chosen: The tokens that it sampled, by slot, of rows that did not fail.
        left_out: Slots that later steps have assigned to new requests.
    """
    rows = pending.rows
    if pool.states is None or rows is None or rows.drafts is None or rows.draft_states is None or rows.states is None:
        return
    first = np.cumsum(rows.drafts) - rows.drafts
    sources, targets = [], []
    for row in np.flatnonzero(rows.drafts).tolist():
        slot = int(rows.slots[row])
        accepted = len(chosen.get(slot, ())) - 1
        if accepted > 0 and slot not in left_out:
            sources.append(rows.draft_states[first[row] + accepted - 1])
            targets.append(rows.states[row])
    if sources:
        both = pool.device.upload(np.array([sources, targets], np.int64).reshape(2, -1))
        pool.states.copy_pages(both[0], both[1])
