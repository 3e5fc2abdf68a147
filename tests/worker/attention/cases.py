"""Steps of random rows in a pool with NaN in unreachable slots, and dense attention in float64 over them."""

from __future__ import annotations

import numpy as np
import torch

from kvforge.worker.attention import AttentionOptions, KvLayer, PagedAttention, PagedBatch
from kvforge.worker.attention.quantised import is_quantised
from kvforge.worker.attention.reference import write_kv
from kvforge.worker.device.device import Device

# Largest error of attention over normally distributed K and V against float64, by the coarser dtype.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.int8: 5e-2,
    torch.float8_e4m3fn: 0.25,
}
# The same for the root mean square over all outputs.
TOLERANCE_RMS = {
    torch.float32: 1e-6,
    torch.float16: 4e-4,
    torch.bfloat16: 4e-3,
    torch.int8: 8e-3,
    torch.float8_e4m3fn: 3e-2,
}

# (start, count) of each row: ragged lengths from 1, across block boundaries of every size tested.
STEPS = {
    "decode": [(0, 1), (1, 1), (7, 1), (8, 1), (127, 1), (130, 1), (300, 1)],
    "prefill": [(0, 2), (0, 33), (0, 140)],
    "mixed": [(17, 1), (0, 9), (64, 40), (3, 1), (15, 2)],
}
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}


class Case:
    """One step. dtype: the model's. kv_dtype: the pool's; None: the same."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: tuple[int, int],
        head_size: int,
        block_size: int,
        device: Device,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(head_size * 1000 + block_size)
        rng = np.random.default_rng(block_size)
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.starts = np.array([start for start, _ in rows], np.int32)
        self.counts = np.array([count for _, count in rows], np.int32)
        self.lengths = self.starts + self.counts
        width = -(-int(self.lengths.max()) // block_size) + 1
        needed = -(-self.lengths // block_size)
        blocks = int(needed.sum()) + 2
        ids = rng.permutation(blocks)
        self.tables = np.full((len(rows), width), 2**31 - 1, np.int32)  # entries past a row's tokens are never read
        for row, count in enumerate(needed):
            self.tables[row, :count], ids = ids[:count], ids[count:]
        self.layer = broken_layer((blocks, block_size, heads[1], head_size), self.kv_dtype, device)
        self.keys, self.values = self.layer.keys, self.layer.values
        self.batch = PagedBatch.build(self.tables, self.starts, self.counts, block_size, device)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device.torch_device, dtype)

        self.query = random(self.batch.tokens, heads[0], head_size)
        self.k = [random(n, heads[1], head_size) for n in self.lengths]
        self.v = [random(n, heads[1], head_size) for n in self.lengths]
        for row, start in enumerate(self.starts):
            slots = self.batch.kv_slots_of(np.array([row]), np.arange(start)[None])[0]
            write_kv(self.k[row][:start], self.v[row][:start], self.layer, device.upload(slots))
        self.new_k = torch.cat([k[start:] for k, start in zip(self.k, self.starts, strict=True)])
        self.new_v = torch.cat([v[start:] for v, start in zip(self.v, self.starts, strict=True)])

    def paged(self, options: AttentionOptions, attention: PagedAttention) -> torch.Tensor:
        attention.write(self.new_k, self.new_v, self.layer, self.batch)
        return attention.attend(self.query, self.layer, self.batch, options)

    def dense(self, options: AttentionOptions) -> torch.Tensor:
        """Return [tokens, heads, head_size] float64, from K and V before they were stored."""
        group = self.query.shape[1] // self.keys.shape[2]
        outputs, place = [], 0
        for row, (start, count) in enumerate(zip(self.starts.tolist(), self.counts.tolist(), strict=True)):
            k = self.k[row].double().repeat_interleave(group, dim=1)
            v = self.v[row].double().repeat_interleave(group, dim=1)
            positions = torch.arange(start, start + count, device=k.device)[:, None]
            keys = torch.arange(start + count, device=k.device)
            seen = keys <= positions
            if options.window:
                seen &= keys > positions - options.window
            scores = torch.einsum("qhd,khd->hqk", self.query[place : place + count].double(), k) * options.scaling
            if options.softcap:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if options.sinks is not None:
                sinks = options.sinks.double()[:, None, None].expand(-1, count, 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., : len(keys)]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
            place += count
        return torch.cat(outputs)


def broken_layer(shape: tuple[int, int, int, int], dtype: torch.dtype, device: Device) -> KvLayer:
    """Return a layer with NaN in every slot. shape: [blocks, block_size, kv_heads, head_size]."""
    nan = float("nan")
    if not is_quantised(dtype):
        keys, values = (torch.full(shape, nan, dtype=dtype, device=device.torch_device) for _ in range(2))
        return KvLayer(keys, values)
    fill = 77.0 if dtype == torch.int8 else nan
    keys, values = (torch.full(shape, fill, device=device.torch_device).to(dtype) for _ in range(2))
    key_scales, value_scales = (torch.full(shape[:3], nan, device=device.torch_device) for _ in range(2))
    return KvLayer(keys, values, key_scales, value_scales)


def sinks(heads: int, device: Device) -> torch.Tensor:
    """Return [heads] sinks, of which the first outweighs all scores, the last has no weight, and the others differ."""
    found = torch.linspace(2.0, -1.0, heads)
    found[0], found[-1] = 200.0, -200.0
    return found.to(device.torch_device)


def compare(case: Case, options: AttentionOptions, attention: PagedAttention) -> None:
    """Compare paged with dense attention, within the tolerance of the dtypes."""
    got, want = case.paged(options, attention), case.dense(options)
    assert got.dtype == case.query.dtype
    assert got.shape == case.query.shape
    assert torch.isfinite(got).all()
    error = got.double() - want
    largest, rms = float(error.abs().max()), float(error.square().mean().sqrt())
    dtypes = {case.dtype, case.kv_dtype}
    allowed = sum(TOLERANCE[dtype] for dtype in dtypes), sum(TOLERANCE_RMS[dtype] for dtype in dtypes)
    problem = f"{dtypes}: {largest:.1e} at most, {rms:.1e} on average, where {allowed} are allowed"
    assert largest <= allowed[0], problem
    assert rms <= allowed[1], problem
