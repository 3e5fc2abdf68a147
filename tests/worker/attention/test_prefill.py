"""Behaviour 37 for paged prefill: the kernels against dense attention in float64, with NaN in all unreachable memory.

Without a GPU the portable kernel runs in Triton's interpreter, on a part of the grid; with one, the whole grid runs.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention.interface import AttentionOptions, KvLayer
from kvforge.worker.attention.plan_items import FIELDS, PREFILL_TILE, named
from kvforge.worker.attention.prefill import paged_prefill
from kvforge.worker.attention.prefill_copy import PAGE, PAGES_MAX, copy_groups, copy_rows, plan_copies, workspace_for
from kvforge.worker.attention.prefill_plan import packed_heads, plan_prefill, prefill_shape
from kvforge.worker.attention.quantised import dequantise, is_quantised, quantise
from kvforge.worker.device.device import open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import TARGETS, current_target
from tests.worker.kernels.launches import compiler_environment

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
# Largest relative error of a number, and of all numbers by the Euclidean norm. Numbers of the output are below 5.
# Quantised K and V are compared with attention over the dequantised numbers, within the same bounds.
TOLERANCES = {F32: (1e-5, 2e-6), F16: (4e-3, 6e-4), BF16: (4e-2, 5e-3)}
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device")]
HEADS = {"mha": (4, 4), "gqa": (8, 2), "gqa3": (6, 2), "mqa": (8, 1)}
# (start, count) of each row.
ROWS = {
    "one": [(0, 1)],
    "short": [(0, 5), (3, 2), (0, 1), (21, 1)],
    "ragged": [(0, 37), (50, 20), (16, 16), (7, 1), (0, 64)],
    "long": [(0, 700), (500, 130), (129, 1), (1, 127), (0, 128), (900, 300), (33, 2)],
}


@dataclass(frozen=True)
class Case:
    rows: str
    heads: str = "gqa"
    head_size: int = 64
    block_size: int = 16
    query: torch.dtype = F32
    stored: torch.dtype = F32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.head_size**-0.5, window=self.window, softcap=self.softcap)

    def options_on(self, device: torch.device) -> AttentionOptions:
        heads, _ = HEADS[self.heads]
        return replace(self.options, sinks=torch.linspace(3.0, -4.0, heads, device=device) if self.sinks else None)

    def __str__(self) -> str:
        names = (str(d).removeprefix("torch.") for d in (self.query, self.stored))
        extra = f"-window{self.window}" * (self.window > 0) + "-cap" * (self.softcap > 0) + "-sinks" * self.sinks
        return f"{self.rows}-{self.heads}-{self.head_size}-block{self.block_size}-{'-'.join(names)}{extra}"


class Made:
    """Random inputs. Memory that a row cannot reach is NaN: other blocks, slots past its end or before its window."""

    def __init__(self, case: Case, device: torch.device) -> None:
        generator, random = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.case, self.device = case, device
        self.starts = np.array([start for start, _ in ROWS[case.rows]], np.int64)
        self.counts = np.array([count for _, count in ROWS[case.rows]], np.int64)
        self.lengths = self.starts + self.counts
        self.query_starts = np.concatenate([[0], np.cumsum(self.counts)])
        heads, self.kv_heads = HEADS[case.heads]
        blocks = -(-self.lengths // case.block_size)
        order = random.permutation(int(blocks.sum()) + 3)
        self.tables = np.full((len(blocks), int(blocks.max()) + 1), order[-1], np.int32)
        shape = (len(order), case.block_size, self.kv_heads, case.head_size)
        k, v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for row, (length, first) in enumerate(zip(self.lengths, np.cumsum(blocks) - blocks, strict=True)):
            self.tables[row, : blocks[row]] = order[first : first + blocks[row]]
            low = max(0, self.starts[row] - case.window + 1) if case.window else 0
            slots = self.slots(row)[low:length]
            self.tables[row, : low // case.block_size] = 2**31 - 1  # blocks behind the window may be freed
            for cache in (k, v):
                numbers = torch.randn(length - low, *shape[2:], generator=generator)
                cache.view(-1, *shape[2:])[slots] = numbers
        self.query = torch.randn(int(self.query_starts[-1]), heads, case.head_size, generator=generator).to(case.query)
        if is_quantised(case.stored):
            (k8, k_scales), (v8, v_scales) = quantise(k, case.stored), quantise(v, case.stored)
            self.layer = KvLayer(*(tensor.to(device) for tensor in (k8, v8, k_scales, v_scales)))
            self.k, self.v = dequantise(k8, k_scales).double(), dequantise(v8, v_scales).double()
        else:
            self.layer = KvLayer(k.to(device, case.stored), v.to(device, case.stored))
            self.k, self.v = k.to(case.stored).double(), v.to(case.stored).double()

    def slots(self, row: int) -> torch.Tensor:
        positions = np.arange(self.tables.shape[1] * self.case.block_size)
        blocks = self.tables[row, positions // self.case.block_size].astype(np.int64)
        return torch.from_numpy(blocks * self.case.block_size + positions % self.case.block_size)

    def dense(self) -> torch.Tensor:
        outputs = []
        for row, (start, count, length) in enumerate(zip(self.starts, self.counts, self.lengths, strict=True)):
            low = max(0, start - self.case.window + 1) if self.case.window else 0
            slots = self.slots(row)[low:length]
            k, v = (cache.view(-1, *cache.shape[2:])[slots] for cache in (self.k, self.v))
            query = self.query[self.query_starts[row] : self.query_starts[row + 1]].double()
            q = query.view(count, self.kv_heads, -1, self.case.head_size)
            scores = torch.einsum("qhgd,nhd->hgqn", q, k) * self.case.options.scaling
            if self.case.softcap:
                scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
            queries, keys = torch.arange(start, length)[:, None], torch.arange(low, length)[None]
            hidden = keys > queries
            if self.case.window:
                hidden |= keys <= queries - self.case.window
            scores = scores.masked_fill(hidden, -torch.inf)
            sinks = self.case.options_on(torch.device("cpu")).sinks
            if sinks is not None:
                each = sinks.double().view(self.kv_heads, -1, 1, 1).expand(-1, -1, int(count), 1)
                scores = torch.cat((scores, each), -1)
            weights = scores.softmax(-1)[..., : length - low]
            outputs.append(torch.einsum("hgqn,nhd->qhgd", weights, v).reshape(query.shape))
        return torch.cat(outputs)

    def alone(self, row: int) -> Made:
        """Return a step of this row alone, over the same memory."""
        one, mine = copy(self), slice(row, row + 1)
        one.starts, one.counts, one.lengths = self.starts[mine], self.counts[mine], self.lengths[mine]
        one.query_starts, one.tables = np.array([0, self.counts[row]]), self.tables[mine]
        one.query = self.query[self.query_starts[row] : self.query_starts[row + 1]]
        return one

    def paged(self, target: Target, copied: bool = False) -> torch.Tensor:
        layer, options = self.layer, self.case.options_on(self.device)
        tokens = prefill_shape(self.query.shape[1], self.query.dtype, layer, options, target, copied).tokens
        items = plan_prefill(self.starts, self.counts, self.query_starts, tokens)
        output = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype, device=self.device)
        tables = torch.from_numpy(self.tables).to(self.device)
        extra = {}
        if copied:
            copies = plan_copies(items)
            workspace = workspace_for(len(copies) + 1, layer, self.query.dtype).fill_(torch.nan)
            extra = {"copies": torch.from_numpy(copies).to(self.device), "workspace": workspace}
        on_device = torch.from_numpy(items).to(self.device)
        paged_prefill(self.query.to(self.device), layer, tables, on_device, output, options, target, **extra)
        return output.cpu()


def check(case: Case, target: Target, device: torch.device, copied: bool = False) -> None:
    made = Made(case, device)
    want, got = made.dense(), made.paged(target, copied)
    assert got.dtype == case.query
    assert torch.isfinite(got).all()
    largest, relative = TOLERANCES[case.query]
    difference = got.double() - want
    assert float(difference.abs().max()) <= largest
    assert float(difference.norm() / want.norm()) <= relative


def pairwise() -> list[Case]:
    """Every two values of different factors meet in some case."""
    dtypes = [(F32, F32), (F16, F16), (BF16, BF16), (F16, I8), (BF16, FP8), (F32, I8), (F16, FP8), (BF16, I8)]
    factors = [list(ROWS)[:3], list(HEADS), [64, 80, 96, 128, 256], [8, 16, 32, 64, 128], dtypes]
    extras = [(0, 0.0, False), (1, 0.0, False), (9, 20.0, True), (24, 0.0, True), (0, 20.0, False), (0, 0.0, True)]
    product = [(*values, extra) for *values, extra in itertools.product(*factors, extras)]
    np.random.default_rng(1).shuffle(product)  # type: ignore[arg-type]
    missing = {pair for values in product for pair in _pairs(values)}
    chosen = []
    while missing:
        best = max(product[:2000], key=lambda values: len(missing & _pairs(values)))
        found = missing & _pairs(best)
        if not found:
            product = product[2000:]
            continue
        missing -= found
        rows, heads, head_size, block_size, (query, stored), (window, softcap, sinks) = best
        chosen.append(Case(rows, heads, head_size, block_size, query, stored, window, softcap, sinks))
    return chosen


@functools.cache
def _pairs(values: tuple[object, ...]) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations([(place, str(value)) for place, value in enumerate(values)], 2))


# behaviour 37
@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_equals_dense_in_the_interpreter(case: Case) -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the whole grid runs on it")
    check(case, TARGETS["cpu"], torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_targets runs it on a GPU")
@pytest.mark.parametrize("stored", [I8, FP8], ids=str)
@pytest.mark.parametrize("query", [F16, F32], ids=str)
def test_numbers_whose_bits_are_put_together_are_the_same(query: torch.dtype, stored: torch.dtype) -> None:
    """For GPUs without a conversion, or with a compiler that lacks the dtype: the same bits as elsewhere."""
    case, device = Case("short", "gqa", 80, 8, query, stored, 9), torch.device("cpu")
    bitwise = replace(TARGETS["cpu"], bitwise=(I8, FP8))
    check(case, bitwise, device)
    assert torch.equal(Made(case, device).paged(bitwise), Made(case, device).paged(TARGETS["cpu"]))


def whole_grid() -> list[Case]:
    """Head counts x head sizes x block sizes in each dtype of 16 bits; the other factors in pairs with them."""
    cases = [
        Case("long", heads, head_size, block_size, dtype, dtype)
        for heads, head_size, block_size in itertools.product(HEADS, [64, 80, 96, 128, 256], [8, 16, 32, 64, 128])
        for dtype in ([BF16, F16] if heads == "gqa" else [BF16])
    ]
    for window, softcap in [(1, 0.0), (40, 0.0), (200, 0.0), (200, 20.0), (0, 20.0)]:
        for head_size, block_size in [(64, 8), (80, 16), (128, 16), (128, 128), (256, 32), (256, 128)]:
            cases.append(Case("long", "gqa", head_size, block_size, BF16, BF16, window, softcap))
    for head_size, window, softcap in [(64, 0, 0.0), (96, 0, 0.0), (128, 200, 0.0), (256, 40, 20.0)]:
        cases += [Case("long", heads, head_size, 16, BF16, BF16, window, softcap, sinks=True) for heads in HEADS]
    others = [(F32, F32), (F16, I8), (BF16, I8), (F32, I8), (F16, FP8), (BF16, FP8), (F32, FP8), (F32, F16)]
    for query, stored in others:
        for number, head_size in enumerate([64, 80, 96, 128, 256]):
            for heads, window in [("gqa", 0), ("mqa", 200)]:
                block_size = [8, 16, 32, 64, 128][(number + (window > 0)) % 5]
                cap, sinks = 20.0 * (number == 3), number % 2 == 0
                cases.append(Case("long", heads, head_size, block_size, query, stored, window, cap, sinks))
    return cases


def test_a_row_has_the_same_bits_in_company() -> None:
    """With sinks, in tiles that other rows do not share."""
    device = open_device("auto")
    target = replace(current_target(device), steady=True)
    for window in (0, 24):
        made = Made(Case("ragged", window=window, sinks=True), device.torch_device)
        together = made.paged(target)
        for row, (first, last) in enumerate(itertools.pairwise(made.query_starts.tolist())):
            assert torch.equal(made.alone(row).paged(target), together[first:last])


# behaviour 37
@pytest.mark.parametrize("case", [pytest.param(case, marks=gpu) for case in whole_grid()], ids=str)
def test_equals_dense_on_a_gpu(case: Case) -> None:
    device = open_device("auto")
    check(case, current_target(device), device.torch_device)


@pytest.mark.parametrize("case", [pytest.param(case, marks=gpu) for case in whole_grid()[::7]], ids=str)
def test_portable_kernel_on_a_gpu(case: Case) -> None:
    device = open_device("auto")
    check(case, replace(current_target(device), hopper=False), device.torch_device)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=gpu) for case in whole_grid() if is_quantised(case.stored)], ids=str
)
def test_copied_rows_on_a_gpu(case: Case) -> None:
    device = open_device("auto")
    target, made = current_target(device), Made(case, device.torch_device)
    options = case.options_on(device.torch_device)
    shape = prefill_shape(made.query.shape[1], case.query, made.layer, options, target, copied=True)
    if not shape.hopper:
        pytest.skip("the portable kernel uses no workspace")
    check(case, target, device.torch_device, copied=True)


@pytest.mark.parametrize("stored", [I8, FP8])
def test_copies_are_what_is_stored(stored: torch.dtype) -> None:
    case = Case("ragged", "gqa", 80, 16, F16, stored)
    device = open_device("auto").torch_device
    made = Made(case, device)
    items = plan_prefill(made.starts, made.counts, made.query_starts, 16)
    copies = plan_copies(items)
    workspace = workspace_for(len(copies) + 2, made.layer, F16).fill_(7.0)
    tables = torch.from_numpy(made.tables).to(device)
    layer = copy_rows(made.layer, tables, torch.from_numpy(copies).to(device), workspace, 0)
    first = {int(tile["row"]): int(tile["first_page"]) for tile in named(items, PREFILL_TILE)}
    for row, length in enumerate(made.lengths):
        for got, want in ((layer.keys, made.k), (layer.values, made.v)):
            mine = got.cpu().view(-1, *got.shape[2:])[first[row] * PAGE :]
            stored_numbers = want.view(-1, *want.shape[2:])[made.slots(row)[:length]]
            assert torch.equal(mine[:length], stored_numbers.to(F16))
            pages = -(-length // PAGE) * PAGE
            assert (mine[length:pages] == 0).all()  # overwritten, since it is multiplied by weights of 0


@pytest.mark.parametrize("tokens", [1, 16, 32, 128])
@pytest.mark.parametrize("rows", ROWS)
def test_plan_covers_each_token_once(rows: str, tokens: int) -> None:
    starts, counts = (np.array(column) for column in zip(*ROWS[rows], strict=True))
    query_starts = np.concatenate([[0], np.cumsum(counts)])
    items = plan_prefill(starts, counts, query_starts, tokens)
    assert items.dtype == np.int32
    assert items.shape[1] == FIELDS
    seen = np.zeros(int(counts.sum()), np.int64)
    for row, token, position, count, start, length, _, _ in named(items, PREFILL_TILE):
        assert 1 <= count <= tokens
        assert (start, length) == (starts[row], starts[row] + counts[row])
        assert token - query_starts[row] == position - start
        seen[token : token + count] += 1
    assert (seen == 1).all()
    work = named(items, PREFILL_TILE)["position"] + named(items, PREFILL_TILE)["tokens"]
    assert (np.diff(work) <= 0).all()


def test_rows_that_are_not_planned_stay() -> None:
    made = Made(Case("ragged"), torch.device("cpu") if not torch.cuda.is_available() else torch.device("cuda"))
    target = TARGETS["cpu"] if made.device.type == "cpu" else current_target(open_device("auto"))
    tokens = prefill_shape(made.query.shape[1], F32, made.layer, made.case.options, target).tokens
    items = plan_prefill(made.starts, made.counts, made.query_starts, tokens, np.array([1, 3]))
    output = torch.full(made.query.shape, 7.0, device=made.device)
    tables = torch.from_numpy(made.tables).to(made.device)
    arguments = (torch.from_numpy(items).to(made.device), output, made.case.options, target)
    paged_prefill(made.query.to(made.device), made.layer, tables, *arguments)
    want, got = made.dense(), output.cpu().double()
    for row, planned in enumerate([False, True, False, True, False]):
        mine = slice(int(made.query_starts[row]), int(made.query_starts[row + 1]))
        expected = want[mine] if planned else torch.full_like(want[mine], 7.0)
        assert float((got[mine] - expected).abs().max()) <= TOLERANCES[F32][0]


def test_packs_divide_the_group() -> None:
    assert [packed_heads(group) for group in (1, 2, 3, 4, 6, 7, 8, 12, 32, 128)] == [1, 2, 1, 4, 2, 1, 8, 4, 16, 16]


def test_rows_of_many_new_tokens_are_copied_in_groups_that_fit() -> None:
    starts = np.array([0, 4096, 4096, 60_000, 65_000, 0, 0])
    counts = np.array([2048, 4, 512, 5_000, 1_000, 48, 47])
    straight, groups = copy_groups(starts, counts, 4, np.arange(7))
    assert straight.tolist() == [1, 4, 6]  # few new tokens; more pages than a workspace has; one token too few
    pages = [16, 36, 508, 1]
    assert [group.tolist() for group in groups] == [[0, 2], [3, 5]]
    assert pages[0] + pages[1] + pages[2] > PAGES_MAX >= pages[2] + pages[3]
    nothing, none = copy_groups(starts, counts, 4, np.arange(0))
    assert (len(nothing), none) == (0, [])


COMPILE_FOR_HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from tools.aot.attention import hopper_configurations
from kvforge.worker.device.targets import TARGETS

made = hopper_configurations(TARGETS["sm_90"])[0].specialisation
source = GluonASTSource(made.kernel, made.types, made.constants, made.attributes)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=made.options).asm["ptx"]
print(ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor"))
"""


def test_hopper_kernel_uses_groups_of_warps_and_the_copy_engine(tmp_path: Path) -> None:
    """`test_aot` checks the device limits in every configuration. A separate process, because kernels are interpreted
    here."""
    command = [sys.executable, "-c", COMPILE_FOR_HOPPER]
    environment = compiler_environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    products, copies = map(int, done.stdout.split())
    assert products >= 32
    assert copies >= 3  # Q, K, V
