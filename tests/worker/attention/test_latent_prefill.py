"""Prefill attention over latents against dense attention in float64, and the kernel that stores latents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention.latent_prefill import latent_prefill, latent_prefill_tokens
from kvforge.worker.attention.latent_write import write_latents
from kvforge.worker.attention.plan_items import FIELDS
from kvforge.worker.attention.prefill_plan import plan_prefill
from kvforge.worker.device.targets import current_target
from tests.worker.attention.test_latent_decode import DEVICE, TOLERANCE, Case, runs_kernels

ROWS = [(0, 2), (0, 33), (17, 1), (64, 40), (3, 9), (31, 33), (100, 29)]  # tokens before the new ones, new ones


def prefilled(case: Case, rows: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Return [tokens, heads, latent] of each row. The query of a token is its row's, moved by its position."""
    heads = case.query.shape[1]
    dtype, latent = case.cache.dtype, case.latent
    starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    query_starts = np.concatenate(([0], np.cumsum(counts)))
    tokens = latent_prefill_tokens(heads, latent, dtype, current_target(DEVICE))
    items = torch.from_numpy(plan_prefill(starts, counts, query_starts, tokens)).view(-1, FIELDS)
    query = torch.cat([queries_of(case, row, *each) for row, each in enumerate(rows)])
    output = torch.full((len(query), heads, latent), torch.nan, dtype=dtype, device=query.device)
    arguments = (query, case.cache[:, :, None], case.tables, items.to(query.device), output, case.scaling)
    latent_prefill(*arguments, current_target(DEVICE))
    return list(output.split(counts.tolist()))


def queries_of(case: Case, row: int, start: int, count: int) -> torch.Tensor:
    places = torch.arange(start, start + count, device=case.query.device)
    return torch.stack([case.query[row].roll(int(place), -1) for place in places])


def make(rows: list[tuple[int, int]], heads: int, latent: int, rope: int, block_size: int, dtype: torch.dtype) -> Case:
    return Case.make([start + count for start, count in rows], heads, latent, rope, block_size, dtype)


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
def test_prefill_equals_dense(heads: int, latent: int, rope: int, block_size: int, dtype: torch.dtype) -> None:
    rows = ROWS if heads < 70 else ROWS[2:5]  # interpreted, each tile of tokens and heads takes as long
    case = make(rows, heads, latent, rope, block_size, dtype)
    for row, (got, (start, count)) in enumerate(zip(prefilled(case, rows), rows, strict=True)):
        scores = queries_of(case, row, start, count).double() @ case.latents[row].T * case.scaling
        seen = torch.arange(start + count)[None] <= torch.arange(start, start + count)[:, None]
        weights = scores.masked_fill(~seen[:, None].to(scores.device), -torch.inf).softmax(-1)
        assert float((got.double() - weights @ case.latents[row][:, :latent]).abs().max()) <= TOLERANCE[dtype]


@runs_kernels
def test_bits_of_a_token_depend_on_its_own_row_alone() -> None:
    """In chunks of any length, from any token on.

    numpy, which computes interpreted kernels, rounds a column of a product by its place: chunks begin with a tile.
    """
    case = make(ROWS, 16, 32, 16, 16, torch.float32)
    among = prefilled(case, ROWS)
    unit = 1 if DEVICE.runs_kernels else latent_prefill_tokens(16, 32, torch.float32, current_target(DEVICE))
    for cut in (1, 5, 18):
        first = [(start, min(cut, count)) for start, count in ROWS]
        for got, want in zip(prefilled(case, first), among, strict=True):
            assert torch.equal(got, want[: len(got)])
        skipped = [min(cut, count - 1) // unit * unit for _, count in ROWS]
        rest = [(start + skip, count - skip) for skip, (start, count) in zip(skipped, ROWS, strict=True)]
        for got, want in zip(prefilled(case, rest), among, strict=True):
            assert torch.equal(got, want[-len(got) :])


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [48, 96, 576])
def test_latents_are_stored_in_their_slots(width: int, dtype: torch.dtype) -> None:
    """NaN and infinity too; a token without a slot is not stored."""
    on = DEVICE.torch_device
    packed = torch.randn((7, width + 8), generator=torch.Generator().manual_seed(width)).to(on, dtype)
    numbers = packed[:, :width]
    numbers[2, 5], numbers[3, -1] = torch.nan, torch.inf
    slots = torch.tensor([3, -1, 9, 0, 31, -1, 16], device=on)
    cache = torch.full((4, 8, width), 7.0, dtype=dtype, device=on)
    want = cache.clone().view(32, width)
    want[slots[slots >= 0]] = numbers[slots >= 0]
    write_latents(numbers, cache[:, :, None], slots.int(), current_target(DEVICE))
    assert torch.equal(cache.view(32, width).nan_to_num(8.0), want.nan_to_num(8.0))
