"""Shared parts of the attention benchmarks: the layer, the storage of its K and V, and the reference libraries."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

import torch

from kvforge.worker.attention.quantised import is_quantised, quantise

BLOCK_SIZE = 16
SPLIT = 4096  # blocks quantised at a time: float32 copies of all blocks would be large


@dataclass(frozen=True)
class Shape:
    """Query heads, K and V heads, and numbers of a head of one layer."""

    heads: int
    kv_heads: int
    head_size: int

    @property
    def scaling(self) -> float:
        """Factor of q.k."""
        return float(self.head_size**-0.5)


LLAMA = Shape(32, 8, 128)  # Llama-3.1-8B


def stored(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return numbers [blocks, ...] float as a pool of `dtype` stores them, and their scales or None."""
    if not is_quantised(dtype):
        return numbers.to(dtype), None
    parts = [quantise(part, dtype) for part in torch.split(numbers, SPLIT)]
    return torch.cat([part for part, _ in parts]), torch.cat([scales for _, scales in parts])


def flashinfer_version() -> str | None:
    """Return FlashInfer's version, or None if it is not installed or does not load."""
    try:
        import flashinfer  # noqa: F401

        return importlib.metadata.version("flashinfer-python")
    except ImportError:
        return None
