"""Prompt tokens and generated tokens of a step: each kind takes its own path through attention.

The two paths round differently, so recomputation must choose the path of the first computation to give the same bits.
A generated token is always computed as a decode: a row of one token after all earlier ones, whatever else is
recomputed with it. Prompt tokens always take the prefill path, even when a chunk leaves a single one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvforge.protocol.messages import GENERATED, Int32Array

from .checks import BoolArray, Rows

CELLS_MAX = 1 << 22  # limit of the block tables of one pass, in entries: each generated token has its own row


def split_marks(
    tokens: Int32Array, counts: Int32Array, marked: bool, drafts: Int32Array | None = None
) -> tuple[Int32Array, BoolArray]:
    """Strip the marks from token ids.

    Args:
        tokens: [sum(counts)] int32 ids, marked or not.
        counts: [rows] int32, tokens of each row.
        marked: Whether the coordinator marks generated tokens. Otherwise a row of a single token counts as generated,
            and so does one with drafts.
        drafts: [rows] int32, drafted tokens of each row; None for none.

    Returns:
        The ids without marks, and a mask of the generated tokens: [sum(counts)] each.
    """
    if not marked:
        return tokens, np.repeat(counts == 1 if drafts is None else (counts == 1) | (drafts > 0), counts)
    generated = tokens.view(np.uint32) >= GENERATED  # NO_TOKEN, viewed as unsigned, counts as generated too
    return np.where(tokens >= GENERATED, tokens - GENERATED, tokens), generated


def split_by_kind(rows: Rows) -> tuple[Rows, BoolArray]:
    """Split rows into runs of prompt tokens and single generated tokens.

    The last part of a row samples for it. All parts of a row with drafts sample.

    Returns:
        The parts as rows, and a mask [parts] of the generated tokens.
    """
    alone = rows.generated
    if len(alone) == len(rows) or not alone.any():
        return rows, alone if len(alone) == len(rows) else np.zeros(len(rows), np.bool_)
    first = np.cumsum(rows.counts) - rows.counts  # where each row begins among the tokens
    if alone.all():  # a GPU is idle while this looks at a step with drafts
        places, of = np.arange(len(alone)), np.repeat(np.arange(len(rows)), rows.counts)
        counts = np.ones(len(alone), np.int32)
    else:
        begins = alone.copy()
        begins[1:] |= alone[:-1]
        begins[first] = True
        (places,) = np.nonzero(begins)
        of = np.searchsorted(first, places, side="right") - 1
        counts = np.diff(np.append(places, len(alone)))
    last = np.append(of[1:] != of[:-1], True)
    starts = rows.starts[of] + places - first[of]
    samples = np.where(last if rows.drafts is None else last | (rows.drafts[of] > 0), rows.samples[of], 0)
    states = None if rows.states is None else rows.states[of]
    sources = None
    if states is not None and rows.draft_states is not None and rows.drafts is not None:
        states, sources = _draft_states(rows.draft_states, states, rows.drafts[of] > 0, places > first[of])
    cut = Rows(
        rows.slots[of],
        starts.astype(np.int32),
        counts.astype(np.int32, copy=False),
        samples.astype(np.int32, copy=False),
        rows.tokens,
        rows.tables[of],
        alone,
        rows.scoring,
        states,
        None if rows.windows is None else rows.windows.pick(of),
        sources=sources,
    )
    return cut, alone[places]


def _draft_states(
    pages: Int32Array, states: Int32Array, drafted: BoolArray, later: BoolArray
) -> tuple[Int32Array, Int32Array]:
    """Return the pages that parts of rows write their states to, and those that they go on with.

    Args:
        pages: [drafts, state blocks], for the drafted tokens in order.
        states: [parts, state blocks], the pages of their sequences.
        drafted: [parts] of rows with drafts.
        later: [parts] that are not the first of their row.
    """
    states, behind = states.copy(), np.flatnonzero(drafted & later)
    states[behind] = pages
    sources = states.copy()
    sources[behind] = states[behind - 1]
    return states, sources


def split_drafts(rows: Rows) -> Rows | None:
    """Return the rows with each drafted token as a row of its own; None if another row has several tokens."""
    if rows.drafts is None:
        return rows if len(rows.tokens) == len(rows) else None
    return split_by_kind(rows)[0] if len(rows.tokens) == len(rows) + rows.drafts.sum() else None


def split_passes(rows: Rows, decodes: BoolArray) -> Iterator[tuple[Rows, BoolArray]]:
    """Split rows into passes so that the block tables of one pass stay within CELLS_MAX.

    The parts of one row keep their order, so each finds the keys and values of the earlier ones.
    """
    size = max(1, CELLS_MAX // max(1, rows.tables.shape[1]))
    if len(rows) <= size:
        yield rows, decodes
        return
    for first in range(0, len(rows), size):
        chosen = np.zeros(len(rows), np.bool_)
        chosen[first : first + size] = True
        yield rows.pick(chosen), decodes[chosen]
