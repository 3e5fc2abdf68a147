"""Prompt tokens over keys and values expanded from latents: the absorbed form's numbers, each token in its form."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention import AttentionOptions, KvLayer, PagedBatch, ReferenceAttention, expanded_space
from kvforge.worker.attention.expanded import PromptParts, latents_of, prompt_parts
from kvforge.worker.attention.expanded_space import ExpandedSpaces
from kvforge.worker.attention.quantised import is_quantised
from kvforge.worker.attention.triton_attention import TritonAttention
from kvforge.worker.device.device import open_device
from kvforge.worker.kernels import latent as latent_module
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.latent import attend_latents
from kvforge.worker.kernels.layer_weights import FusedLayer, LatentAttention, Norm, Projection
from kvforge.worker.kernels.plain import PlainOperations

CPU = open_device("cpu")
F32, BF16, I8, FP8 = torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn
LATENT, ROTATED, PLAIN, VALUE, HIDDEN, BLOCK_SIZE = 48, 16, 32, 40, 64, 8
LIMIT = 32  # positions in the expanded form, in tests that lower it
# (start, new tokens, generated): prompts from the start and later, decodes, and one across the limit.
ROWS = [(0, 20, False), (11, 1, True), (13, 9, False), (20, 25, False), (40, 3, False), (0, 1, False), (31, 1, True)]


class Expanding(ReferenceAttention):
    """Plain attention that expands prompts, as on Hopper."""

    def __init__(self) -> None:
        self.expanded_spaces = ExpandedSpaces(torch.device("cpu"))


def layer_of(heads: int, seed: int = 0, device: Any = "cpu", dtype: torch.dtype = F32) -> FusedLayer:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)

    parts = random(heads, PLAIN + VALUE, LATENT)
    keys, values = parts.split((PLAIN, VALUE), dim=1)
    norm = Norm(random(LATENT).abs() + 0.5, 1e-6)
    latent = LatentAttention(None, None, norm, keys, values.mT, parts.flatten(0, 1), ROTATED)
    projected = Projection(random(heads * (PLAIN + ROTATED) + LATENT + ROTATED, HIDDEN) * 4, None)
    chosen = {"latent": latent, "projected": projected, "heads": heads, "options": AttentionOptions(0.2)}
    layer = object.__new__(FusedLayer)
    for name, value in chosen.items():
        object.__setattr__(layer, name, value)
    return layer


def batch_of(rows: list[tuple[int, int, bool]], device: Any = CPU) -> PagedBatch:
    starts, counts = (np.array([row[place] for row in rows], np.int32) for place in (0, 1))
    needed = -(-(starts + counts) // BLOCK_SIZE)
    ids = np.random.default_rng(0).permutation(int(needed.sum())).astype(np.int32)
    tables = np.zeros((len(rows), int(needed.max())), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], ids = ids[:count], ids[count:]
    generated = np.array([row[2] for row in rows])
    return PagedBatch.build(tables, starts, counts, BLOCK_SIZE, device, generated)


def cache_of(rows: list[tuple[int, int, bool]], dtype: torch.dtype, device: Any = "cpu") -> KvLayer:
    """Return a pool with latents of all earlier tokens, and NaN in no place that a row may read."""
    blocks = sum(-(-(start + count) // BLOCK_SIZE) for start, count, _ in rows)
    shape = (blocks, BLOCK_SIZE, 1, LATENT + ROTATED)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    scales = [torch.full(shape[:3], 0.01, device=device)] if is_quantised(dtype) else []
    if dtype == I8:
        numbers = (numbers * 50).clamp(-127, 127).round()
    elif scales:
        numbers = numbers * 50
    return KvLayer.of_latents(numbers.to(dtype).to(device), LATENT, *scales)


def run(
    attention: Any, layer: FusedLayer, rows: list[tuple[int, int, bool]], kv: torch.dtype, ops: Any
) -> torch.Tensor:
    device = open_device("auto") if isinstance(attention, TritonAttention) else CPU
    return attend(attention, layer, rows, batch_of(rows, device), cache_of(rows, kv, device.torch_device), ops)


def attend(
    attention: Any,
    layer: FusedLayer,
    rows: list[tuple[int, int, bool]],
    batch: PagedBatch,
    cache: KvLayer,
    ops: Any,
) -> torch.Tensor:
    """Run new tokens, each with the numbers of its row and position."""
    normed, angles = [], []
    for row, (start, count, _) in enumerate(rows):
        for position in range(start, start + count):
            normed.append(torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1000 * row + position)))
            angles.append(torch.arange(1.0, ROTATED + 1) * position / 7)
    dtype = layer.projected.weight.dtype
    x, turns = (torch.stack(each).to(cache.keys.device) for each in (normed, angles))
    rotary = turns.cos().to(dtype), turns.sin().to(dtype)
    return attend_latents(ops, attention, layer, x.to(dtype), rotary, cache, batch)


@pytest.mark.parametrize("kv", [F32, I8, FP8], ids=str)
@pytest.mark.parametrize("heads", [3, 21])
def test_expanded_prompts_have_the_numbers_of_absorbed_ones(heads: int, kv: torch.dtype) -> None:
    """21 heads are expanded 16 and 5 at a time; a limit of 32 tokens makes several groups and a part that stays."""
    layer, ops = layer_of(heads), PlainOperations()
    want = run(ReferenceAttention(), layer, ROWS, kv, ops)
    attention = Expanding()
    with patch.object(expanded_space, "EXPANDED_TOKENS_MAX", LIMIT):
        got = run(attention, layer, ROWS, kv, ops)
        assert attention.expanded_spaces is not None
        spaces = list(attention.expanded_spaces._made.values())
        assert [space.keys.shape[2] for space in spaces] == ([3] if heads == 3 else [16, 5])
        for space in spaces:  # what earlier steps left is not read
            space.keys.fill_(torch.nan)
            space.values[..., :VALUE] = torch.nan
            space.product.fill_(torch.nan)
        again = run(attention, layer, ROWS, kv, ops)
    assert got.shape == want.shape == (sum(row[1] for row in ROWS), heads * VALUE)
    assert float((got - want).abs().max()) < 2e-5 * float(want.abs().max())
    assert torch.equal(again, got)


def test_only_prompts_take_the_expanded_form() -> None:
    layer, ops, attention = layer_of(2), PlainOperations(), Expanding()
    run(attention, layer, [(5, 1, True), (30, 1, True)], F32, ops)
    assert attention.expanded_spaces is not None and not attention.expanded_spaces._made
    with patch.object(latent_module, "_absorb", side_effect=AssertionError("absorbed")):
        run(attention, layer, [(0, 9, False), (3, 1, False)], F32, ops)
    assert len(attention.expanded_spaces._made) == 1


def form_of(rows: list[tuple[int, int, bool]]) -> dict[tuple[int, int], str]:
    """Return the form of each (row, position)."""
    batch = batch_of(rows)
    names = [(row, position) for row, (start, count, _) in enumerate(rows) for position in range(start, start + count)]
    parts = prompt_parts(batch) or PromptParts((), batch, torch.arange(batch.tokens))
    found: dict[tuple[int, int], str] = {}
    for group in parts.groups:
        tokens = range(batch.tokens) if group.tokens is None else group.tokens.tolist()
        own = [names[token] for token in tokens]
        positions = np.concatenate(
            [np.arange(s, e) for s, e in zip(group.batch.starts, group.batch.lengths, strict=True)]
        )
        assert [position for _, position in own] == positions.tolist()
        # Each row's latents, from its first token on, in the order of the workspace.
        for row, table, length in zip(
            dict.fromkeys(r for r, _ in own), group.batch.tables, group.batch.lengths, strict=True
        ):
            places = np.arange(length)
            read = group.slots.numpy()[table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE]
            want = batch.tables[row, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
            assert read.tolist() == want.tolist()
        assert len(group.slots) <= LIMIT
        found |= dict.fromkeys(own, "expanded")
    if parts.rest is not None:
        assert parts.rest_tokens is not None
        found |= dict.fromkeys((names[token] for token in parts.rest_tokens.tolist()), "absorbed")
        assert parts.rest.kv_slots.tolist() == batch.kv_slots[parts.rest_tokens.numpy()].tolist()
    assert found.keys() == set(names)
    return found


def test_the_form_follows_from_kind_and_position_alone() -> None:
    rng = np.random.default_rng(3)
    with patch.object(expanded_space, "EXPANDED_TOKENS_MAX", LIMIT):
        for _ in range(60):
            rows = []
            for _ in range(int(rng.integers(1, 7))):
                generated, start = bool(rng.random() < 0.3), int(rng.integers(0, 60))
                rows.append((start, 1 if generated else int(rng.integers(1, 40)), generated))
            for (row, position), form in form_of(rows).items():
                assert form == ("expanded" if position < LIMIT and not rows[row][2] else "absorbed"), (
                    rows,
                    row,
                    position,
                )


def test_latents_are_read_in_the_models_dtype() -> None:
    rows = [(9, 3, False)]
    for kv in (F32, I8, FP8):
        cache = cache_of(rows, kv)
        slots = torch.tensor([3, 0, 9])
        want = cache.keys.float().flatten(0, 2)[slots] * (0.01 if is_quantised(kv) else 1.0)
        got = latents_of(cache, slots, BF16)
        assert got.dtype == BF16 and torch.equal(got, want.to(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
def test_bits_do_not_follow_the_division_of_a_prompt(kv: torch.dtype) -> None:
    """On Hopper: a prompt in one step, in several, and in company, near the numbers of the absorbed form."""
    device = open_device("auto")
    attention = TritonAttention(device)
    if attention.expanded_spaces is None:
        pytest.skip("prompts stay absorbed on this GPU")
    layer, ops = layer_of(16, 0, device.torch_device, BF16), FusedOperations(device)
    whole = run(attention, layer, [(0, 100, False)], kv, ops)
    company = [(0, 100, False), (60, 1, True), (3, 70, False)]
    assert torch.equal(run(attention, layer, company, kv, ops)[:100], whole)
    absorbing = TritonAttention(device)
    absorbing.expanded_spaces = None
    want = run(absorbing, layer, [(0, 100, False)], kv, ops).float()
    assert float((whole.float() - want).abs().max()) < 0.03 * float(want.abs().max())
    cache, found = cache_of([(0, 100, False)], kv, device.torch_device), []
    table = batch_of([(0, 100, False)]).tables.astype(np.int32)
    for start, end in ((0, 37), (37, 38), (38, 100)):
        starts, counts = np.array([start], np.int32), np.array([end - start], np.int32)
        batch = PagedBatch.build(table, starts, counts, BLOCK_SIZE, device, np.zeros(1, np.bool_))
        found.append(attend(attention, layer, [(start, end - start, False)], batch, cache, ops))
    assert torch.equal(torch.cat(found), whole)
