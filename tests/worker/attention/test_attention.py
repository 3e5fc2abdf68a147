"""The reference attention against dense attention in float64, and the checks at the edge of every implementation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidConfiguration, InvalidRequest
from kvforge.worker.attention import AttentionOptions, KvLayer, PagedBatch, ReferenceAttention, choose_attention
from kvforge.worker.device.device import Device
from tests.worker.attention.cases import HEADS, STEPS, Case, compare, sinks

REFERENCE = ReferenceAttention()
QUANTISED = (torch.int8, torch.float8_e4m3fn)


# behaviour 37
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_paged_equals_dense(head_size: int, block_size: int, cpu: Device) -> None:
    for rows, heads in itertools.product(STEPS.values(), HEADS.values()):
        case = Case(rows, heads, head_size, block_size, cpu)
        compare(case, AttentionOptions(scaling=head_size**-0.5), REFERENCE)


# behaviour 37
@pytest.mark.parametrize("window", [1, 5, 16, 64, 1000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_window_and_softcap(heads: tuple[int, int], softcap: float, window: int, cpu: Device) -> None:
    for rows in STEPS.values():
        compare(Case(rows, heads, 64, 16, cpu), AttentionOptions(0.3, window=window, softcap=softcap), REFERENCE)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 5.0), (16, 5.0)])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_sinks(heads: tuple[int, int], window: int, softcap: float, cpu: Device) -> None:
    for rows in STEPS.values():
        options = AttentionOptions(0.3, window, softcap, sinks(heads[0], cpu))
        compare(Case(rows, heads, 64, 16, cpu), options, REFERENCE)


# behaviour 37
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_half_precision(dtype: torch.dtype, softcap: float, cpu: Device) -> None:
    for rows in STEPS.values():
        compare(Case(rows, (6, 2), 64, 16, cpu, dtype), AttentionOptions(0.125, softcap=softcap), REFERENCE)


# behaviour 37
@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_quantised(head_size: int, kv_dtype: torch.dtype, cpu: Device) -> None:
    for rows, heads, block_size in itertools.product(STEPS.values(), HEADS.values(), (8, 128)):
        case = Case(rows, heads, head_size, block_size, cpu, torch.float32, kv_dtype)
        compare(case, AttentionOptions(head_size**-0.5), REFERENCE)


def test_padding_of_a_static_batch_writes_and_reads_nothing(cpu: Device) -> None:
    case = Case([(8, 1), (3, 1)], (2, 2), 64, 8, cpu)
    want = case.dense(AttentionOptions(0.125))
    case.batch = PagedBatch.static(4, 5, 8, cpu)
    case.batch.fill(case.tables, case.lengths)
    before = case.keys.clone()
    nothing = torch.full((2, 2, 64), float("nan"))
    case.query, case.new_k, case.new_v = (torch.cat((x, nothing)) for x in (case.query, case.new_k, case.new_v))
    got = case.paged(AttentionOptions(0.125), REFERENCE)
    assert float((got[:2].double() - want).abs().max()) <= 1e-5
    assert torch.equal(got[2:], torch.zeros(2, 2, 64))
    assert int((before.isnan() & ~case.keys.isnan()).any(-1).any(-1).sum()) == 2


def test_choice_by_name(cpu: Device) -> None:
    assert isinstance(choose_attention(cpu), ReferenceAttention) == bool(cpu.cpu_kernels_problem)
    assert isinstance(choose_attention(replace(cpu, kernels=False)), ReferenceAttention)
    assert isinstance(choose_attention(cpu, "reference"), ReferenceAttention)
    with pytest.raises(InvalidConfiguration) as caught:
        choose_attention(cpu, "flash")
    assert caught.value.field == "attention"


# behaviour 37
def test_slots_before_the_window_may_be_anything(cpu: Device) -> None:
    case = Case([(40, 1), (40, 3)], (4, 2), 64, 8, cpu)
    for row in range(2):
        case.keys[case.tables[row, :4]] = float("nan")
        case.values[case.tables[row, :4]] = float("inf")
    compare(case, AttentionOptions(0.125, window=8), REFERENCE)  # positions 33 and later: blocks 4 and 5


def test_write_touches_only_its_slots(cpu: Device) -> None:
    case = Case([(3, 2), (8, 1)], (2, 2), 64, 8, cpu)
    before = case.keys.clone()
    REFERENCE.write(case.new_k, case.new_v, case.layer, case.batch)
    written = case.batch.slot_mapping
    expected = [case.tables[0, 0] * 8 + 3, case.tables[0, 0] * 8 + 4, case.tables[1, 1] * 8]
    assert written.tolist() == expected
    assert torch.equal(case.keys.flatten(0, 1)[written], case.new_k)
    untouched = torch.ones(case.keys.shape[0] * 8, dtype=torch.bool)
    untouched[written] = False
    assert torch.equal(
        case.keys.flatten(0, 1)[untouched].nan_to_num(7.0), before.flatten(0, 1)[untouched].nan_to_num(7.0)
    )


def _bytes(cache: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = torch.zeros(cache.shape[:3])
    return {"keys": cache.char(), "values": cache.char(), "key_scales": scales, "value_scales": scales}


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
        "scales missing": ("key_scales", {"keys": cache.char(), "values": cache.char()}),
        "scales for floats": ("key_scales", {"key_scales": torch.zeros(6, 8, 2)}),
        "value scales' shape": ("value_scales", _bytes(cache) | {"value_scales": torch.zeros(6, 8, 64)}),
        "key scales' dtype": ("key_scales", _bytes(cache) | {"key_scales": torch.zeros(6, 8, 2).half()}),
        "value scales' strides": ("value_scales", _bytes(cache) | {"value_scales": torch.zeros(6, 2, 8).mT}),
        "cache device": ("keys", {"keys": cache.to("meta")}),
        "values shape": ("values", {"values": torch.zeros(5, 8, 2, 64)}),
        "values dtype": ("values", {"values": cache.half()}),
    }


# behaviour 38
@pytest.mark.parametrize(("named", "change"), _bad_attend().values(), ids=_bad_attend())
def test_attend_refuses_by_name(named: str, change: dict[str, torch.Tensor], cpu: Device) -> None:
    case = Case([(0, 2), (4, 1)], (4, 2), 64, 8, cpu)
    caches = {"keys": case.keys, "values": case.values}
    layer = KvLayer(**(caches | {name: tensor for name, tensor in change.items() if name != "query"}))
    query = change.get("query", case.query)
    with pytest.raises(InvalidRequest) as caught:
        REFERENCE.attend(query, layer, case.batch, AttentionOptions(1.0))
    assert caught.value.field == named


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3), torch.zeros(4, 1), torch.zeros(4).half(), torch.zeros(8)[::2], torch.zeros(4, device="meta")],
    ids=["heads", "dimensions", "dtype", "strides", "device"],
)
def test_attend_refuses_sinks_that_do_not_fit(wrong: torch.Tensor, cpu: Device) -> None:
    case = Case([(0, 2), (4, 1)], (4, 2), 64, 8, cpu)
    with pytest.raises(InvalidRequest) as caught:
        REFERENCE.attend(case.query, case.layer, case.batch, AttentionOptions(1.0, sinks=wrong))
    assert caught.value.field == "sinks"


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
    layer = KvLayer(change.get("keys", case.keys), case.values)
    before = case.keys.clone()
    with pytest.raises(InvalidRequest) as caught:
        REFERENCE.write(change.get("key", case.new_k), change.get("value", case.new_v), layer, case.batch)
    assert caught.value.field == named
    assert torch.equal(case.keys.isnan(), before.isnan())


# behaviour 38
@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("query", {"query": torch.zeros(3, 4, 32)}),
        ("cos", {"cos": torch.zeros(2, 64)}),
        ("cos", {"cos": torch.zeros(3, 63), "sin": torch.zeros(3, 63)}),
        ("cos", {"cos": torch.zeros(3, 66), "sin": torch.zeros(3, 66)}),
        ("cos", {"cos": torch.zeros(3, 64).double()}),
        ("sin", {"sin": torch.zeros(3, 32)}),
        ("sin", {"sin": torch.zeros(64, 3).mT}),
        ("sin", {"sin": torch.zeros(3, 64, device="meta")}),
        ("key", {"key": torch.zeros(3, 1, 64)}),
    ],
)
def test_write_rotated_refuses_by_name(named: str, change: dict[str, torch.Tensor], cpu: Device) -> None:
    case = Case([(0, 2), (4, 1)], (4, 2), 64, 8, cpu)
    arguments = {"query": case.query, "key": case.new_k, "value": case.new_v}
    arguments |= {"cos": torch.zeros(3, 64), "sin": torch.zeros(3, 64)} | change
    before = case.keys.clone()
    with pytest.raises(InvalidRequest) as caught:
        REFERENCE.write_rotated(**arguments, layer=case.layer, batch=case.batch)
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
    first = case.paged(AttentionOptions(0.1), REFERENCE)
    plans = dict(case.batch.plans)
    assert torch.equal(case.paged(AttentionOptions(0.1), REFERENCE), first)
    assert case.batch.plans == plans
    case.paged(replace(AttentionOptions(0.1), window=4), REFERENCE)
    assert len(case.batch.plans) == len(plans) + 1
