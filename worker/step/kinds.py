"""Which of a step's tokens are of a prompt, and which were generated: each kind has a way of its own through attention.

A token that was generated is computed again in the very way in which it was computed first, as a row of one token
behind all before it, whatever is recomputed with it; a prompt's tokens always go as they would in a prefill, be it a
single one that is left of a chunk. The two ways round differently. So recomputing gives the same bits as computing did.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvforge.protocol.messages import GENERATED, Int32Array

from .checks import BoolArray, Rows

CELLS_MAX = 1 << 22  # of the block tables of one pass: each generated token has a row of its own


def told_apart(tokens: Int32Array, counts: Int32Array, marked: bool) -> tuple[Int32Array, BoolArray]:
    """Token ids without marks, and which of them were generated: [sum(counts)] each.

    marked: the coordinator says which; else a row of a single token is taken for a generated one.
    """
    if not marked:
        return tokens, np.repeat(counts == 1, counts)
    generated = tokens.view(np.uint32) >= GENERATED  # as NO_TOKEN is, taken as unsigned
    return np.where(tokens >= GENERATED, tokens - GENERATED, tokens), generated


def by_kind(rows: Rows) -> tuple[Rows, BoolArray]:
    """The rows cut into stretches of a prompt and generated tokens, each a row of its own; and which of them are those.

    What a row samples, its last part does.
    """
    alone = rows.generated
    if len(alone) == len(rows) or not alone.any():
        return rows, alone if len(alone) == len(rows) else np.zeros(len(rows), np.bool_)
    first = np.cumsum(rows.counts) - rows.counts  # where each row begins among the tokens
    begins = alone.copy()
    begins[1:] |= alone[:-1]
    begins[first] = True
    (places,) = np.nonzero(begins)
    of = np.searchsorted(first, places, side="right") - 1
    last = np.append(of[1:] != of[:-1], True)
    counts = np.diff(np.append(places, len(alone)))
    starts = rows.starts[of] + places - first[of]
    samples = np.where(last, rows.samples[of], 0)
    cut = Rows(
        rows.slots[of],
        starts.astype(np.int32),
        counts.astype(np.int32),
        samples.astype(np.int32),
        rows.tokens,
        rows.tables[of],
        alone,
    )
    return cut, alone[places]


def passes(rows: Rows, decodes: BoolArray) -> Iterator[tuple[Rows, BoolArray]]:
    """All rows, or some after the other where their tables would take too much memory together. A row's own parts stay
    in their order, so each finds the keys and values of those before it."""
    size = max(1, CELLS_MAX // max(1, rows.tables.shape[1]))
    if len(rows) <= size:
        yield rows, decodes
        return
    for first in range(0, len(rows), size):
        chosen = np.zeros(len(rows), np.bool_)
        chosen[first : first + size] = True
        yield rows.pick(chosen), decodes[chosen]
