"""Paged decode attention over latents: launches of its kernels, and their workspace.

`latent_planner(...).plan(lengths)` makes a step's plan on the host; every layer's launch reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.target import HEAD_UNIT, Target, in_units

from .latent_decode_kernel import latent_decode_kernel, latent_merge_kernel
from .latent_plan import LatentPlanner
from .latent_tiles import LATENT_CLASSES, ROPE_MAX, decode_tiles, hopper_problem, latent_class
from .quantised import as_bytes, is_quantised

LOG2_E = 1.4426950408889634
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MERGE_COLUMNS = 128  # numbers that one warp merges, and one program where there are few rows


@dataclass(frozen=True)
class LatentWorkspace:
    """Memory that a launch needs beyond its arguments. Consecutive launches share it.

    Attributes:
        partials: [slots, heads, latent] float32.
        sizes: [slots, heads, 2] float32.
    """

    partials: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def allocate(cls, planner: LatentPlanner, heads: int, latent: int, device: torch.device) -> LatentWorkspace:
        """Allocate a workspace for a planner and a shape."""
        shape = (planner.items_max, heads)
        partials = torch.empty((*shape, latent), dtype=torch.float32, device=device)
        return cls(partials, torch.empty((*shape, 2), dtype=torch.float32, device=device))


def latent_problem(latent: int, rope: int, dtype: torch.dtype, target: Target) -> str:
    """Return why the kernels cannot serve latents and rotary keys of these sizes; "" if they can."""
    if latent % HEAD_UNIT or rope % HEAD_UNIT or not 0 < latent <= LATENT_CLASSES[-1] or not 0 < rope <= ROPE_MAX:
        return f"no kernel supports latents of {latent} with rotary keys of {rope}"
    if dtype not in DTYPES and not is_quantised(dtype):
        return f"no kernel reads latents of {dtype}"
    if (target.backend == "cuda" and not target.matrix) or (target.matrix == "v_wmma" and dtype == torch.float32):
        return f"{target.name} has no matrix instructions for {dtype}"
    return ""


def latent_planner(rows_max: int, heads: int, latent: int, dtype: torch.dtype, target: Target) -> LatentPlanner:
    """Return the planner of `latent_decode` for these shapes. dtype: dtype of the query."""
    tiles = decode_tiles(heads, latent, dtype, target)
    programs = max(1, target.multiprocessors * tiles.programs // ceil_div(heads, tiles.heads))
    return LatentPlanner(rows_max, programs, tiles.folds)


def latent_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    planner: LatentPlanner,
    plan: torch.Tensor,
    output: torch.Tensor,
    workspace: LatentWorkspace,
    scaling: float,
    target: Target,
    scales: torch.Tensor | None = None,
) -> None:
    """Compute attention of one new token of each row to its row. Rows without a plan keep the contents of output.

    Args:
        query: [rows, heads, latent + rotary key] float on the device, in the space of the latents; each row's heads are
            contiguous.
        cache: [blocks, block_size, 1, latent + rotary key], contiguous: `KvLayer.keys` of a layer with latents.
        tables: [rows, width] int32 on the device, rows contiguous.
        planner: From `latent_planner` with the same shapes and target, for at least as many rows.
        plan: [planner.size] int32 on the device, from `planner`.
        output: [rows, heads, latent], contiguous.
        workspace: For that planner, or a larger one.
        scaling: Factor of q.k.
        target: The architecture.
        scales: `KvLayer.key_scales`, of quantised latents.
    """
    rows, heads, _ = query.shape
    latent = output.shape[2]
    compute_items(query, cache, tables, planner, plan, output, workspace, scaling * LOG2_E, target, scales)
    columns = latent_class(latent) if rows * heads >= target.multiprocessors else MERGE_COLUMNS
    # Results in flight. Room for many of them leaves a multiprocessor few programs, which counts where there are many.
    stages = 16 if target.hopper and rows * heads <= 4 * target.multiprocessors else 4
    latent_merge_kernel[(rows * heads * ceil_div(latent, columns),)](
        plan[planner.merges :],
        workspace.partials,
        workspace.sizes,
        output,
        HEADS=heads,
        LATENT=latent,
        COLUMNS=columns,
        STAGES=stages,
        CHAINED=target.chained,
        num_warps=columns // MERGE_COLUMNS,
        **({"launch_pdl": True} if target.chained else {}),
    )


def compute_items(
    query: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    planner: LatentPlanner,
    plan: torch.Tensor,
    output: torch.Tensor,
    workspace: LatentWorkspace,
    scale: float,
    target: Target,
    scales: torch.Tensor | None = None,
) -> None:
    """Compute the items of the plan. scale: factor of scores, giving units of log2."""
    _, heads, width = query.shape
    latent = output.shape[2]
    tiles = decode_tiles(heads, latent, query.dtype, target, quantised=scales is not None)
    bitwise = cache.dtype in target.bitwise
    programs = min(planner.items_max * ceil_div(heads, tiles.heads), target.multiprocessors * tiles.programs)
    if not hopper_problem(heads, latent, width - latent, cache.dtype, target):
        from .latent_hopper import launch

        launch(query, cache, scales, tables, plan, output, workspace, scale, programs, target.chained)
        return
    latent_decode_kernel[(programs,)](
        query,
        as_bytes(cache) if bitwise else cache,
        cache if scales is None else scales,
        tables,
        plan,
        output,
        workspace.partials,
        workspace.sizes,
        scale,
        *in_units(query.stride(0)),
        tables.stride(0),
        HEADS=heads,
        LATENT=latent,
        ROPE=width - latent,
        BLOCK_SIZE=cache.shape[1],
        LATENT_TILE=latent_class(latent),
        ROPE_TILE=ROPE_MAX,
        HEAD_TILE=tiles.heads,
        TOKENS=tiles.tokens,
        STAGES=tiles.stages,
        FOLDS=tiles.folds,
        WIDEN=target.widens,
        CHAINED=target.chained,
        QUANTISED=scales is not None,
        BITWISE=bitwise,
        E4M3=cache.dtype == torch.float8_e4m3fn,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **({"launch_pdl": True} if target.chained else {}),
    )
