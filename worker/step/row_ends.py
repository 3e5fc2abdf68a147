"""Where the answers of a finished step's rows go on, for a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvforge.worker.drafts.drafter import RowEnd

from .checks import Rows
from .pending import PendingStep


def row_ends(
    pending: PendingStep, later: PendingStep | None, chosen: Mapping[int, Sequence[int]], block_size: int
) -> dict[int, RowEnd]:
    """Return where the answers of slots go on.

    Args:
        pending: The finished step.
        later: The step in flight behind it; None for none. It may have moved a row's last block, so that its tables
            count, and a row that it does not have is left out.
        chosen: The tokens that the step sampled, by slot.
        block_size: Tokens per block.
    """
    rows, newest = pending.rows, pending.rows if later is None else later.rows
    if rows is None or newest is None:
        return {}
    at = _places(rows)
    at_newest = at if later is None else _places(newest)
    ends: dict[int, RowEnd] = {}
    for slot, tokens in chosen.items():
        if slot not in at or slot not in at_newest:
            continue
        row, new = at[slot], at_newest[slot]
        drafted = int(rows.drafts[row]) if rows.drafts is not None else 0
        accepted = len(tokens) - 1
        position = int(rows.starts[row]) + int(rows.counts[row]) - drafted + accepted
        start, end = int(newest.starts[new]), int(newest.starts[new]) + int(newest.counts[new])
        if later is not None and (start != position or slot in later.begun or slot in later.errors):
            continue
        table = newest.tables[new, : -(-end // block_size)]
        ends[slot] = RowEnd(tokens[-1], position, table, drafted, accepted)
    return ends


def _places(rows: Rows) -> dict[int, int]:
    return {slot: row for row, slot in enumerate(rows.slots.tolist())}
