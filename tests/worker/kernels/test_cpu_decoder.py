"""Steps of a few decodes on the CPU: the same bits as the layers give one operation at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.cpu.kernel import Calls, cpu_kernels_problem
from kvforge.worker.cpu.layer_kernels import gate
from kvforge.worker.device.device import Device
from kvforge.worker.kernels.cpu_decoder import ROWS_MAX
from kvforge.worker.kernels.cpu_operations import CpuOperations
from kvforge.worker.kernels.packed import packing_problem, quantising_problem
from kvforge.worker.loading.model import LoadedModel
from tests.pairs import every_pair

pytestmark = [
    pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem()),
    pytest.mark.usefixtures("quick_loads"),
]
BLOCK_SIZE, WIDTH, LENGTH_MAX = 4, 8, 30


class Beside:
    """Compares every decode of `HostDecoder` with the single operations, on the same pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        decode = CpuOperations.decode

        def both(ops: CpuOperations, decoder: Any, *arguments: Any) -> torch.Tensor | None:
            want = decoder._layers(*arguments, None).clone()
            cache = [tensor.clone() for layer in arguments[3].layers for tensor in (layer.keys, layer.values)]
            found = decode(ops, decoder, *arguments)
            if found is not None:
                assert torch.equal(found, want)
                after = [tensor for layer in arguments[3].layers for tensor in (layer.keys, layer.values)]
                assert all(torch.equal(one, other) for one, other in zip(cache, after, strict=True))
                self.rows.append(len(found))
            return found

        monkeypatch.setattr(CpuOperations, "decode", both)


def step(model: LoadedModel, pool: KvPool, lengths: list[int], counts: list[int]) -> torch.Tensor:
    """Return the logits of rows with the given old and new tokens, each row in its own blocks."""
    rows = np.arange(len(lengths), dtype=np.int32)
    tables = rows[:, None] * WIDTH + np.arange(WIDTH, dtype=np.int32)
    starts, news = np.array(lengths, np.int32), np.array(counts, np.int32)
    batch = PagedBatch.build(tables, starts, news, BLOCK_SIZE, model.device)
    positions = torch.cat([torch.arange(start, start + new) for start, new in zip(lengths, counts, strict=True)])
    tokens = (positions * 7 + 3) % model.vocab_size
    return model.forward(tokens, positions, torch.from_numpy(np.cumsum(counts) - 1), batch, pool)


def pool_of(model: LoadedModel) -> KvPool:
    pool = KvPool(model.geometry, (ROWS_MAX + 1) * WIDTH, model.device)
    for tensor in pool.tensors():
        tensor.zero_()
    return pool


KINDS = (("float32", "dtype"), ("bfloat16", "dtype"), ("float32", "int8"), ("bfloat16", "int4"))


@pytest.mark.parametrize(("model_type", "dtype", "weights"), every_pair(["llama", "qwen2", "qwen3", "smollm3"], KINDS))
@torch.inference_mode()
def test_decodes_have_the_bits_of_the_operations_one_by_one(
    model_type: str,
    dtype: str,
    weights: str,
    tiny: Callable[..., LoadedModel],
    cpu: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = getattr(torch, dtype)
    if problem := packing_problem(cpu, kind) if weights == "dtype" else quantising_problem(cpu, kind, weights):
        pytest.skip(problem)
    model, beside = tiny(model_type, dtype=dtype, weight_dtype=weights, hidden_size=128), Beside(monkeypatch)
    pool, other = pool_of(model), pool_of(model)
    lengths = [(5 * row) % LENGTH_MAX for row in range(ROWS_MAX + 1)]
    for each in (pool, other):
        step(model, each, [0] * len(lengths), [length + 1 for length in lengths])
    counts = (1, 3, 9, ROWS_MAX, 2, ROWS_MAX + 1)
    for rows in counts:  # more and fewer than the step before
        logits = step(model, pool, lengths[:rows], [1] * rows)
        assert logits.isfinite().all()
    step(model, other, lengths[:3], [1] * 3)
    step(model, pool, lengths[:3], [1, 2, 1])  # includes a prompt
    assert beside.rows == [*counts[:-1], 3]


@torch.inference_mode()
def test_decodes_with_sinks_have_the_bits_of_the_operations_one_by_one(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, beside = tiny("llama"), Beside(monkeypatch)
    assert model.fused is not None
    options = [
        replace(layer.options, sinks=torch.linspace(2.0, -2.0 - number, layer.heads))
        for number, layer in enumerate(model.fused.layers)
    ]
    layers = tuple(replace(layer, options=each) for layer, each in zip(model.fused.layers, options, strict=True))
    with_sinks = replace(model, fused=replace(model.fused, layers=layers))
    found = []
    for each in (model, with_sinks):
        pool = pool_of(each)
        step(each, pool, [0] * 3, [4] * 3)
        found.append(step(each, pool, [4] * 3, [1] * 3))
    assert beside.rows == [3, 3]
    assert float((found[0] - found[1]).abs().max()) > 1e-3


@torch.inference_mode()
def test_a_row_that_is_not_finite_spoils_no_later_step(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("llama")
    pool = pool_of(model)
    step(model, pool, [0] * 9, [4] * 9)
    want = step(model, pool, [4] * 9, [1] * 9)
    pool.layers[0].keys[10 * WIDTH : 16 * WIDTH] = float("nan")
    assert step(model, pool, [4] * 16, [1] * 16)[10:].isnan().all()
    assert torch.equal(step(model, pool, [4] * 9, [1] * 9), want)


@torch.inference_mode()
def test_kv_in_fewer_bits_goes_one_by_one(tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model, beside = tiny("llama"), Beside(monkeypatch)
    assert all(layer.keys.dtype == torch.float32 for layer in pool_of(model).layers)
    quantised = KvPool(replace(model.geometry, kv_dtype="int8"), 2 * WIDTH, model.device)
    assert step(model, quantised, [0], [5]).isfinite().all()
    assert step(model, quantised, [5], [1]).isfinite().all()
    assert beside.rows == []


def test_calls_are_filled_by_name_one_by_one_or_all() -> None:
    x, found = torch.arange(12.0).view(3, 4), torch.zeros(3, 2)
    calls = Calls(gate, [{"stride": 16, "target": found[row].data_ptr(), "count": 2} for row in range(3)])
    calls.renew(rows=1)
    for row in range(3):
        calls.run(1, row, source=x[row].data_ptr())
    want = torch.nn.functional.silu(x[:, :2]) * x[:, 2:]
    assert torch.allclose(found, want)
    found.zero_()
    calls.renew()  # otherwise no tickets are left
    calls.run(1, 2, source=x[2].data_ptr())
    assert torch.allclose(found[2], want[2]) and not found[:2].any()
