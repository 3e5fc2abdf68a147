"""Tile sizes of the experts' products, by the pairs of an expert and the target.

The bits of a token must not depend on the number of pairs. All choices for a weight therefore have the same depth, and
differ only in rows and tokens, which no sum runs over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvforge.worker.device.target import Target


@dataclass(frozen=True)
class GroupedTiles:
    """Tile sizes of one product.

    Attributes:
        rows: Rows of the weight in one tile, of gate and up together.
        depth: Inner dimension of one step.
        tokens: Pairs of a token and an expert in one tile.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
        prefetch: Steps of the weight that are fetched into the L2 cache before the inputs are ready.
        early: Whether the next kernel may start before this one's loop.
    """

    rows: int
    depth: int
    tokens: int
    warps: int
    stages: int
    prefetch: int = 0
    early: bool = False


ROWS, DEPTH = 64, 32  # the smallest tile that larger ones are multiples of
# Pairs per expert on average up to which a block of this many pairs is used.
HOPPER_TOKENS = {16: 6, 32: 20, 64: 48, 128: 1 << 30}
OTHER_TOKENS = {16: 12, 64: 1 << 30}
RDNA_TOKENS = {16: 12, 32: 1 << 30}


def is_even(rows: int, k: int) -> bool:
    """Return whether tiles divide a weight [rows, k]. rows: of gate and up together."""
    return rows % ROWS == 0 and k % DEPTH == 0


def tokens_per_block(pairs: int, experts: int, dtype: torch.dtype, target: Target, *, even: bool = True) -> int:
    """Return the pairs of a block. even: whether tiles divide both weights.

    Masks of tiles that do not, and products without matrix instructions, exceed the registers with more pairs.
    """
    if not even or (target.backend == "cuda" and not target.matrix):
        return 16
    table = OTHER_TOKENS
    if target.hopper and dtype != torch.float32:
        table = HOPPER_TOKENS
    elif target.matrix == "v_wmma":
        if dtype == torch.float32:
            return 16  # more take more than a thread's registers
        table = RDNA_TOKENS
    return next(tokens for tokens, most in table.items() if pairs <= most * experts)


def tiles_for(tokens: int, rows: int, k: int, dtype: torch.dtype, target: Target) -> GroupedTiles:
    """Return the tiles of a product.

    Args:
        tokens: Pairs of a block.
        rows: Rows of an expert's weight, of gate and up together.
        k: Columns of an expert's weight.
        dtype: Dtype of the weight.
        target: The architecture.
    """
    if dtype == torch.float32 or not target.matrix or not is_even(rows, k):
        return GroupedTiles(ROWS, DEPTH, tokens, 4, 2)
    depth = next(size for size in (128, 64, DEPTH) if k % size == 0)
    tall = 2 * ROWS if rows % (2 * ROWS) == 0 else ROWS
    if not target.hopper:
        depth = min(depth, 64)
        high = tall if tokens == 64 and target.backend == "cuda" else ROWS
        return GroupedTiles(high, depth, tokens, 4, 3 if target.backend == "cuda" else 2)
    # On an H100 three stages of 16 KiB are as fast as any number (benchmarks/results/gpu_experts.json). An H200 gains
    # by a fourth where the depth is 64 (benchmarks/NOTES.md).
    if tokens <= 32:
        return GroupedTiles(ROWS if depth == 128 else tall, depth, tokens, 4, 3 if depth == 128 else 4, prefetch=1)
    return GroupedTiles(tall, depth, tokens, 8 if tokens * tall > 64 * 128 else 4, 3)


def backend_options(target: Target) -> dict[str, Any]:
    """Return launch keywords that fix the matrix instruction: AMD's compiler would choose it by the tile's sizes."""
    return {"matrix_instr_nonkdim": 16} if target.matrix == "v_mfma" else {}
