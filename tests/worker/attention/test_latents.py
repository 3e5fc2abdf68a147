"""Attention over latents: dense attention's numbers, bits of a row alone, and what a start checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvforge.protocol.errors import InvalidRequest, KernelError
from kvforge.worker.attention import AttentionOptions, KvLayer, PagedAttention, PagedBatch, ReferenceAttention
from kvforge.worker.attention.cpu_attention import CpuAttention
from kvforge.worker.attention.quantised import is_quantised
from kvforge.worker.attention.selftest import AttentionShape, self_test
from kvforge.worker.attention.triton_attention import TritonAttention, is_interpreted
from kvforge.worker.cpu.kernel import cpu_kernels_problem
from kvforge.worker.device.device import Device
from tests.worker.attention.cases import STEPS, TOLERANCE

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
LATENT, ROTATED, HEADS, BLOCK_SIZE = 48, 16, 5, 8
OPTIONS = AttentionOptions(0.15)
needs_numba = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem())
interpreted = pytest.mark.skipif(not is_interpreted(), reason="needs the interpreter")
IMPLEMENTATIONS = [
    pytest.param(ReferenceAttention, id="plain"),
    pytest.param(CpuAttention, id="numba", marks=needs_numba),
]


class Case:
    """Rows of latents in a pool that is NaN everywhere else.

    Attributes:
        batch: The step.
        layer: With the latents of all tokens of the rows.
        query: [tokens, HEADS, LATENT + ROTATED].
        latents: Of each row [tokens so far, LATENT + ROTATED].
    """

    def __init__(
        self, rows: list[tuple[int, int]], device: Device, dtype: torch.dtype = F32, kv_dtype: torch.dtype | None = None
    ) -> None:
        starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        needed = -(-(starts + counts) // BLOCK_SIZE)
        ids = np.random.default_rng(0).permutation(int(needed.sum()) + 2).astype(np.int32)
        self.tables = np.zeros((len(rows), int(needed.max())), np.int32)
        for row, count in enumerate(needed):
            self.tables[row, :count], ids = ids[:count], ids[count:]
        self.starts, self.counts, self.device = starts, counts, device
        kept = dtype if kv_dtype is None else kv_dtype
        shape = (int(needed.sum()) + 2, BLOCK_SIZE, 1, LATENT + ROTATED)
        scales = [torch.full(shape[:3], torch.nan)] if is_quantised(kept) else []
        empty = torch.full(shape, 77.0 if scales else torch.nan).to(kept)
        self.layer = KvLayer.of_latents(empty, LATENT, *scales)
        self.batch = self.of(starts, counts)
        generator = torch.Generator().manual_seed(1)
        self.query = torch.randn(self.batch.tokens, HEADS, LATENT + ROTATED, generator=generator).to(dtype)
        lengths = starts + counts
        self.latents = [torch.randn(int(n), LATENT + ROTATED, generator=generator).to(dtype) for n in lengths]

    def of(self, starts: Any, counts: Any, rows: slice = slice(None)) -> PagedBatch:
        return PagedBatch.build(self.tables[rows], starts, counts, BLOCK_SIZE, self.device)

    def write(self, attention: PagedAttention) -> None:
        """Store all tokens of the rows, as prompts."""
        batch = self.of(0 * self.starts, self.starts + self.counts)
        attention.write_latent(torch.cat(self.latents), self.layer, batch)

    def dense(self) -> torch.Tensor:
        """Return attention in float64, [tokens, HEADS, LATENT]."""
        found = []
        for row, latents in enumerate(self.latents):
            first = int(self.batch.query_starts[row])
            for place in range(int(self.counts[row])):
                seen = latents[: int(self.starts[row]) + place + 1].double()
                weights = (OPTIONS.scaling * self.query[first + place].double() @ seen.t()).softmax(-1)
                found.append(weights @ seen[:, :LATENT])
        return torch.stack(found)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(F32, F32), (BF16, BF16), (F16, F16), (F32, I8), (BF16, FP8), (F32, BF16)], ids=str
)
def test_attention_is_dense_attention_over_the_latents(
    rows: list[tuple[int, int]], dtype: torch.dtype, kv_dtype: torch.dtype, implementation: Any, cpu: Device
) -> None:
    case, attention = Case(rows, cpu, dtype, kv_dtype), implementation()
    case.write(attention)
    got, want = attention.attend(case.query, case.layer, case.batch, OPTIONS), case.dense()
    assert got.shape == want.shape and got.dtype == dtype
    assert float((got.double() - want).abs().max()) <= max(TOLERANCE[dtype], TOLERANCE[kv_dtype])


@interpreted
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F32, I8), (F16, FP8), (BF16, FP8), (BF16, I8)], ids=str)
def test_kernels_attend_to_quantised_latents(dtype: torch.dtype, kv_dtype: torch.dtype, cpu: Device) -> None:
    case, attention = Case([(17, 1), (0, 9), (3, 1), (15, 2), (140, 1)], cpu, dtype, kv_dtype), TritonAttention(cpu)
    case.write(attention)
    got, want = attention.attend(case.query, case.layer, case.batch, OPTIONS), case.dense()
    assert float((got.double() - want).abs().max()) <= max(TOLERANCE[dtype], TOLERANCE[kv_dtype])
    exact = ReferenceAttention().attend(case.query.float(), case.layer, case.batch, OPTIONS)
    assert float((got.float() - exact).abs().max()) <= TOLERANCE[F16 if dtype == F32 else dtype]


@needs_numba
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bits_depend_on_the_row_alone(dtype: torch.dtype, cpu: Device) -> None:
    rows = [(1100, 1), (3, 1), (512, 40), (0, 90), (60, 1)]
    case, attention = Case(rows, cpu, dtype), CpuAttention()
    case.write(attention)
    want = attention.attend(case.query, case.layer, case.batch, OPTIONS)
    for row, (start, count) in enumerate(rows):
        first = int(case.batch.query_starts[row])
        for place in (0, count - 1):  # alone, and as a decode instead of a part of a prompt
            batch = case.of(np.array([start + place], np.int32), np.ones(1, np.int32), slice(row, row + 1))
            alone = attention.attend(case.query[first + place : first + place + 1], case.layer, batch, OPTIONS)
            assert torch.equal(alone[0], want[first + place])


@interpreted
@pytest.mark.parametrize("kv_dtype", [I8, FP8], ids=str)
def test_quantised_latents_are_stored_as_plain_torch_stores_them(kv_dtype: torch.dtype, cpu: Device) -> None:
    """Tokens of zeros, NaN and infinity too; what is broken shows, and in no other row."""
    stored = []
    for implementation in (ReferenceAttention(), TritonAttention(cpu)):
        case = Case([(0, 9), (3, 1)], cpu, F32, kv_dtype)
        case.latents[0][2], case.latents[0][3, 5], case.latents[0][4, -1] = 0.0, torch.nan, -torch.inf
        case.write(implementation)
        assert case.layer.key_scales is not None
        stored.append((case.layer.keys.view(torch.uint8), case.layer.key_scales.nan_to_num(-1.0)))
    assert all(map(torch.equal, *stored))
    got = TritonAttention(cpu).attend(case.query, case.layer, case.batch, OPTIONS)
    assert got[3:9].isnan().all() and not got[9].isnan().any()


@interpreted
@pytest.mark.parametrize("kv_dtype", [I8, FP8], ids=str)
def test_bits_of_quantised_latents_depend_on_the_row_alone(kv_dtype: torch.dtype, cpu: Device) -> None:
    rows = [(140, 1), (0, 18), (3, 1), (60, 9)]
    case, attention = Case(rows, cpu, F16, kv_dtype), TritonAttention(cpu)
    case.write(attention)
    want = attention.attend(case.query, case.layer, case.batch, OPTIONS)
    for row in range(len(rows)):
        batch = case.of(case.starts[row : row + 1], case.counts[row : row + 1], slice(row, row + 1))
        place = slice(int(case.batch.query_starts[row]), int(case.batch.query_starts[row + 1]))
        assert torch.equal(attention.attend(case.query[place], case.layer, batch, OPTIONS), want[place])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_of_a_static_batch_writes_nothing(implementation: Any, cpu: Device) -> None:
    case, attention = Case([(8, 1), (3, 1)], cpu), implementation()
    case.write(attention)
    batch = PagedBatch.static(4, case.tables.shape[1], BLOCK_SIZE, cpu)
    batch.fill(case.tables, case.starts + 1)
    before = case.layer.keys.clone()
    own = torch.stack([latents[-1] for latents in case.latents])
    attention.write_latent(torch.cat((own, torch.full_like(own, 7.0))), case.layer, batch)
    assert torch.equal(case.layer.keys.view(torch.int32), before.view(torch.int32))
    query = torch.cat((case.query, torch.full_like(case.query, torch.nan)))
    got = attention.attend(query, case.layer, batch, OPTIONS)[:2]
    assert float((got.double() - case.dense()).abs().max()) <= TOLERANCE[F32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_write_of_the_other_kind_is_refused(implementation: Any, cpu: Device) -> None:
    case, attention = Case([(0, 2)], cpu), implementation()
    width = LATENT + ROTATED
    key = torch.zeros(2, 1, width)
    with pytest.raises(InvalidRequest, match="stores latents, not K and V"):
        attention.write(key, key, case.layer, case.batch)
    with pytest.raises(InvalidRequest, match="stores K and V, not latents"):
        layer = KvLayer(case.layer.keys, case.layer.keys.clone())
        attention.write_latent(key[:, 0], layer, case.batch)
    for wrong in (key, torch.zeros(2, width - 1), torch.zeros(3, width)):
        with pytest.raises(InvalidRequest) as caught:
            attention.write_latent(wrong, case.layer, case.batch)
        assert caught.value.field == "latents"


class _RotaryKeyLeftOut(CpuAttention):
    def attend(self, query: torch.Tensor, *others: Any) -> torch.Tensor:
        query = query.clone()
        query[..., LATENT:] = 0
        return super().attend(query, *others)


@needs_numba
@pytest.mark.parametrize("kv_dtype", [F32, FP8], ids=str)
def test_a_start_checks_attention_over_latents(kv_dtype: torch.dtype, tmp_path: Path, cpu: Device) -> None:
    shape = AttentionShape(HEADS, 1, LATENT + ROTATED, OPTIONS, latent=LATENT)

    def check(attention: PagedAttention) -> None:
        self_test(attention, cpu, [shape], dtype=F32, kv_dtype=kv_dtype, block_size=8, remembered_in=tmp_path)

    with pytest.raises(KernelError, match="5 query heads, latents of 48 with rotary keys of 16"):
        check(_RotaryKeyLeftOut())
    check(CpuAttention())
    (kept,) = tmp_path.iterdir()
    assert "latents of 48" in kept.read_text()
