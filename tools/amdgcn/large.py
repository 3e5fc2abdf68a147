"""Suite checks: pools of more than 2^31 elements, with only a few blocks touched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from kvforge.worker.attention import KvLayer, PagedBatch
from kvforge.worker.attention.interface import AttentionOptions
from kvforge.worker.attention.quantised import is_quantised
from kvforge.worker.attention.reference import ReferenceAttention
from kvforge.worker.attention.triton_attention import TritonAttention

from .driver import Emulated
from .shapes import BF16, I8, MULTIPROCESSORS, Run, _name

BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE = 1_200_000, 16, 2, 64
TABLES = np.array([[BLOCKS - 1, BLOCKS - 3, 5], [BLOCKS - 2, 0, 1_100_000]], np.int32)
STARTS, COUNTS = np.array([17, 3], np.int32), np.array([1, 9], np.int32)


def pools() -> Iterator[tuple[str, Run]]:
    """Yield a check per storage dtype: write, decode and prefill at both ends of a large pool."""
    for stored in (BF16, I8):
        gib = BLOCKS * BLOCK_SIZE * KV_HEADS * SIZE * stored.itemsize / 2**30
        yield f"write, decode and prefill in a pool of {gib:.1f} GiB of {_name(stored)}", partial(_pool, stored)


def _pool(stored: torch.dtype, emulated: Emulated) -> str:
    device = emulated.device(MULTIPROCESSORS)
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(20, 2, KV_HEADS, SIZE, generator=generator).to(BF16)
    new = torch.randn(10, 12, SIZE, generator=generator).to(BF16)
    query, key, value = new[:, :8], new[:, 8:10], new[:, 10:]
    results = []
    for attention in (TritonAttention(device), ReferenceAttention()):
        layer = _layer(stored)
        old = PagedBatch.build(TABLES, np.zeros(2, np.int32), STARTS, BLOCK_SIZE, device)
        ReferenceAttention().write(before[:, 0].contiguous(), before[:, 1].contiguous(), layer, old)
        batch = PagedBatch.build(TABLES, STARTS, COUNTS, BLOCK_SIZE, device)
        attention.write(key, value, layer, batch)
        results.append(attention.attend(query.contiguous(), layer, batch, AttentionOptions(0.125)).float())
    difference = float((results[0] - results[1]).abs().max() / results[1].abs().max())
    return "" if difference <= 0.05 else f"differs by {difference:.1e} of the largest number"


def _layer(stored: torch.dtype) -> KvLayer:
    """Allocate a layer; the operating system commits its pages on first touch."""
    shape = (BLOCKS, BLOCK_SIZE, KV_HEADS)
    scales = [torch.empty(shape) for _ in range(2)] if is_quantised(stored) else []
    return KvLayer(*(torch.empty((*shape, SIZE), dtype=stored) for _ in range(2)), *scales)
