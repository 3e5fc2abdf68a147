"""Where the answers of a finished step's rows go on, for a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvforge.worker.drafts.drafter import RowEnd

from .pending import PendingStep


def row_ends(pending: PendingStep, chosen: Mapping[int, Sequence[int]], block_size: int) -> dict[int, RowEnd]:
    """Return where the answers of slots go on.

    Args:
        pending: The finished step, with none in flight behind it.
        chosen: The tokens that the step sampled, by slot.
        block_size: Tokens per block.
    """
    rows = pending.rows
    if rows is None:
        return {}
    ends: dict[int, RowEnd] = {}
    for row, slot in enumerate(rows.slots.tolist()):
        if slot not in chosen:
            continue
        tokens, end = chosen[slot], int(rows.starts[row]) + int(rows.counts[row])
        drafted = int(rows.drafts[row]) if rows.drafts is not None else 0
        table = rows.tables[row, : -(-end // block_size)]
        ends[slot] = RowEnd(tokens[-1], end - drafted + len(tokens) - 1, table)
    return ends
