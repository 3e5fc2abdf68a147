"""Suite checks: every code of the quantised formats, written and read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from kvforge.worker.attention import KvLayer, PagedBatch
from kvforge.worker.attention.interface import AttentionOptions
from kvforge.worker.attention.quantised import TOP, dequantise, quantise
from kvforge.worker.attention.triton_attention import TritonAttention
from kvforge.worker.attention.write import write_kv
from kvforge.worker.device.targets import current_target

from .driver import Emulated
from .shapes import BF16, F16, F32, FP8, I8, MULTIPROCESSORS, Run, _name

SIZE, BLOCK_SIZE = 64, 16
SCALES = (1.0, 0.37, 3e-6, 2.0**-20)
STEP = {BF16: 2.0**-8, F16: 2.0**-11}  # spacing of the model dtype's numbers, relative to the number
FORMATS = (I8, FP8)


def written() -> Iterator[tuple[str, Run]]:
    """Yield checks that writing rounds like torch, bit for bit.

    The inputs are all steps of a format, the midpoints between them, and the neighbours of both.
    """
    for stored in FORMATS:
        for model in (BF16, F16, F32):
            yield f"write, every step of {_name(stored)} from {_name(model)}", partial(_write, stored, model)


def _write(stored: torch.dtype, model: torch.dtype, emulated: Emulated) -> str:
    numbers = _steps(stored, model)[:, None].contiguous()
    count = len(numbers)
    shape = (-(-count // BLOCK_SIZE), BLOCK_SIZE, 1)
    caches = [torch.zeros((*shape, SIZE), dtype=stored) for _ in range(2)]
    layer = KvLayer(*caches, *(torch.full(shape, 9.0) for _ in range(2)))
    target = current_target(emulated.device(MULTIPROCESSORS))
    values, slots = numbers.flip(0).contiguous(), torch.arange(count, dtype=torch.int32)
    write_kv(None, numbers, values, None, None, layer, slots, target)
    sides = ((layer.keys, layer.key_scales, numbers), (layer.values, layer.value_scales, values))
    return "; ".join(filter(None, (_unlike(*side, stored, count) for side in sides)))


def _unlike(
    cache: torch.Tensor, scales: torch.Tensor | None, given: torch.Tensor, stored: torch.dtype, count: int
) -> str:
    assert scales is not None
    codes, wanted_scales = quantise(given, stored)
    got, got_scales = cache.view(torch.uint8).flatten(0, 1)[:count], scales.flatten(0, 1)[:count]
    if not torch.equal(got_scales.nan_to_num(-1), wanted_scales.nan_to_num(-1)):
        return "scales differ"
    wanted = codes.view(torch.uint8)
    wrong = (got != wanted) & ~got_scales.isnan()[..., None]
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} codes differ: {given[place]} is {got[place]}, not {wanted[place]}"


def _steps(stored: torch.dtype, model: torch.dtype) -> torch.Tensor:
    """Return [rows, SIZE] inputs; the last value of a row is the format's largest, which makes its scale 1.

    The last seven rows hold special values (NaN, infinities, a subnormal) and ordinary scales.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(stored).float()
    codes = codes[codes.isfinite()].sort().values  # 0 and -0 may stay side by side
    near = torch.cat([((codes[1:] + codes[:-1]) / 2).to(model), codes.to(model)])
    bits = {2: torch.int16, 4: torch.int32}[near.element_size()]
    near = torch.cat([near, (near.view(bits) + 1).view(model), (near.view(bits) - 1).view(model)])
    near = near[near.isfinite() & (near.abs() <= TOP[stored])]
    near = torch.cat([near, torch.zeros(-len(near) % (SIZE - 1), dtype=model)]).view(-1, SIZE - 1)
    rows = torch.cat([near, torch.full((len(near), 1), TOP[stored], dtype=model)], 1)
    odd = torch.zeros(7, SIZE, dtype=model)
    odd[1, 3], odd[2, 5], odd[3, 7], odd[4, 0] = torch.nan, torch.inf, -torch.inf, 1e-38
    odd[5] = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).to(model)
    odd[6] = 1e-3
    return torch.cat([rows, odd])


def read() -> Iterator[tuple[str, Run]]:
    """Yield checks that decode and prefill read each code as V, under several scales, and as K."""
    for stored in FORMATS:
        for model in (BF16, F16):
            for tokens, kernel in ((1, "decode"), (3, "prefill")):
                name = f"{kernel}, V of every code of {_name(stored)} for {_name(model)}"
                yield name, partial(_values, stored, model, tokens)
        yield f"decode, K of every code of {_name(stored)}", partial(_keys, stored)


def _codes(stored: torch.dtype) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8)
    return codes[(codes & 127) != 127] if stored == FP8 else codes[codes != 128]


def _batch(rows: int, started: int, tokens: int, emulated: Emulated) -> PagedBatch:
    """Build a batch of `rows` rows with one block each."""
    device = emulated.device(MULTIPROCESSORS)
    tables = np.arange(rows, dtype=np.int32)[:, None]
    return PagedBatch.build(
        tables, np.full(rows, started, np.int32), np.full(rows, tokens, np.int32), BLOCK_SIZE, device
    )


def _values(stored: torch.dtype, model: torch.dtype, tokens: int, emulated: Emulated) -> str:
    """Read every code as V: with equal keys, the attention output is V itself."""
    codes = _codes(stored)
    rows = torch.cat([codes, codes[: -len(codes) % SIZE]]).view(-1, SIZE)
    count = len(rows)
    cache = rows.view(stored).view(count, 1, 1, SIZE).repeat(1, BLOCK_SIZE, 1, 1)
    scales = torch.tensor(SCALES)[:count].view(count, 1, 1).repeat(1, BLOCK_SIZE, 1)
    layer = KvLayer(cache.clone(), cache.clone(), scales.clone(), scales.clone())
    query = torch.zeros(count * tokens, 4, SIZE, dtype=model)
    attention = TritonAttention(emulated.device(MULTIPROCESSORS))
    got = attention.attend(query, layer, _batch(count, 0, tokens, emulated), AttentionOptions(0.125)).float()
    want = dequantise(cache[:, 0, 0], scales[:, 0, 0]).repeat_interleave(tokens, 0)[:, None].expand_as(got)
    least = 2.0**-24 if model == F16 else 0.0  # the smallest number of float16
    wrong = (got - want).abs() > (want.abs() * 2.02 * STEP[model]).clamp_min(least)
    return (
        f"{int(wrong.sum())} of {wrong.numel()} differ: {got[wrong][:3]} for {want[wrong][:3]}" if wrong.any() else ""
    )


def _keys(stored: torch.dtype, emulated: Emulated) -> str:
    """Read every code as K: with two tokens, K = V = 0 and K = code, V = 1, the attention output is a sigmoid."""
    codes = _codes(stored)
    count, number = len(codes), codes.view(stored).float()
    rows, place = torch.arange(count), torch.arange(count) % SIZE
    keys, values = (torch.zeros(count, BLOCK_SIZE, 1, SIZE, dtype=torch.uint8) for _ in range(2))
    keys[rows, 0, 0, place] = codes
    values[:, 0] = torch.tensor(1.0).to(stored).view(torch.uint8)
    one = torch.ones(count, BLOCK_SIZE, 1)
    layer = KvLayer(keys.view(stored), values.view(stored), one.clone(), one.clone())
    factor = (1.0 / number.abs().clamp_min(2.0**-9)).half()
    query = torch.zeros(count, 4, SIZE, dtype=torch.float16)
    query[rows, :, place] = factor[:, None]
    attention = TritonAttention(emulated.device(MULTIPROCESSORS))
    got = attention.attend(query, layer, _batch(count, 1, 1, emulated), AttentionOptions(1.0)).float()
    want = torch.sigmoid(factor.float() * number)[:, None, None].expand_as(got)
    worst = float((got - want).abs().max())
    return "" if worst < 1e-3 else f"differs by {worst:.1e}"
