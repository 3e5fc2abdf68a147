"""Decode attention over latents against dense attention in float64, and the planner that divides its work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention import latent_plan
from kvforge.worker.attention.latent_decode import LatentWorkspace, latent_decode, latent_planner, latent_problem
from kvforge.worker.attention.latent_plan import GROUPS_MAX, PART_MIN, PARTS_MAX, LatentPlanner
from kvforge.worker.attention.latent_tiles import hopper_problem
from kvforge.worker.attention.plan_items import FIELDS, LATENT_HEAD, LATENT_MERGE, LATENT_PART, named
from kvforge.worker.attention.prefill_plan import gluon_problem
from kvforge.worker.attention.triton_attention import is_interpreted
from kvforge.worker.device.device import open_device
from kvforge.worker.device.targets import TARGETS, current_target

DEVICE = open_device("auto")
runs_kernels = pytest.mark.skipif(
    not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LENGTHS = [1, 2, 33, 0, 130, 64, 300, 32, 700]


@dataclass
class Case:
    """Random rows in a pool with NaN in unreachable slots. latents: [tokens, width] float64 of each row, as stored."""

    query: torch.Tensor
    cache: torch.Tensor
    tables: torch.Tensor
    lengths: npt.NDArray[np.int64]
    latents: list[torch.Tensor]
    latent: int
    scaling: float

    @classmethod
    def make(
        cls,
        lengths: list[int],
        heads: int,
        latent: int,
        rope: int,
        block_size: int,
        dtype: torch.dtype,
        seed: int = 0,
        blocks_more: int = 2,
    ) -> Case:
        """Return the same row for the same seed and place in `lengths`."""
        rng = np.random.default_rng(block_size + blocks_more)
        needed = [-(-length // block_size) for length in lengths]
        ids = rng.permutation(sum(needed) + blocks_more).astype(np.int32)
        tables = np.full((len(lengths), max(needed) + 1), 2**31 - 1, np.int32)  # never read past a row's tokens
        cache = torch.full((sum(needed) + blocks_more, block_size, latent + rope), torch.nan, dtype=dtype)
        query, rows = [], []
        for row, length in enumerate(lengths):
            generator = torch.Generator().manual_seed(1000 * seed + row)
            query.append(torch.randn((heads, latent + rope), generator=generator))
            numbers = torch.randn((length, latent + rope), generator=generator).to(dtype)
            tables[row, : needed[row]], ids = ids[: needed[row]], ids[needed[row] :]
            positions = np.arange(length)
            cache[tables[row, positions // block_size], positions % block_size] = numbers
            rows.append(numbers.double().to(DEVICE.torch_device))
        on = DEVICE.torch_device
        queries = torch.stack(query).to(on, dtype)
        scaling = float((latent + rope) ** -0.5)
        tables_on = torch.from_numpy(tables).to(on)
        return cls(queries, cache.to(on), tables_on, np.array(lengths, np.int64), rows, latent, scaling)

    def planner(self, rows_max: int = 0) -> LatentPlanner:
        rows, heads, _ = self.query.shape
        shape = heads, self.latent, self.cache.dtype
        return latent_planner(max(rows, rows_max), *shape, current_target(DEVICE))

    def paged(self, planner: LatentPlanner | None = None) -> torch.Tensor:
        """Return [rows, heads, latent], 7 in rows without tokens."""
        planner = planner or self.planner()
        rows, heads, _ = self.query.shape
        workspace = LatentWorkspace.allocate(planner, heads, self.latent, self.query.device)
        workspace.partials.fill_(torch.nan)
        workspace.sizes.fill_(torch.nan)
        plan = torch.from_numpy(planner.plan(self.lengths)).to(self.query.device)
        output = torch.full((rows, heads, self.latent), 7.0, dtype=self.query.dtype, device=self.query.device)
        arguments = (self.query, self.cache[:, :, None], self.tables, planner, plan, output, workspace, self.scaling)
        latent_decode(*arguments, current_target(DEVICE))
        return output

    def only(self, row: int) -> Case:
        """Return the case of one row, in the same pool."""
        query, tables, lengths = (each[row : row + 1] for each in (self.query, self.tables, self.lengths))
        return replace(self, query=query, tables=tables, lengths=lengths)

    def dense(self) -> torch.Tensor:
        outputs = []
        for query, latents in zip(self.query.double(), self.latents, strict=True):
            if not len(latents):
                outputs.append(torch.full_like(query[:, : self.latent], 7.0))
                continue
            weights = (query @ latents.T * self.scaling).softmax(-1)
            outputs.append(weights @ latents[:, : self.latent])
        return torch.stack(outputs)


def compare(case: Case, planner: LatentPlanner | None = None) -> None:
    got, want = case.paged(planner), case.dense()
    assert torch.isfinite(got).all()
    assert float((got.double() - want).abs().max()) <= TOLERANCE[case.cache.dtype]


@runs_kernels
@pytest.mark.parametrize(
    ("heads", "latent", "rope", "block_size", "dtype"),
    [
        (16, 32, 16, 16, torch.float32),
        (5, 256, 32, 8, torch.float32),
        (70, 40, 24, 32, torch.float32),
        (16, 512, 64, 64, torch.bfloat16),
        (40, 64, 8, 16, torch.float16),
    ],
)
def test_paged_equals_dense(heads: int, latent: int, rope: int, block_size: int, dtype: torch.dtype) -> None:
    compare(Case.make(LENGTHS, heads, latent, rope, block_size, dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 32), (40, 24)])
def test_full_grid(latent: int, rope: int, dtype: torch.dtype) -> None:
    lengths = [*LENGTHS, 511, 513, 4097, 20_000]
    for heads, block_size in itertools.product([5, 16, 24, 64, 128], [8, 16, 64]):
        case = Case.make(lengths, heads, latent, rope, block_size, dtype)
        among = case.paged()
        compare(case)
        for planner in (coarse(case.planner()), fine(case.planner())):
            assert torch.equal(case.paged(planner), among)
        for row in range(len(lengths)):
            assert torch.equal(case.only(row).paged()[0], among[row])


@runs_kernels
@pytest.mark.parametrize("tokens", [1, 16, 32, 64, PART_MIN, 4 * PART_MIN, 5 * PART_MIN])
def test_lengths_at_the_borders_of_steps_parts_and_groups(tokens: int) -> None:
    compare(Case.make([max(tokens - 1, 1), tokens, tokens + 1], 16, 32, 16, 16, torch.float32))


def coarse(planner: LatentPlanner) -> LatentPlanner:
    """Return a planner that makes no item of a part."""
    return replace(planner, programs=1)


def fine(planner: LatentPlanner) -> LatentPlanner:
    """Return a planner that makes an item of every part."""
    return replace(planner, programs=1000)


@runs_kernels
@pytest.mark.parametrize(
    ("heads", "lengths", "groups", "parts"),
    [
        (16, [1500, 70, 513, 3, 900], 3 + 1 + 2 + 1 + 2, 12 + 1 + 5 + 1 + 8),
        (40, [600, 70, 513, 3], 2 + 1 + 2 + 1, 5 + 1 + 5 + 1),  # three tiles of heads: three times the work
    ],
)
def test_bits_depend_on_a_rows_own_length_alone(heads: int, lengths: list[int], groups: int, parts: int) -> None:
    """A row alone, divided finely, among others, and in other blocks of the pool."""
    case = Case.make(lengths, heads, 32, 16, 16, torch.float32)
    items = {
        each: parts_of(each.plan(case.lengths), each)[0] for each in (coarse(case.planner()), fine(case.planner()))
    }
    assert [len(each) for each in items.values()] == [groups, parts if case.planner().folds else groups]
    among, split = (case.paged(planner) for planner in items)
    assert torch.equal(among, split)
    compare(case, fine(case.planner()))
    moved = Case.make(lengths, heads, 32, 16, 16, torch.float32, blocks_more=5)
    moved.tables[:, -1] = 0
    assert torch.equal(moved.paged(), among)
    # Interpreted, the longest row takes most of the time: it runs alone with the fewer heads.
    for row in range(len(lengths)) if heads == 16 else (1, 2, 3):
        alone = case.only(row)
        for planner in (coarse(alone.planner()), fine(alone.planner()), alone.planner(rows_max=7)):
            assert torch.equal(alone.paged(planner)[0], among[row]), row


@runs_kernels
def test_broken_numbers_stay_in_their_row() -> None:
    case = Case.make([130, 40, 600], 16, 32, 16, 16, torch.float32)
    want = case.paged()
    case.cache[case.tables[0, 2], 5] = torch.nan
    got = case.paged()
    assert torch.isnan(got[0]).all()
    assert torch.equal(got[1:], want[1:])


def parts_of(array: npt.NDArray[np.int32], planner: LatentPlanner) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the items of a plan, as many as its header counts (the rest must be empty), and its merges."""
    count = int(named(array[:FIELDS], LATENT_HEAD)["items"][0])
    assert not array[FIELDS * (1 + count) : planner.merges].any()
    return (
        named(array[FIELDS : FIELDS * (1 + count)], LATENT_PART),
        named(array[planner.merges :], LATENT_MERGE),
    )


@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.parametrize("programs", [1, 30, 132])
@pytest.mark.parametrize("rows", [1, 2, 40, 256])
def test_plan_covers_every_token_once(rows: int, programs: int, folds: bool) -> None:
    rng = np.random.default_rng(rows)
    for longest in (1, 100, 1000, 20_000, 200_000):
        lengths = rng.integers(0, longest + 1, rows)
        planner = LatentPlanner(rows, programs, folds)
        array = planner.plan(lengths)
        assert array.dtype == np.int32 and array.size == planner.size
        items, merges = parts_of(array, planner)
        assert (items["begin"] < items["end"]).all()
        assert (np.diff(items["end"] - items["begin"]) <= 0).all()
        slots = items["slot"][items["slot"] >= 0]
        assert len(set(slots)) == len(slots) and slots.max(initial=0) < planner.items_max
        for row, length in enumerate(lengths):
            of_row = items[items["row"] == row]
            of_row = of_row[np.argsort(of_row["begin"])]
            edges = [*of_row["begin"], length] if length else [length]
            assert edges == ([0, *of_row["end"]] if length else [0])
            assert (of_row["begin"] % max(PART_MIN, *of_row["part_tokens"], 1) == 0).all()
            assert merges["slots"][row] == (len(of_row) if len(of_row) > 1 else 0)
            if len(of_row) > 1:
                assert of_row["slot"].tolist() == list(merges["first_slot"][row] + np.arange(len(of_row)))
            else:
                assert (of_row["slot"] == -1).all()


def test_a_rows_tree_depends_on_its_length_alone() -> None:
    """Parts and groups, whatever the items."""
    for length in (1, 128, 129, 512, 4096, 16_384, 100_000):
        found = set()
        for programs, others in ((1, []), (1000, []), (132, [5000] * 30), (132, [100] * 3)):
            planner = LatentPlanner(1 + len(others), programs)
            items, merges = parts_of(planner.plan(np.array([length, *others])), planner)
            mine = items[items["row"] == 0]
            size = int((mine["end"] - mine["begin"]).max())
            part = int(mine["part_tokens"][0])
            group = part * int(merges["group"][0]) if size <= part and len(mine) > 1 else size
            found.add((min(part, length), min(group, length)))
        assert len({part for part, _ in found}) == 1
        assert -(-length // min(found)[0]) <= PARTS_MAX
        assert all(-(-length // group) <= GROUPS_MAX or group == part for part, group in found)


def test_few_rows_are_divided_among_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for lengths, expected in (([4096], 32), ([16_384], 128), ([4096] * 16, 128), ([4096] * 64, 512)):
        planner = LatentPlanner(len(lengths), 132)
        items, _ = parts_of(planner.plan(np.array(lengths)), planner)
        assert len(items) == expected, lengths
    monkeypatch.setattr(latent_plan, "ITEM_TOKENS", 0)
    planner = LatentPlanner(64, 132)
    items, _ = parts_of(planner.plan(np.full(64, 1024)), planner)
    assert len(items) in (128, 512)


def test_hopper_decodes_few_heads_over_whole_tiles() -> None:
    hopper, bf16 = TARGETS["sm_90"], torch.bfloat16
    problems = [hopper_problem(16, 512, 64, bf16, hopper), hopper_problem(5, 256, 64, torch.float16, hopper)]
    problems += [hopper_problem(16, 512, 64, dtype, hopper) for dtype in (torch.int8, torch.float8_e4m3fn)]
    assert problems == [gluon_problem()] * 4
    assert "no 17 heads" in hopper_problem(17, 512, 64, bf16, hopper)
    assert "512 + 32" in hopper_problem(16, 512, 32, bf16, hopper)
    assert "torch.float32" in hopper_problem(16, 512, 64, torch.float32, hopper)
    assert "not a Hopper" in hopper_problem(16, 512, 64, bf16, TARGETS["sm_100"])


def test_unsupported_latents_are_named() -> None:
    wide, hopper = TARGETS["gfx1100"], TARGETS["sm_90"]
    assert not latent_problem(512, 64, torch.bfloat16, hopper) and not latent_problem(256, 32, torch.float16, wide)
    assert "latents of 513 with" in latent_problem(513, 64, torch.bfloat16, hopper)
    assert "rotary keys of 72" in latent_problem(512, 72, torch.bfloat16, hopper)
    assert "torch.int32" in latent_problem(512, 64, torch.int32, hopper)
    assert not any(latent_problem(512, 64, dtype, hopper) for dtype in (torch.int8, torch.float8_e4m3fn))
    assert "gfx1100 has no matrix instructions" in latent_problem(512, 64, torch.float32, wide)
    assert "sm_75 has no matrix instructions" in latent_problem(512, 64, torch.float16, TARGETS["sm_75"])
