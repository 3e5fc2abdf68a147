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

    def chunks(self, row: int) -> list[tuple[int, int]]:
        """Return the chunks of a row as [first, end) of its own tokens."""
        start, count = int(self.starts[row]), int(self.counts[row])
        borders = [0, *range(CHUNK - start % CHUNK, count, CHUNK), count]
        return list(pairwise(borders))


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
    ends, count = starts + counts, len(starts)
    tiles_of = (ends - 1) // CHUNK - starts // CHUNK + 1
    row = np.repeat(np.arange(count), tiles_of)
    place = np.arange(len(row)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)  # of a tile in its row
    position = (starts[row] // CHUNK + place) * CHUNK
    begin, end = np.maximum(starts[row] - position, 0), np.minimum(ends[row] - position, CHUNK)
    share, groups = max(1, SEGMENT_TILES // count), -(-count // SEGMENT_TILES)
    segment = place // share * groups + row // SEGMENT_TILES
    order = np.lexsort((place, row, segment))
    tiles = np.stack((row, firsts[row] + position - starts[row], begin, end), axis=1)[order]
    on_device = upload(tiles.astype(np.int32))
    segments, behind = list[Segment](), 0
    for number in np.unique(segment):
        taken = np.bincount(row[segment == number], minlength=count)
        spans = np.stack((np.cumsum(taken) - taken, taken), axis=1)
        before, behind = behind, behind + int(taken.sum())
        segments.append(Segment(on_device[before:behind], upload(spans.astype(np.int32))))
    rows = upload(np.stack((starts, firsts, counts), axis=1).astype(np.int32))
    return PromptRows(starts, firsts, counts, rows, on_device, tuple(segments))
