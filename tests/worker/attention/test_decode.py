"""The decode kernel against dense attention in float64, and the planner that cuts its work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvforge.worker.attention import AttentionOptions, KvLayer, decode
from kvforge.worker.attention.decode import DecodeWorkspace, decode_planner, decode_tiles, is_few, paged_decode
from kvforge.worker.attention.decode_plan import STEADY_MIN, STEADY_PARTS, DecodePlanner
from kvforge.worker.attention.plan_items import DECODE_HEAD, DECODE_PART, FIELDS, named
from kvforge.worker.attention.quantised import dequantise, is_quantised, quantise
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target, head_tiles
from kvforge.worker.device.targets import TARGETS, current_target
from tests.worker.attention.cases import sinks

# Against dense attention over the stored numbers; the error of quantisation has its own tests.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TOLERANCE |= {torch.int8: 4e-3, torch.float8_e4m3fn: 4e-3}  # weights, queries and results are float16 here
KV_DTYPES = list(TOLERANCE)
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (5, 1)}
LENGTHS = [1, 2, 33, 0, 130, 64, 300]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("auto")


@dataclass
class Case:
    """Random rows in a pool with NaN in unreachable slots.

    k, v: for each row [tokens, kv_heads, head_size] float64, as stored.
    """

    query: torch.Tensor
    layer: KvLayer
    tables: torch.Tensor
    lengths: npt.NDArray[np.int64]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    target: Target

    @classmethod
    def make(
        cls,
        device: Device,
        lengths: list[int],
        heads: tuple[int, int],
        head_size: int,
        block_size: int,
        dtype: torch.dtype,
        size: float = 1.0,
    ) -> Case:
        generator = torch.Generator().manual_seed(head_size * 1000 + block_size)
        rng = np.random.default_rng(block_size)
        needed = [-(-length // block_size) for length in lengths]
        ids = rng.permutation(sum(needed) + 2).astype(np.int32)
        tables = np.full((len(lengths), max(needed) + 1), 2**31 - 1, np.int32)  # never read past a row's tokens
        quantised = is_quantised(dtype)
        query_dtype = torch.float16 if quantised else dtype
        shape = (sum(needed) + 2, block_size, heads[1], head_size)
        stored, scales, dense = [], [], []
        for row, count in enumerate(needed):
            tables[row, :count], ids = ids[:count], ids[count:]
        for _ in "kv":
            # 0x7f is NaN in e4m3fn; int8 has none, but the scales do.
            cache = torch.full(shape, 0x7F, dtype=torch.int8).view(dtype) if quantised else torch.full(shape, torch.nan)
            cache = cache if quantised else cache.to(dtype)
            scale = torch.full(shape[:3], torch.nan)
            rows = []
            for row, length in enumerate(lengths):
                numbers = torch.randn((length, heads[1], head_size), generator=generator) * size
                kept, kept_scales = quantise(numbers, dtype) if quantised else (numbers.to(dtype), None)
                positions = np.arange(length)
                blocks, places = tables[row, positions // block_size], positions % block_size
                cache.view(torch.int8 if quantised else dtype)[blocks, places] = kept.view(
                    torch.int8 if quantised else dtype
                )
                if kept_scales is not None:
                    scale[blocks, places] = kept_scales
                rows.append(dequantise(kept, kept_scales).to(device.torch_device).double())
            stored.append(cache.to(device.torch_device))
            scales.append(scale.to(device.torch_device) if quantised else None)
            dense.append(rows)
        query = torch.randn((len(lengths), heads[0], head_size), generator=generator).to(query_dtype)
        return cls(
            query.to(device.torch_device),
            KvLayer(stored[0], stored[1], scales[0], scales[1]),
            torch.from_numpy(tables).to(device.torch_device),
            np.array(lengths, np.int64),
            dense[0],
            dense[1],
            current_target(device),
        )

    def planner(self, window: int = 0, rows_max: int = 0) -> DecodePlanner:
        rows, heads, head_size = self.query.shape
        kv_heads, dtype = self.layer.keys.shape[2], self.layer.keys.dtype
        return decode_planner(max(rows, rows_max), heads, kv_heads, head_size, dtype, window, self.target)

    def paged(self, options: AttentionOptions, planner: DecodePlanner | None = None) -> torch.Tensor:
        """Run twice in one workspace: the second run shows that the first left it unchanged."""
        planner = planner or self.planner(options.window)
        _, heads, head_size = self.query.shape
        workspace = DecodeWorkspace.allocate(planner, heads, head_size, self.query.device)
        workspace.partials.fill_(torch.nan)
        workspace.sizes.fill_(torch.nan)
        plan = torch.from_numpy(planner.plan(self.lengths)).to(self.query.device)
        outputs = [torch.full_like(self.query, 7.0) for _ in range(2)]
        for output in outputs:
            paged_decode(self.query, self.layer, self.tables, plan, output, workspace, options, self.target)
        assert torch.equal(*(output.nan_to_num(9.0) for output in outputs))
        assert not workspace.counters.any()
        return outputs[0]

    def dense(self, options: AttentionOptions) -> torch.Tensor:
        """[rows, heads, head_size] float64; 7 in rows without tokens, as in `paged`."""
        group = self.query.shape[1] // self.layer.keys.shape[2]
        outputs = []
        for query, keys, values in zip(self.query.double(), self.k, self.v, strict=True):
            if not len(keys):
                outputs.append(torch.full_like(query, 7.0))
                continue
            low = max(len(keys) - options.window, 0) if options.window else 0
            k, v = (x[low:].repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("hd,khd->hk", query, k) * options.scaling
            if options.softcap:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks is not None:
                scores = torch.cat((scores, options.sinks.double()[:, None]), -1)
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(k)], v))
        return torch.stack(outputs)


def compare(case: Case, options: AttentionOptions, planner: DecodePlanner | None = None, size: float = 1.0) -> None:
    got, want = case.paged(options, planner), case.dense(options)
    assert torch.isfinite(got).all()
    assert float((got.double() - want).abs().max()) <= TOLERANCE[case.layer.keys.dtype] * size


# behaviour 37, every axis at least once
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "dtype"),
    [
        ("MHA", 64, 8, torch.float32),
        ("GQA", 128, 16, torch.bfloat16),
        ("MQA", 96, 32, torch.float16),
        ("GQA", 80, 64, torch.int8),
        ("MQA", 256, 128, torch.float8_e4m3fn),
        ("GQA", 72, 16, torch.float16),
        ("MHA", 64, 16, torch.int8),
    ],
)
def test_paged_equals_dense(heads: str, head_size: int, block_size: int, dtype: torch.dtype, device: Device) -> None:
    case = Case.make(device, LENGTHS, HEADS[heads], head_size, block_size, dtype)
    compare(case, AttentionOptions(head_size**-0.5))


@pytest.mark.parametrize(
    ("head_size", "dtype"), [(72, torch.bfloat16), (96, torch.float16), (96, torch.bfloat16)], ids=str
)
def test_heads_of_two_tiles(
    head_size: int, dtype: torch.dtype, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of more than 64 numbers and at most 96 has a tile of 64 and one of 32, on Hopper."""
    hopper = TARGETS["sm_90"]
    assert decode.divided_head(head_size, dtype, hopper) == (64, 32)
    assert decode.divided_head(head_size, torch.int8, hopper) == (128, 0)
    monkeypatch.setattr(decode, "divided_head", lambda size, *_: head_tiles(size))
    case = Case.make(device, [1, 0, 130, 700], HEADS["GQA"], head_size, 16, dtype)
    planner = replace(case.planner(), programs=11, steady=False)
    assert parts_of(planner.plan(case.lengths))["parts"].max() > 2
    compare(case, AttentionOptions(0.2, softcap=5.0, sinks=sinks(6, device)), planner)


# behaviour 37
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (40, 5.0), (1000, 0.0), (0, 20.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_window_and_softcap(window: int, softcap: float, dtype: torch.dtype, device: Device) -> None:
    case = Case.make(device, LENGTHS, HEADS["GQA"], 64, 16, dtype)
    for row, length in enumerate(LENGTHS):  # blocks behind the window may be freed
        if window:
            case.tables[row, : max(length - window, 0) // 16] = 2**31 - 1
    compare(case, AttentionOptions(0.2, window, softcap))


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (40, 5.0)])
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_sinks(window: int, softcap: float, dtype: torch.dtype, device: Device) -> None:
    """Rows of one part and of several: a sink counts once."""
    case = Case.make(device, [1, 0, 130, 700], HEADS["GQA"], 64, 16, dtype)
    planner = replace(case.planner(window), programs=11, steady=False)
    assert window or parts_of(planner.plan(case.lengths))["parts"].max() > 2
    compare(case, AttentionOptions(0.2, window, softcap, sinks(6, device)), planner)


def test_sinks_without_weight_change_no_bit(device: Device) -> None:
    case = Case.make(device, LENGTHS, HEADS["GQA"], 64, 16, torch.float32)
    none = torch.full((6,), -torch.inf, device=device.torch_device)
    assert torch.equal(case.paged(AttentionOptions(0.2, sinks=none)), case.paged(AttentionOptions(0.2)))


# behaviour 37
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_full_grid(head_size: int, dtype: torch.dtype, device: Device) -> None:
    lengths = [*LENGTHS, 1000, 4097]
    grid = itertools.product([(8, 8), (32, 8), (8, 1), (71, 1)], [8, 16, 32, 64, 128])
    for number, (heads, block_size) in enumerate(grid):
        case = Case.make(device, lengths, heads, head_size, block_size, dtype)
        if number % 2:  # use the tiles and plans of many rows
            case.target = replace(case.target, multiprocessors=7)
        for window, softcap in [(0, 0.0), (100, 0.0), *([(0, 30.0), (64, 5.0)] if block_size == 16 else [])]:
            compare(case, AttentionOptions(head_size**-0.5, window, softcap))
            compare(case, AttentionOptions(head_size**-0.5, window, softcap, sinks(heads[0], device)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [1e-6, 3e4])
def test_scales_of_any_size(dtype: torch.dtype, size: float, device: Device) -> None:
    """Values far outside float16's range keep their precision, because their scales are never float16."""
    case = Case.make(device, [70, 200], (4, 2), 64, 16, dtype, size)
    case.query = case.query.to(torch.float32) / size
    for options in (AttentionOptions(0.125), AttentionOptions(0.125, sinks=torch.ones(4, device=device.torch_device))):
        got, want = case.paged(options).double(), case.dense(options)
        assert float((got - want).abs().max()) <= 2e-3 * size


def test_rows_of_zeros_and_broken_rows(device: Device) -> None:
    case = Case.make(device, [40, 50], (2, 1), 64, 16, torch.int8)
    assert case.layer.value_scales is not None
    slots = case.tables[0].long()
    case.layer.values[slots[0], :8], case.layer.value_scales[slots[0], :8] = 0, 0.0
    case.v[0][:8] = 0.0
    compare(case, AttentionOptions(0.125))
    case.layer.value_scales[slots[1], 3] = torch.nan
    got = case.paged(AttentionOptions(0.125))
    assert torch.isnan(got[0]).all()
    assert torch.isfinite(got[1]).all()


def test_many_groups_and_parts(device: Device) -> None:
    """More query heads of one KV head than a program takes, and the maximum number of parts."""
    case = Case.make(device, [700, 3, 90], (70, 1), 256, 16, torch.bfloat16)
    planner = replace(case.planner(), programs=11, steady=False)
    assert parts_of(planner.plan(case.lengths))["parts"].max() > 4
    compare(case, AttentionOptions(0.0625), planner)


def parts_of(plan: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    """Return the parts of a plan, as many as its header counts; the rest must be empty."""
    count = int(named(plan[:FIELDS], DECODE_HEAD)["items"][0])
    assert not plan[FIELDS * (1 + count) :].any()
    return named(plan[FIELDS : FIELDS * (1 + count)], DECODE_PART)


def test_result_does_not_depend_on_padding_rows(device: Device) -> None:
    case = Case.make(device, [5, 200], (4, 2), 64, 16, torch.float32)
    small, large = case.planner(), case.planner(rows_max=9)
    options = AttentionOptions(0.125)
    assert large.items_max > small.items_max
    assert torch.allclose(case.paged(options, small), case.paged(options, large), atol=1e-6)


@pytest.mark.parametrize("window", [0, 1, 100])
@pytest.mark.parametrize(("programs", "steady"), [(1, False), (3, False), (66, False), (66, True)])
@pytest.mark.parametrize("rows", [1, 2, 40, 256])
def test_plan_covers_every_key_once(rows: int, programs: int, steady: bool, window: int) -> None:
    rng = np.random.default_rng(rows)
    for longest in (1, 100, 20_000):
        lengths = rng.integers(0, longest + 1, rows)
        planner = DecodePlanner(rows, programs, key_tile=64, window=window, steady=steady)
        array = planner.plan(lengths)
        assert array.dtype == np.int32
        assert array.size == planner.size
        items = parts_of(array)
        count = len(items)
        assert (items["begin"] < items["end"]).all()
        slots = items["first_partial"] + items["part"]
        assert len(set(slots)) == count
        assert slots.max(initial=0) < planner.items_max
        for row, length in enumerate(lengths):
            of_row = items[items["row"] == row]
            of_row = of_row[np.argsort(of_row["part"])]
            low = max(length - window, 0) if window else 0
            assert of_row["part"].tolist() == list(range(len(of_row)))
            assert (of_row["parts"] == len(of_row)).all()
            edges = [*of_row["begin"], length] if len(of_row) else [length]
            assert edges == ([low, *of_row["end"]] if length else [0])


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("steady", [False, True])
def test_a_plan_made_from_an_earlier_one_is_the_same(steady: bool, window: int) -> None:
    """Rows grow within their tiles and into new ones, shrink, and take the places of others."""
    rng = np.random.default_rng(7)
    planner = DecodePlanner(8, 66, key_tile=64, window=window, steady=steady)
    lengths = np.array([1, 63, 64, 700, 0, 1500, 0, 20_000])
    made = planner.plan(lengths)
    for number in range(200):
        before = lengths.copy()
        if number % 20 == 19:
            lengths = rng.permutation(lengths)
        lengths = np.where(lengths > 0, np.maximum(lengths + rng.integers(-1, 3, 8), 1), 0)
        earlier, made = made.copy(), planner.plan_after(before, made, lengths)
        assert made.tolist() == planner.plan(lengths).tolist()
        assert earlier.tolist() == planner.plan(before).tolist()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_few_rows_have_the_keys_of_many_where_bits_depend_on_them(name: str) -> None:
    target = replace(TARGETS[name], steady=True)
    for size, dtype in itertools.product((64, 96, 128, 256), (torch.bfloat16, torch.float32, torch.int8)):
        few, many = (decode_tiles(size, dtype, target, each) for each in (True, False))
        assert (few.keys, few.warps) == (many.keys, many.warps)


def test_few_rows_are_those_whose_programs_run_at_once_at_any_length() -> None:
    target = TARGETS["sm_90"]  # 132 multiprocessors
    shape = 64, torch.bfloat16
    for rows, kv_heads, any_length, whole in (
        (1, 8, True, True),
        (2, 8, False, True),
        (2, 4, True, True),
        (17, 8, False, False),
    ):
        few = [is_few(rows, 4 * kv_heads, kv_heads, *shape, replace(target, steady=each)) for each in (True, False)]
        assert few == [any_length, whole]
    lengths = np.full(2, 500_000)
    plan = decode_planner(2, 16, 4, *shape, 0, replace(target, steady=True)).plan(lengths)
    assert plan[0] * 4 <= 132


def test_a_steady_plan_cuts_a_row_by_its_own_length() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 20_000, 40)
    among = parts_of(DecodePlanner(40, 66, key_tile=64, steady=True).plan(lengths))
    assert among["parts"].max() == STEADY_PARTS
    assert (among["parts"] <= np.maximum(1, -(-lengths[among["row"]] // STEADY_MIN))).all()
    for row, length in enumerate(lengths.tolist()):
        alone = parts_of(DecodePlanner(1, 1000, key_tile=64, steady=True).plan(np.array([length])))
        mine = among[among["row"] == row]
        for name in ("begin", "end", "part", "parts"):
            assert sorted(mine[name]) == sorted(alone[name])


def test_plan_is_balanced() -> None:
    """The last program finishes soon after the average one, whatever the lengths: free programs take the next item."""
    rng = np.random.default_rng(0)
    for lengths in ([4096] * 16, [1024] * 64, [4096] * 256, np.exp(rng.uniform(4.2, 9.7, 128)).astype(np.int64)):
        planner = DecodePlanner(len(lengths), 66, key_tile=64)
        items = parts_of(planner.plan(np.asarray(lengths)))
        free = np.zeros(66)
        for item in items:
            free[free.argmin()] += item["end"] - item["begin"]
        assert free.max() <= 1.15 * np.sum(lengths) / 66
