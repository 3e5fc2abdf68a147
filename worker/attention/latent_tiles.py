"""Tile sizes of attention over latents, by heads, numbers of a token, dtype and target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from kvforge.worker.device.target import Target

from .prefill_plan import gluon_problem
from .quantised import is_quantised


@dataclass(frozen=True)
class LatentTiles:
    """Tile sizes of decodes.

    Attributes:
        heads: Query heads of one program.
        tokens: Tokens of one step.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
        programs: Programs that a multiprocessor runs at a time.
        folds: Whether a program has registers for the sums of a part and of its group.
    """

    heads: int
    tokens: int
    warps: int
    stages: int
    programs: int
    folds: bool


LATENT_CLASSES = (256, 512)  # latents are padded to the next one: powers of two, as Triton's tiles must be
HOPPER_HEADS = 16
ROPE_MAX = 64  # rotary keys are padded to this


def latent_class(latent: int) -> int:
    """Return the size of a latent rounded up to one of LATENT_CLASSES."""
    return next(size for size in LATENT_CLASSES if latent <= size)


def hopper_problem(heads: int, latent: int, rope: int, dtype: torch.dtype, target: Target) -> str:
    """Return why `latent_hopper` cannot decode; "" if it can. dtype: dtype of the latents."""
    if not target.hopper:
        return "this device is not a Hopper GPU"
    is_wide = dtype.itemsize != 2 and not is_quantised(dtype)
    if heads > HOPPER_HEADS or latent not in LATENT_CLASSES or rope != ROPE_MAX or is_wide:
        return f"the Hopper kernel takes no {heads} heads over latents of {latent} + {rope} in {dtype}"
    return gluon_problem()


def _head_tile(heads: int, most: int) -> int:
    return max(16, min(most, int(triton.next_power_of_2(heads))))


def decode_tiles(heads: int, latent: int, dtype: torch.dtype, target: Target, quantised: bool = False) -> LatentTiles:
    """Return the tiles of decodes.

    Args:
        heads: Query heads.
        latent: Numbers of a latent.
        dtype: Dtype of the queries.
        target: The architecture.
        quantised: Whether the latents are widened to that dtype. It takes registers: fewer tokens a step, more warps.
    """
    tiles = _decode_tiles(heads, latent, dtype, target)
    if not quantised:
        return tiles
    most = 16 if target.backend == "hip" else 32
    return replace(tiles, tokens=min(tiles.tokens, most), warps=max(tiles.warps, 8))


def _decode_tiles(heads: int, latent: int, dtype: torch.dtype, target: Target) -> LatentTiles:
    if target.backend == "cpu":
        tile = _head_tile(heads, 64)
        return LatentTiles(tile, 32, 1, 1, 2, tile <= 32)
    if dtype == torch.float32:
        return LatentTiles(16, 16, 4 if target.backend == "hip" else 8, 1, 1, True)
    if target.hopper:
        tile = _head_tile(heads, 64)
        return LatentTiles(tile, 64, 4 if tile == 16 else 8, 2, 1, tile <= 32)
    if target.matrix == "v_wmma":
        return LatentTiles(16, 16, 16, 1, 1, False)
    room = target.shared_bytes // (3 if target.backend == "cuda" else 1)
    tokens = 32
    while tokens > 16 and tokens * (latent_class(latent) + ROPE_MAX) * dtype.itemsize > room:
        tokens //= 2
    return LatentTiles(16, tokens, 8, 2 if target.backend == "cuda" else 1, 1, True)


@dataclass(frozen=True)
class LatentPrefillTiles:
    """Tile sizes of prefills.

    Attributes:
        queries: Tokens times query heads of one program.
        heads: Query heads of one program.
        tokens: Tokens of one step.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
    """

    queries: int
    heads: int
    tokens: int
    warps: int
    stages: int


def prefill_tiles(
    heads: int, latent: int, dtype: torch.dtype, target: Target, quantised: bool = False
) -> LatentPrefillTiles:
    """Return the tiles of prefills. For the arguments see `decode_tiles`."""
    decode = decode_tiles(heads, latent, dtype, target, quantised)
    queries, warps = decode.heads, decode.warps
    if target.backend == "cpu" or (target.hopper and dtype != torch.float32):
        queries, warps = 64, 8
    return LatentPrefillTiles(queries, _head_tile(heads, queries), decode.tokens, warps, decode.stages)
