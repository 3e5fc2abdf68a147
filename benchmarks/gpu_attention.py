"""What the benchmarks of attention share: the layer, how its K and V are stored, and what it is measured beside."""

from __future__ import annotations

import importlib.metadata

import torch

from worker.attention.quantised import is_quantised, quantise

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16  # of Llama-3.1-8B
SCALING = HEAD_SIZE**-0.5
SPLIT = 4096  # blocks that are quantised at a time: float32 copies of all of them would be large


def stored(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """numbers [blocks, ...] float as a pool of `dtype` holds them, and their scales, None where there are none."""
    if not is_quantised(dtype):
        return numbers.to(dtype), None
    parts = [quantise(part, dtype) for part in torch.split(numbers, SPLIT)]
    return torch.cat([part for part, _ in parts]), torch.cat([scales for _, scales in parts])


def flashinfer_version() -> str | None:
    """None where it is not installed or does not load."""
    try:
        import flashinfer  # noqa: F401

        return importlib.metadata.version("flashinfer-python")
    except ImportError:
        return None
