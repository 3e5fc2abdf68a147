"""The reference attention against dense attention in float64, and its checks at the edge."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import InvalidRequest
from worker.attention import AttentionOptions, PagedBatch, choose_attention
from worker.device import Device

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

# (start, count) of each row: ragged lengths from 1, across block boundaries of every size tested.
STEPS = {
    "decode": [(0, 1), (1, 1), (7, 1), (8, 1), (127, 1), (130, 1), (300, 1)],
    "prefill": [(0, 2), (0, 33), (0, 140)],
    "mixed": [(17, 1), (0, 9), (64, 40), (3, 1), (15, 2)],
}
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}


class Case:
    """Random K, V and queries of a step, in a pool whose unreachable slots hold NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: tuple[int, int],
        head_size: int,
        block_size: int,
        device: Device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(head_size * 1000 + block_size)
        rng = np.random.default_rng(block_size)
        self.starts = np.array([start for start, _ in rows], np.int32)
        self.counts = np.array([count for _, count in rows], np.int32)
        lengths = self.starts + self.counts
        width = -(-int(lengths.max()) // block_size) + 1
        needed = -(-lengths // block_size)
        blocks = int(needed.sum()) + 2
        ids = rng.permutation(blocks)
        self.tables = np.full((len(rows), width), 2**31 - 1, np.int32)  # entries past a row's tokens are never read
        for row, count in enumerate(needed):
            self.tables[row, :count], ids = ids[:count], ids[count:]
        shape = (blocks, block_size, heads[1], head_size)
        self.keys = torch.full(shape, float("nan"), dtype=dtype)
        self.values = torch.full(shape, float("nan"), dtype=dtype)
        self.batch = PagedBatch.build(self.tables, self.starts, self.counts, block_size, device)
        tokens = self.batch.tokens
        self.query = torch.randn((tokens, heads[0], head_size), generator=generator).to(dtype)
        self.k = [torch.randn((n, heads[1], head_size), generator=generator).to(dtype) for n in lengths]
        self.v = [torch.randn((n, heads[1], head_size), generator=generator).to(dtype) for n in lengths]
        for row, start in enumerate(self.starts):
            for position in range(start):
                block = self.tables[row, position // block_size]
                self.keys[block, position % block_size] = self.k[row][position]
                self.values[block, position % block_size] = self.v[row][position]
        self.new_k = torch.cat([k[start:] for k, start in zip(self.k, self.starts, strict=True)])
        self.new_v = torch.cat([v[start:] for v, start in zip(self.v, self.starts, strict=True)])

    def paged(self, options: AttentionOptions, device: Device) -> torch.Tensor:
        attention = choose_attention(device)
        attention.write(self.new_k, self.new_v, self.keys, self.values, self.batch)
        return attention.attend(self.query, self.keys, self.values, self.batch, options)

    def dense(self, options: AttentionOptions) -> torch.Tensor:
        """[tokens, heads, head_size] float64, one query at a time."""
        group = self.query.shape[1] // self.keys.shape[2]
        outputs, place = [], 0
        for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            k = self.k[row].double().repeat_interleave(group, dim=1)
            v = self.v[row].double().repeat_interleave(group, dim=1)
            for position in range(start, start + count):
                low = max(position - options.window + 1, 0) if options.window else 0
                seen = slice(low, position + 1)
                scores = torch.einsum("hd,khd->hk", self.query[place].double(), k[seen]) * options.scaling
                if options.softcap:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen]))
                place += 1
        return torch.stack(outputs)


def compare(case: Case, options: AttentionOptions, device: Device) -> None:
    got, want = case.paged(options, device), case.dense(options)
    assert got.dtype == case.query.dtype
    assert got.shape == case.query.shape
    assert torch.isfinite(got).all()
    assert float((got.double() - want).abs().max()) <= TOLERANCE[case.query.dtype]


# behaviour 37
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_paged_equals_dense(head_size: int, block_size: int, cpu: Device) -> None:
    for rows, heads in itertools.product(STEPS.values(), HEADS.values()):
        case = Case(rows, heads, head_size, block_size, cpu)
        compare(case, AttentionOptions(scaling=head_size**-0.5), cpu)


# behaviour 37
@pytest.mark.parametrize("window", [1, 5, 16, 64, 1000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_window_and_softcap(heads: tuple[int, int], softcap: float, window: int, cpu: Device) -> None:
    for rows in STEPS.values():
        compare(Case(rows, heads, 64, 16, cpu), AttentionOptions(0.3, window=window, softcap=softcap), cpu)


# behaviour 37
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_half_precision(dtype: torch.dtype, softcap: float, cpu: Device) -> None:
    for rows in STEPS.values():
        compare(Case(rows, (6, 2), 64, 16, cpu, dtype), AttentionOptions(0.125, softcap=softcap), cpu)


# behaviour 37
def test_slots_before_the_window_may_be_anything(cpu: Device) -> None:
    case = Case([(40, 1), (40, 3)], (4, 2), 64, 8, cpu)
    for row in range(2):
        case.keys[case.tables[row, :4]] = float("nan")
        case.values[case.tables[row, :4]] = float("inf")
    compare(case, AttentionOptions(0.125, window=8), cpu)  # positions 33 and later: blocks 4 and 5


def test_write_touches_only_its_slots(cpu: Device) -> None:
    case = Case([(3, 2), (8, 1)], (2, 2), 64, 8, cpu)
    before = case.keys.clone()
    choose_attention(cpu).write(case.new_k, case.new_v, case.keys, case.values, case.batch)
    written = case.batch.slot_mapping
    expected = [case.tables[0, 0] * 8 + 3, case.tables[0, 0] * 8 + 4, case.tables[1, 1] * 8]
    assert written.tolist() == expected
    assert torch.equal(case.keys.flatten(0, 1)[written], case.new_k)
    untouched = torch.ones(case.keys.shape[0] * 8, dtype=torch.bool)
    untouched[written] = False
    assert torch.equal(
        case.keys.flatten(0, 1)[untouched].nan_to_num(7.0), before.flatten(0, 1)[untouched].nan_to_num(7.0)
    )


def _bad_attend() -> dict[str, tuple[str, dict[str, Any]]]:
    good = torch.zeros(3, 4, 64)
    cache = torch.zeros(6, 8, 2, 64)
    return {
        "dimensions": ("query", {"query": good[0]}),
        "tokens": ("query", {"query": torch.zeros(2, 4, 64)}),
        "heads": ("query", {"query": torch.zeros(3, 5, 64)}),
        "head size": ("query", {"query": torch.zeros(3, 4, 32)}),
        "integers": ("query", {"query": good.long()}),
        "device": ("query", {"query": good.to("meta")}),
        "strides": ("query", {"query": torch.zeros(3, 64, 4).transpose(1, 2)}),
        "cache dimensions": ("keys", {"keys": cache[0]}),
        "cache block size": ("keys", {"keys": torch.zeros(6, 16, 2, 64)}),
        "cache strides": ("keys", {"keys": torch.zeros(6, 8, 64, 2).transpose(2, 3)}),
        "cache dtype": ("keys", {"keys": cache.double()}),
        "cache device": ("keys", {"keys": cache.to("meta")}),
        "values shape": ("values", {"values": torch.zeros(5, 8, 2, 64)}),
        "values dtype": ("values", {"values": cache.half()}),
    }


# behaviour 38
@pytest.mark.parametrize(("named", "change"), _bad_attend().values(), ids=_bad_attend())
def test_attend_refuses_by_name(named: str, change: dict[str, torch.Tensor], cpu: Device) -> None:
    case = Case([(0, 2), (4, 1)], (4, 2), 64, 8, cpu)
    arguments: dict[str, Any] = {"query": case.query, "keys": case.keys, "values": case.values} | change
    with pytest.raises(InvalidRequest) as caught:
        choose_attention(cpu).attend(**arguments, batch=case.batch, options=AttentionOptions(1.0))
    assert caught.value.field == named


# behaviour 38
@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("key", {"key": torch.zeros(2, 2, 64)}),
        ("key", {"key": torch.zeros(3, 1, 64)}),
        ("value", {"value": torch.zeros(3, 2, 32)}),
        ("value", {"value": torch.zeros(3, 2, 64, dtype=torch.float64)}),
        ("value", {"value": torch.zeros(3, 64, 2).transpose(1, 2)}),
        ("keys", {"keys": torch.zeros(6, 4, 2, 64)}),
    ],
)
def test_write_refuses_by_name(named: str, change: dict[str, torch.Tensor], cpu: Device) -> None:
    case = Case([(0, 2), (4, 1)], (4, 2), 64, 8, cpu)
    arguments: dict[str, Any] = {"key": case.new_k, "value": case.new_v, "keys": case.keys, "values": case.values}
    before = case.keys.clone()
    with pytest.raises(InvalidRequest) as caught:
        choose_attention(cpu).write(**(arguments | change), batch=case.batch)
    assert caught.value.field == named
    assert torch.equal(case.keys.isnan(), before.isnan())


# behaviour 38
@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("tables", {"tables": np.zeros(2, np.int32)}),
        ("tables", {"tables": np.zeros((2, 2), np.int64)}),
        ("tables", {"tables": np.zeros((1, 2), np.int32)}),
        ("tables", {"starts": np.array([0, 30], np.int32)}),
        ("starts", {"starts": np.array([0, -1], np.int32)}),
        ("starts", {"starts": np.array([0.0, 1.0])}),
        ("counts", {"counts": np.array([1, 0], np.int32)}),
    ],
)
def test_batch_refuses_by_name(named: str, change: dict[str, Any], cpu: Device) -> None:
    arguments: dict[str, Any] = {
        "tables": np.zeros((2, 2), np.int32),
        "starts": np.array([0, 3], np.int32),
        "counts": np.array([2, 1], np.int32),
    } | change
    with pytest.raises(InvalidRequest) as caught:
        PagedBatch.build(**arguments, block_size=8, device=cpu)
    assert caught.value.field == named


def test_plans_are_shared_by_layers(cpu: Device) -> None:
    case = Case(STEPS["mixed"], (4, 2), 64, 8, cpu)
    first = case.paged(AttentionOptions(0.1), cpu)
    plans = dict(case.batch.plans)
    assert torch.equal(case.paged(AttentionOptions(0.1), cpu), first)
    assert case.batch.plans == plans
    case.paged(replace(AttentionOptions(0.1), window=4), cpu)
    assert len(case.batch.plans) == len(plans) + 1
