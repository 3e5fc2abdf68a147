"""Parts that rows have in common are read once on Triton's kernels, with the bits that each row has alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvforge.worker.attention import AttentionOptions, KvLayer, PagedBatch, decode_plan, triton_attention
from kvforge.worker.attention.decode import DecodeWorkspace, decode_planner, paged_decode
from kvforge.worker.attention.decode_plan import DecodePlanner
from kvforge.worker.attention.plan_items import (
    DECODE_HEAD,
    DECODE_PART,
    FIELDS,
    SHARED_HEAD,
    SHARED_PART,
    SHARED_ROW,
    named,
)
from kvforge.worker.attention.quantised import is_quantised, quantise
from kvforge.worker.attention.shared_decode import shared_decode, shared_planner
from kvforge.worker.attention.shared_decode_kernel import sum_as_decoded
from kvforge.worker.attention.shared_plan import SharedPlanner, SharedPlans, was_measured
from kvforge.worker.attention.triton_attention import TritonAttention
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target, head_tiles
from kvforge.worker.device.targets import TARGETS, current_target
from tests.worker.attention.cases import sinks

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
BLOCK_SIZE = 16
# Tokens of each row, and how many blocks it has from an earlier row, and which row.
ROWS = [
    (500, 0, 0),
    (502, 0, 31),  # a draft of the row before: all of its whole blocks, and more tokens
    (501, 0, 31),
    (490, 0, 28),  # a fork, with the same borders, that parts in the middle of its last part
    (330, 0, 20),  # fewer tokens, and so other borders
    (0, 0, 0),  # padding
    (100, 0, 6),  # one part: it is read alone
    (500, 7, 0),
    (499, 7, 31),
    (460, 9, 0),  # of no row
    (500, 0, 31),
    (503, 0, 31),
]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("auto")


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide short rows as long ones are: the interpreter is slow."""
    monkeypatch.setattr(decode_plan, "STEADY_MIN", 128)


@dataclass
class Case:
    """Rows with tables that begin alike, over random K and V, with NaN where no row has a token."""

    query: torch.Tensor
    layer: KvLayer
    tables: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    target: Target

    @classmethod
    def make(
        cls,
        device: Device,
        heads: tuple[int, int],
        head_size: int,
        dtype: torch.dtype,
        rows: list[tuple[int, int, int]] = ROWS,
    ) -> Case:
        generator = torch.Generator().manual_seed(head_size)
        lengths = np.array([length for length, *_ in rows], np.int64)
        tables = np.full((len(rows), -(-int(lengths.max()) // BLOCK_SIZE) + 1), 2**31 - 1, np.int64)
        used = 1
        for row, (length, earlier, common) in enumerate(rows):
            needed = -(-length // BLOCK_SIZE)
            alike = min(common, needed, -(-rows[earlier][0] // BLOCK_SIZE)) if row > earlier else 0
            tables[row, :alike] = tables[earlier, :alike]
            tables[row, alike:needed] = np.arange(used + needed - alike, used, -1)
            used += needed - alike
            assert tables[row, :needed].max(initial=0) <= used, "a row without a block for each of its tokens"
        quantised = is_quantised(dtype)
        shape = (used + 1, BLOCK_SIZE, heads[1], head_size)
        held, scales = [], []
        for _ in "kv":
            numbers = torch.randn(shape, generator=generator)
            kept, kept_scales = quantise(numbers, dtype) if quantised else (numbers.to(dtype), None)
            held.append(kept.to(device.torch_device))
            scales.append(None if kept_scales is None else kept_scales.to(device.torch_device))
        query = torch.randn((len(rows), heads[0], head_size), generator=generator).to(F16 if quantised else dtype)
        target = replace(current_target(device), steady=True)
        return cls(query.to(device.torch_device), KvLayer(*held, *scales), tables, lengths, target)

    @property
    def shape(self) -> tuple[int, int, int, torch.dtype]:
        return self.query.shape[1], self.layer.keys.shape[2], self.query.shape[2], self.layer.keys.dtype

    def planner(self) -> SharedPlanner:
        planner = shared_planner(len(self.lengths), *self.shape, 0, self.target)
        assert planner is not None
        return planner

    def plans(self) -> SharedPlans:
        plans = self.planner().plan(self.tables, self.lengths, BLOCK_SIZE, 0)
        assert plans is not None
        return plans

    def run(self, options: AttentionOptions, plans: SharedPlans | None, times: int = 2) -> torch.Tensor:
        """Attend by these plans, or alone without any. Twice: the counters are restored."""
        planner = decode_planner(len(self.lengths), *self.shape, 0, self.target)
        on = self.query.device
        workspace = DecodeWorkspace.allocate(planner, self.shape[0], self.shape[2], on)
        tables = torch.from_numpy(self.tables.astype(np.int32)).to(on)
        own = torch.from_numpy(planner.plan(self.lengths) if plans is None else plans.own).to(on)
        outputs = [torch.full_like(self.query, 7.0) for _ in range(times)]
        for output in outputs:
            workspace.partials.fill_(torch.nan)
            workspace.sizes.fill_(torch.nan)
            if plans is not None:
                shared = torch.from_numpy(plans.shared).to(on)
                shared_decode(self.query, self.layer, tables, shared, workspace, options, self.target)
            paged_decode(self.query, self.layer, tables, own, output, workspace, options, self.target)
        assert torch.equal(outputs[0], outputs[-1]), "the second run differs from the first"
        assert not workspace.counters.any()
        return outputs[0]


def shared_of(plans: SharedPlans) -> npt.NDArray[Any]:
    count = int(named(plans.shared[:FIELDS], SHARED_HEAD)["items"][0])
    return named(plans.shared[FIELDS : FIELDS * (1 + count)], SHARED_PART)


def rows_of(plans: SharedPlans, item: Any) -> npt.NDArray[Any]:
    first = int(item["first"])
    return named(plans.shared[FIELDS * first : FIELDS * (first + int(item["rows"]))], SHARED_ROW)


def own_of(plan: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    count = int(named(plan[:FIELDS], DECODE_HEAD)["items"][0])
    assert not plan[FIELDS * (1 + count) :].any()
    return named(plan[FIELDS : FIELDS * (1 + count)], DECODE_PART)


def shared_dtype(dtype: torch.dtype, device: Device) -> torch.dtype:
    """Return bfloat16 in place of float32 on a device: parts of float32 are shared in Triton's interpreter alone."""
    return BF16 if dtype is F32 and device.queues else dtype


CASES = [
    ((8, 2), 64, F32, 0.0, False),
    ((2, 2), 80, BF16, 0.0, True),
    ((6, 2), 128, F16, 5.0, False),
    ((7, 1), 64, I8, 0.0, True),
    ((8, 2), 128, FP8, 0.0, False),
    ((24, 2), 96, BF16, 0.0, False),  # 12 query heads take a tile by themselves
]


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(("heads", "head_size", "dtype", "softcap", "has_sinks"), CASES, ids=str)
def test_rows_have_the_bits_that_they_have_alone(
    heads: tuple[int, int], head_size: int, dtype: torch.dtype, softcap: float, has_sinks: bool, device: Device
) -> None:
    case = Case.make(device, heads, head_size, shared_dtype(dtype, device))
    options = AttentionOptions(head_size**-0.5, softcap=softcap, sinks=sinks(heads[0], device) if has_sinks else None)
    times = 2 if dtype is F32 else 1  # alone; test_decode.py too finds counters that are not restored
    want, plans = case.run(options, None, times), case.plans()
    assert want.isfinite().all()
    shared = shared_of(plans)
    together = {tuple(rows_of(plans, item)["row"].tolist()) for item in shared}
    assert {row for rows in together for row in rows} >= {0, 1, 2, 3, 7, 8, 10, 11}
    assert torch.equal(case.run(options, plans, times), want)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("head_size", [80, 96])
def test_rows_of_two_tiles_have_the_bits_that_they_have_alone(
    head_size: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("decode", "shared_decode"):
        monkeypatch.setattr(f"kvforge.worker.attention.{name}.divided_head", lambda size, *_: head_tiles(size))
    case = Case.make(device, (8, 2), head_size, BF16)
    options = AttentionOptions(head_size**-0.5, softcap=5.0, sinks=sinks(8, device))
    want, plans = case.run(options, None, 1), case.plans()
    assert want.isfinite().all() and len(shared_of(plans)) > 1
    assert torch.equal(case.run(options, plans, 1), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "many"), [(F16, 0), (F16, 1), (BF16, 0), (BF16, 1), (I8, 0), (FP8, 0)], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_full_grid(
    head_size: int, dtype: torch.dtype, many: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group of query heads that shares, rows for several programs, and long ones; programs of many rows too."""
    monkeypatch.setattr("kvforge.worker.attention.shared_decode.MANY_ROWS", 1 if many else 1000)
    random = Random(head_size)
    rows = [(random.randint(2900, 3000), len(ROWS), random.choice((30, 130, 170, 180))) for _ in range(20)]
    others = []
    for heads in ((4, 4), (12, 4), (16, 4), (28, 4), (16, 2), (24, 2), (32, 2), (64, 8)):
        case = Case.make(device, heads, head_size, dtype, [*ROWS, *rows])
        if shared_planner(1, *case.shape, 0, case.target) is None:
            continue
        for softcap in (0.0, 30.0):
            for sink in (None, 5 * sinks(heads[0], device)):  # also far above the scores
                options = AttentionOptions(head_size**-0.5, softcap=softcap, sinks=sink)
                if not torch.equal(case.run(options, case.plans()), case.run(options, None)):
                    others.append((heads, softcap, sink is not None))
    assert not others, "bits that rows do not have alone"


@triton.jit
def decoded_sums(numbers, sums, ROWS: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Write the sums of [ROWS, KEYS] numbers."""
    row, key = tl.arange(0, ROWS), tl.arange(0, KEYS)
    tl.store(sums + row, sum_as_decoded(tl.load(numbers + row[:, None] * KEYS + key[None, :]), KEYS, 4))


def test_sums_have_the_order_of_decodes(device: Device) -> None:
    """The order is that of the instructions for `tl.sum` in `decode_kernel`, compiled for Hopper."""
    numbers = torch.randn((64, 128), generator=torch.Generator().manual_seed(3)) * 1e3
    sums = torch.zeros(64, device=device.torch_device)
    decoded_sums[(1,)](numbers.to(device.torch_device), sums, 64, 128)
    cut = numbers.numpy().reshape(64, 4, 4, 4, 2)  # repeats, warps, threads, neighbours
    own = np.zeros((64, 4, 4), np.float32)
    for repeat in range(4):
        for neighbour in range(2):
            own = own + cut[:, repeat, :, :, neighbour]
    of_warps = (own[:, :, 0] + own[:, :, 2]) + (own[:, :, 1] + own[:, :, 3])
    wanted = (of_warps[:, 0] + of_warps[:, 2]) + (of_warps[:, 1] + of_warps[:, 3])
    assert np.array_equal(sums.cpu().numpy(), wanted)
    assert not np.array_equal(wanted, numbers.numpy().sum(1)), "another order has other sums here"


def test_hopper_reads_keys_once_for_as_many_queries_as_its_instructions_take(monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(TARGETS["sm_90"], steady=True)
    monkeypatch.setattr(triton, "__version__", "3.7.0")  # its order of sums is not known
    assert shared_rows(128, BF16, target) == 8
    monkeypatch.setattr(triton, "__version__", "3.6.1")
    rows = {dtype: [shared_rows(count, dtype, target) for count in (127, 128)] for dtype in (BF16, F16, I8, FP8)}
    assert rows == {BF16: [16, 32], F16: [16, 32], I8: [8, 8], FP8: [8, 8]}
    others = {name for name, each in TARGETS.items() if shared_rows(128, BF16, replace(each, steady=True)) > 8}
    assert others == {"sm_90"}


def shared_rows(rows_max: int, dtype: torch.dtype, target: Target) -> int:
    planner = shared_planner(rows_max, 32, 8, 128, dtype, 0, target)
    assert planner is not None
    return planner.rows


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("fault", ["wrong group", "wrong border", "wrong place"])
def test_a_wrong_plan_changes_bits(fault: str, device: Device) -> None:
    case, options = Case.make(device, (8, 2), 64, shared_dtype(F32, device)), AttentionOptions(0.125)
    plans = case.plans()
    item = shared_of(plans)[0]
    if fault == "wrong group":
        rows_of(plans, item)["row"][1] = 7  # a row of another prefix
    elif fault == "wrong border":
        item["end"] -= 1
    else:
        rows_of(plans, item)["first_partial"][0] += 1
    shared = torch.from_numpy(plans.shared)
    assert shared_of(plans)[0] == item and shared.any()
    with pytest.raises(AssertionError):
        assert torch.equal(case.run(options, plans, times=1), case.run(options, None, times=1))


@pytest.mark.parametrize("seed", range(30))
def test_every_part_is_computed_once_and_shared_ones_are_common(seed: int) -> None:
    random = Random(seed)
    rows, block_size = random.randint(1, 40), random.choice((8, 16, 48))
    lengths = np.array([random.choice((0, random.randint(1, 9000), random.randint(4000, 4200))) for _ in range(rows)])
    tables = np.arange(rows * 1200).reshape(rows, 1200)
    for row in range(1, rows):
        like, blocks = random.randrange(row), random.randint(0, 1100)
        tables[row, :blocks] = tables[like, :blocks]
    decode = DecodePlanner(rows + random.randint(0, 3), 100, key_tile=random.choice((32, 128)), steady=True)
    planner = SharedPlanner(decode, random.choice((2, 3, 8, 32)), 4096)
    alone = decode.plan(lengths)
    found = {(int(each["row"]), int(each["part"])): each for each in own_of(alone)}
    plans = planner.plan(tables, lengths, block_size, 0)
    if plans is None:
        return
    assert plans.shared.size == planner.size and plans.own.size == decode.size
    left = own_of(plans.own)
    assert {row for row, _ in found} == set(left["row"].tolist()), "the last part of a row is its own"
    for each in left:
        whole = found.pop((int(each["row"]), int(each["part"])))
        assert whole["own"] == whole["parts"]
        assert each["own"] == np.count_nonzero(left["row"] == each["row"]), "the merge awaits the parts of this plan"
        whole["own"] = each["own"]
        assert each == whole
    for item in shared_of(plans):
        members = rows_of(plans, item)
        assert 2 <= len(members) <= planner.rows
        blocks = -(-int(item["end"]) // block_size)
        for member in members:
            each = found.pop((int(member["row"]), int(item["part"])))
            assert [each[name] for name in ("begin", "end")] == [item[name] for name in ("begin", "end")]
            assert each["first_partial"] == member["first_partial"]
            assert (tables[member["row"], :blocks] == tables[members["row"][0], :blocks]).all()
    assert not found, "parts that nothing computes"


def test_rows_of_one_length_share_all_parts_but_the_last() -> None:
    decode = DecodePlanner(64, 100, key_tile=128, steady=True)
    tables = np.tile(np.arange(600), (64, 1))
    tables[:, 512:] = 1000 + np.arange(64 * 88).reshape(64, 88)
    plans = SharedPlanner(decode, 8, 4096).plan(tables, np.full(64, 8192 + 70), 16)
    assert plans is not None
    shared, own = shared_of(plans), own_of(plans.own)
    assert len(own) == 64 and len(shared) == 8 * (int(own["parts"][0]) - 1)
    assert shared["part"].tolist() == sorted(shared["part"].tolist()), "what reads the same keys runs side by side"


def test_sharing_must_save_enough() -> None:
    decode = DecodePlanner(4, 100, key_tile=128, steady=True)
    tables = np.tile(np.arange(600), (4, 1))
    lengths = np.array([2000, 2001, 2002, 2003])
    planner = SharedPlanner(decode, 8, 4096)
    plans = planner.plan(tables, lengths, 16, 0)
    assert plans is not None
    saved = 3 * int(shared_of(plans)["end"].max()) * planner.token_bytes
    assert planner.plan(tables, lengths, 16, saved) is not None
    assert planner.plan(tables, lengths, 16, saved + 1) is None


def test_what_the_kernel_leaves_to_the_other_one() -> None:
    target = replace(TARGETS["sm_90"], steady=True)
    shape = (32, 8, 128, BF16)
    assert shared_planner(4, *shape, 0, target) is not None
    assert shared_planner(4, *shape, 1024, target) is None, "layers with a window"
    assert shared_planner(4, *shape, 0, TARGETS["sm_90"]) is None, "plans that depend on other rows"
    assert shared_planner(4, 16, 1, 128, BF16, 0, target) is not None
    assert shared_planner(4, 17, 1, 128, BF16, 0, target) is None, "query heads in more than one tile"
    assert shared_planner(4, 32, 8, 128, F32, 0, target) is None, "products in float32 have other bits there"


@pytest.mark.usefixtures("short_parts")
def test_the_dispatcher_shares_where_it_gains(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a batch of their own, among prompt tokens too, and refills of a static batch."""
    case, options = Case.make(device, (4, 1), 64, shared_dtype(F32, device)), AttentionOptions(0.125)
    used = np.flatnonzero(case.lengths)
    tables, starts = case.tables[used].astype(np.int32), (case.lengths[used] - 1).astype(np.int32)
    query = case.query[device.upload(used)]
    steady = replace(device, steady=True)
    alone = TritonAttention(steady)
    sharing = alone.always_sharing()
    assert sharing is not None and TritonAttention(replace(device, steady=False)).always_sharing() is None
    launched: list[int] = []
    launch = triton_attention.shared_decode

    def counted(*arguments: Any) -> None:
        launched.append(len(arguments[0]))
        launch(*arguments)

    monkeypatch.setattr(triton_attention, "shared_decode", counted)

    def built(counts: list[int] | None = None) -> PagedBatch:
        new = np.ones(len(used), np.int32) if counts is None else np.array(counts, np.int32)
        return PagedBatch.build(tables, starts - new + 1, new, BLOCK_SIZE, steady)

    want = alone.attend(query, case.layer, built(), options)
    assert not launched, "it saves too little"
    for _ in range(2):  # the second step finds its plans made
        assert torch.equal(sharing.attend(query, case.layer, built(), options), want)
    assert launched == [len(used)] * 2
    window = AttentionOptions(0.125, window=230)
    assert torch.equal(*(each.attend(query, case.layer, built(), window) for each in (alone, sharing)))
    mixed = [1] * 3 + [5] + [1] * (len(used) - 4)
    more = torch.cat((query[:4], query[:4], query[4:]))
    want_mixed = alone.attend(more, case.layer, built(mixed), options)
    assert torch.equal(sharing.attend(more, case.layer, built(mixed), options), want_mixed)
    assert launched == [len(used)] * 2 + [len(used) - 1]
    launched.clear()
    padding = torch.full((2, 4, 64), torch.nan, dtype=query.dtype, device=query.device)
    for shares in (False, True):
        batch = PagedBatch.static(len(used) + 2, tables.shape[1], BLOCK_SIZE, steady)
        batch.shares_reads = shares
        for rows in (len(used), 0, 4, len(used)):
            batch.fill(tables[:rows], starts[:rows] + 1)
            got = sharing.attend(torch.cat((query, padding)), case.layer, batch, options)
            assert torch.equal(got[:rows], want[:rows])
            assert torch.equal(sharing.attend(torch.cat((query, padding)), case.layer, batch, window)[:0], got[:0])
        assert len(launched) == (4 if shares else 0)
    assert sharing.gains_from_sharing(tables, starts + 1, BLOCK_SIZE)
    assert not sharing.gains_from_sharing(tables, starts + 1, BLOCK_SIZE, 64 << 20), "plans are dear in this step"
    assert not alone.gains_from_sharing(tables, starts + 1, BLOCK_SIZE)
    assert not sharing.gains_from_sharing(np.arange(8, dtype=np.int32).reshape(2, 4), starts[:2] + 1, BLOCK_SIZE)


def test_reads_are_shared_where_that_was_measured() -> None:
    """On Hopper in all dtypes of K and V but float32, and in Triton's interpreter; nowhere else."""
    on = {
        (name, head_size, dtype)
        for name, target in TARGETS.items()
        for head_size in (32, 64, 128, 192)
        for dtype in (F32, F16, BF16, I8, FP8)
        if was_measured(target, head_size, dtype)
    }
    wanted = {("sm_90", size, dtype) for size in (64, 128) for dtype in (F16, BF16, I8, FP8)}
    assert {each for each in on if each[0] != "cpu"} == wanted
    assert len([each for each in on if each[0] == "cpu"]) == 20
