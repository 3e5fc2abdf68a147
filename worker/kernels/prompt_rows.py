"""The prompt rows of a step, cut into chunks for the kernels of layers with a recurrent state.

Chunks end at absolute multiples of CHUNK. A *tile* holds one chunk of one row: CHUNK places, the first of them at an
absolute position that is a multiple of CHUNK. Places without a token of the row stay empty, so that a token is always
at the same place, whatever the other rows are and however the prompt was cut into steps.

Tiles are grouped into segments, because what a kernel keeps of each tile takes memory. A segment has the next tiles of
all rows, or of some of many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.mixed_batch import MixedBatch

CHUNK = 64  # tokens
SEGMENT_TILES = 64  # of a segment

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Tiles that are computed together.

    Attributes:
        tiles: [tiles, 4] int32 on the device, a part of `PromptRows.tiles`.
        spans: [rows, 2] int32 on the device: the first tile of each row, and how many follow each other.
    """

    tiles: torch.Tensor
    spans: torch.Tensor


@dataclass(frozen=True)
class PromptRows:
    """Rows of prompt tokens, one of each sequence.

    Attributes:
        starts: [rows] int64 on the host, position of each row's first token.
        firsts: [rows] int64 on the host, index of this token among the tokens of the step.
        counts: [rows] int64 on the host, tokens of each row.
        rows: [rows, 3] int32 on the device, contiguous: the three.
        tiles: [tiles, 4] int32 on the device: the row of each tile, the index of the token at its first place (which
            may be of another row, or negative), and the first and the end of its places with tokens of the row.
        segments: The tiles in order.
    """

    starts: IntArray
    firsts: IntArray
    counts: IntArray
    rows: torch.Tensor
    tiles: torch.Tensor
    segments: tuple[Segment, ...]

    def begins(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `StateOperations.begins`. Everything is computed on the device: a graph's rows change."""
        start, first, count = self.rows.long().unbind(1)
        marks = torch.zeros(len(x) + 1, dtype=torch.bool, device=x.device)  # the last one for rows that begin earlier
        marks[torch.where((start == 0) & (count > 0), first, len(x))] = True
        return marks[:-1]

    def chunks(self, row: int) -> list[tuple[int, int]]:
        """Return the chunks of a row as [first, end) of its own tokens."""
        start, count = int(self.starts[row]), int(self.counts[row])
        borders = [0, *range(CHUNK - start % CHUNK, count, CHUNK), count]
        return list(pairwise(borders)) if count else []


def prompt_rows(
    starts: IntArray, firsts: IntArray, counts: IntArray, upload: Callable[[npt.NDArray[np.int32]], torch.Tensor]
) -> PromptRows:
    """Cut rows into tiles.

    Args:
        starts: [rows] int64, position of each row's first token.
        firsts: [rows] int64, index of this token among the tokens of the step.
        counts: [rows] int64, tokens of each row, at least 1.
        upload: Copies an array to the device.

    Returns:
        The rows.
    """
    count = len(starts)
    tiles, row, place = _tiles(starts, firsts, counts)
    share, groups = max(1, SEGMENT_TILES // count), -(-count // SEGMENT_TILES)
    segment = place // share * groups + row // SEGMENT_TILES
    on_device = upload(tiles[np.lexsort((place, row, segment))].astype(np.int32))
    segments, behind = list[Segment](), 0
    for number in np.unique(segment):
        taken = np.bincount(row[segment == number], minlength=count)
        spans = np.stack((np.cumsum(taken) - taken, taken), axis=1)
        before, behind = behind, behind + int(taken.sum())
        segments.append(Segment(on_device[before:behind], upload(spans.astype(np.int32))))
    rows = upload(np.stack((starts, firsts, counts), axis=1).astype(np.int32))
    return PromptRows(starts, firsts, counts, rows, on_device, tuple(segments))


def fixed_prompt_rows(batch: MixedBatch) -> PromptRows:
    """Cut the prompt rows of a static batch into tiles, as many as its rows and tokens may have, in one segment.

    The last tiles may be empty. A row without tokens has no tile. The arrays on the device follow the batch's refills.
    """
    size = batch.size
    on_device = batch.device_array("tiles of prompts", _fixed_tiles).view(-1, 4)
    segment = Segment(on_device, batch.device_array("spans of prompts", _fixed_spans).view(size.prompts, 2))
    rows = batch.device_array("rows of prompts", _fixed_rows).view(size.prompts, 3)
    return PromptRows(*_prompts_of(batch), rows, on_device, (segment,))


def _prompts_of(batch: PagedBatch) -> tuple[IntArray, IntArray, IntArray]:
    assert isinstance(batch, MixedBatch), "the size of another batch is not fixed"
    own = slice(batch.size.prompts)
    return batch.starts[own], batch.query_starts[own], batch.counts[own]


def _fixed_tiles(batch: PagedBatch) -> npt.NDArray[np.int32]:
    assert isinstance(batch, MixedBatch)
    most = batch.size.prompt_tokens // CHUNK + 2 * batch.size.prompts
    assert most <= SEGMENT_TILES, "the tiles of a static batch are more than a segment has"
    padded, (own, _, _) = np.zeros((most, 4), np.int32), _tiles(*_prompts_of(batch))
    padded[: len(own)] = own
    return padded


def _fixed_spans(batch: PagedBatch) -> npt.NDArray[np.int32]:
    rows = _prompts_of(batch)
    taken = np.bincount(_tiles(*rows)[1], minlength=len(rows[0]))
    return np.stack((np.cumsum(taken) - taken, taken), axis=1).astype(np.int32)


def _fixed_rows(batch: PagedBatch) -> npt.NDArray[np.int32]:
    return np.stack(_prompts_of(batch), axis=1).astype(np.int32)


def _tiles(starts: IntArray, firsts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the tiles of rows, row after row: [tiles, 4] as in `PromptRows`, and the row and the place of each."""
    ends = starts + counts
    tiles_of = np.where(counts > 0, (ends - 1) // CHUNK - starts // CHUNK + 1, 0)
    row = np.repeat(np.arange(len(starts)), tiles_of)
    place = np.arange(len(row)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    position = (starts[row] // CHUNK + place) * CHUNK
    begin, end = np.maximum(starts[row] - position, 0), np.minimum(ends[row] - position, CHUNK)
    return np.stack((row, firsts[row] + position - starts[row], begin, end), axis=1), row, place
