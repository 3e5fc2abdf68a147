"""The small operations that Numba compiles for the CPU: plain torch's numbers, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from kvforge.worker.attention import ReferenceAttention
from kvforge.worker.attention.cpu_attention import CpuAttention
from kvforge.worker.cpu.kernel import cpu_kernels_problem
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import PlainOperations
from kvforge.worker.kernels.cpu_operations import CpuOperations
from kvforge.worker.kernels.layer_weights import Norm
from tests.worker.attention.cases import Case

pytestmark = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem())
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative to the largest number: 32 bits may differ in the last bits, 16 bits in the last one.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    assert got.shape == want.shape and got.dtype == want.dtype
    return float((got.double() - want.double()).abs().max()) <= TOLERANCE[got.dtype] * float(want.double().abs().max())


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])) * 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 16), (9, 64), (30, 97), (600, 72)])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_computes_what_plain_torch_does(
    threads: int, rows: int, width: int, dtype: torch.dtype, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.worker.kernels.cpu_operations.threads_for", lambda _: threads)
    table, weight, x = random(50, width, dtype=dtype), random(width, dtype=dtype), random(rows, width, dtype=dtype)
    tokens = torch.arange(rows).remainder(50)
    heads = random(rows, 5 * width, dtype=dtype)
    product, bias = random(2 * 33, width, dtype=dtype), random(2 * 33, dtype=dtype)

    def summed(ops: PlainOperations) -> tuple[torch.Tensor, ...]:
        residual = x.flip(0).contiguous()
        return ops.add_norm(x[None], residual, weight, 1e-5), residual

    def by_heads(ops: PlainOperations) -> tuple[torch.Tensor, ...]:
        numbers = heads.clone()
        ops.head_norm(numbers, weight, weight + 1, 3, 1, 1e-5)
        assert torch.equal(numbers[:, 4 * width :], heads[:, 4 * width :]), "V is left alone"
        return (numbers,)

    offset = Norm(weight, 1e-5, offset=1.0, rounds_first=False)
    norms = [Norm(weight, 1e-5), offset, replace(offset, bias=weight), replace(offset, centred=True)]

    def in_place(ops: PlainOperations, norm: Norm) -> tuple[torch.Tensor, ...]:
        values = heads.unflatten(1, (-1, width)).clone()
        ops.norm(values[:, 3:], norm, values[:, 3:])
        assert torch.equal(values[:, :3], heads.unflatten(1, (-1, width))[:, :3]), "others are left alone"
        return (values,)

    def of_heads(ops: PlainOperations, norm: Norm) -> tuple[torch.Tensor, ...]:
        numbers = heads.clone()
        ops.norm_heads(numbers, norm, replace(norm, weight=weight + 1), 3, 1)
        assert torch.equal(numbers[:, 4 * width :], heads[:, 4 * width :]), "V is left alone"
        return (numbers,)

    def combined(ops: PlainOperations, norm: Norm) -> tuple[torch.Tensor, ...]:
        residual = x.flip(0).contiguous()
        return ops.combine(torch.stack((x, x)), residual, norm, 0.5, norm), residual

    runs: list[Callable[[PlainOperations], Any]] = [
        *(partial(run, norm=norm) for norm in norms for run in (in_place, of_heads, combined)),
        *(partial(lambda ops, norm: (ops.norm(x, norm),), norm=norm) for norm in norms),
        lambda ops: ops.embed(tokens, table, weight, 1e-5),
        summed,
        by_heads,
        lambda ops: (ops.gated(x, product, bias),),
    ]
    for run in runs:
        for got, want in zip(run(CpuOperations(cpu)), run(PlainOperations()), strict=True):
            assert near(got, want)


def test_a_row_has_the_same_bits_beside_others(cpu: Device) -> None:
    ops, x, weight = CpuOperations(cpu), random(700, 90, dtype=torch.float32), random(90, dtype=torch.float32)
    whole = ops.add_norm(x[None], torch.ones_like(x), weight, 1e-6)
    for row in (0, 1, 6, 699):
        assert torch.equal(ops.add_norm(x[None, row : row + 1], torch.ones(1, 90), weight, 1e-6)[0], whole[row])


def test_what_is_not_finite_stays_so_in_its_row(cpu: Device) -> None:
    ops, x = CpuOperations(cpu), random(3, 40, dtype=torch.float32)
    x[1, 7] = float("nan")
    normed = ops.add_norm(x[None], torch.zeros_like(x), torch.ones(40), 1e-6)
    assert normed[1].isnan().all() and normed[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize("rotated", [2, 24, 64, 80])
def test_what_is_stored_is_the_references_to_the_last_bit(
    rotated: int, kv_dtype: torch.dtype, dtype: torch.dtype, cpu: Device
) -> None:
    found = []
    for attention in (CpuAttention(), ReferenceAttention()):
        case = Case([(5, 3), (40, 1), (0, 20)], (6, 2), 80, 16, cpu, dtype, kv_dtype)
        tokens = case.batch.tokens
        angles = torch.randn(tokens, rotated, generator=torch.Generator().manual_seed(1)).to(dtype)
        packed = torch.cat((case.query, case.new_k, case.new_v), dim=1)
        query, key, value = packed.split((6, 2, 2), dim=1)
        turned = attention.write_rotated(query, key, value, angles.cos(), angles.sin(), case.layer, case.batch)
        assert torch.equal(key, case.new_k) and torch.equal(value, case.new_v)
        stored = [case.layer.keys.clone(), case.layer.values.clone()]
        attention.write(value, key, case.layer, case.batch)
        found.append([turned, *stored, case.layer.keys, case.layer.values])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_a_token_without_a_slot_is_stored_nowhere(cpu: Device) -> None:
    case = Case([(8, 1), (3, 1)], (2, 2), 64, 8, cpu)
    before = case.keys.clone()
    case.batch.kv_slots[1] = -1
    CpuAttention().write(case.new_k, case.new_v, case.layer, case.batch)
    changed = (case.keys.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1).any(-1)
    assert changed.nonzero().tolist() == [[int(case.tables[0, 1]), 0]]


@pytest.mark.parametrize("rounds_first", [False, True])
def test_a_norm_rounds_where_plain_torch_does(rounds_first: bool, cpu: Device) -> None:
    """A rounding in another place changes a fifth of the numbers; another order of sums changes few."""
    x, weight = random(40, 96, dtype=torch.bfloat16), random(96, dtype=torch.bfloat16)
    norm = Norm(weight, 1e-6, offset=1.0, rounds_first=rounds_first)
    got, want = (ops.norm(x, norm) for ops in (CpuOperations(cpu), PlainOperations()))
    assert float((got == want).float().mean()) > 0.98
    beside = CpuOperations(cpu).norm(x[7:8], norm)
    assert torch.equal(beside[0], got[7]), "the same bits alone"
