"""Operations that the interpreter of the tests repeats give the same bits as those that it looks up each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tests.interpreted  # noqa: F401 - before a kernel is imported

triton = pytest.importorskip("triton")

from triton import language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tests.worker import interpreting_traces  # noqa: E402

pytestmark = pytest.mark.skipif(not interpreting_traces.installed, reason="kernels are not interpreted")
COUNT, BLOCK, OUTPUTS = 40, 16, 25


@pytest.fixture
def traces() -> Iterator[interpreting_traces.Traces]:
    found = interpreting_traces.installed[0]
    yield found
    found.enabled = True


@triton.jit
def many_operations(numbers, whole, out, count, step, block: tl.constexpr, factor: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(numbers + place, mask=place < count, other=-1.5)
    n = tl.load(whole + place, mask=place < count, other=7)
    bits = n.to(tl.uint32)
    into = out + place
    tl.store(into, x * x, mask=place < count)
    tl.store(into + count, x + 1, mask=place < count)
    tl.store(into + 2 * count, x + 1.5, mask=place < count)
    tl.store(into + 3 * count, (n + 1).to(tl.float32), mask=place < count)
    tl.store(into + 4 * count, (n + True).to(tl.float32), mask=place < count)
    tl.store(into + 5 * count, (n * 1.5).to(tl.float32), mask=place < count)
    tl.store(into + 6 * count, 1.0 / (x * 0.0), mask=place < count)
    tl.store(into + 7 * count, 1.0 / (x * factor), mask=place < count)
    tl.store(into + 8 * count, (n >> 1).to(tl.float32), mask=place < count)
    tl.store(into + 9 * count, (bits >> 1).to(tl.float32), mask=place < count)
    tl.store(into + 10 * count, (n // 3 + n % 3 - (n & 6) + (n | 1) + (n ^ 5) + (n << 2)).to(tl.float32), place < count)
    tl.store(into + 11 * count, tl.where(x > 0, x, -x), mask=place < count)
    tl.store(into + 12 * count, tl.maximum(x, 0.25) + tl.minimum(n, 2), mask=place < count)
    tl.store(into + 13 * count, tl.exp(x) + tl.sqrt(x * x), mask=place < count)
    tl.store(into + 14 * count, (x.to(tl.float16) + x.to(tl.bfloat16).to(tl.float32)).to(tl.float32), place < count)
    tl.store(into + 15 * count, n.to(tl.float32, bitcast=True), mask=place < count)
    square = x[:, None] * x[None, :] + n[None, :]
    tl.store(into + 16 * count, tl.sum(square, 1), mask=place < count)
    tl.store(into + 17 * count, tl.sum(tl.dot(square, square), 0), mask=place < count)
    total = tl.zeros((block,), tl.float32)
    for each in range(4):
        total += x * each - each
    tl.store(into + 18 * count, total, mask=place < count)
    tl.store(into + 19 * count, (place * step).to(tl.float32), mask=place < count)
    tl.store(into + 20 * count, (x == x).to(tl.float32) + (n != 3) + (x < 2) + (~n).to(tl.float32), place < count)
    tl.store(into + 21 * count, 3 - x, mask=place < count)
    tl.store(into + 22 * count, x - 3, mask=place < count)
    tl.store(into + 23 * count, (bits >> bits).to(tl.float32), mask=place < count)
    tl.store(into + 24 * count, x * total, mask=place < count)


def launched(factor: float = 0.5, step: int = 3) -> torch.Tensor:
    """Return what a launch of several programs stores, as bits. torch's numbers are the same each time."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(COUNT, generator=generator)
    whole = torch.randint(-9, 30, (COUNT,), generator=generator, dtype=torch.int32)
    out = torch.full((OUTPUTS * COUNT,), torch.nan)
    grid = (-(-COUNT // BLOCK),)
    many_operations[grid](numbers, whole, out, COUNT, step, BLOCK, factor)
    return out.view(torch.int32).view(OUTPUTS, COUNT)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_repeated_operations_give_the_same_bits(traces: interpreting_traces.Traces) -> None:
    traces.enabled = False
    before = traces.repeated
    wanted, other_factor, other_step = launched(), launched(0.25), launched(step=1 << 20)
    assert traces.repeated == before
    assert not torch.equal(wanted, other_factor) and not torch.equal(wanted, other_step)
    traces.enabled = True
    for _ in range(4):  # seen, recorded, repeated
        assert torch.equal(launched(), wanted)
        assert torch.equal(launched(0.25), other_factor)
        assert torch.equal(launched(step=1 << 20), other_step)
    count = traces.repeated
    assert torch.equal(launched(), wanted)
    assert traces.repeated - count > 3 * 100, "most operations are repeated"


@triton.jit
def shift_by_a_number(numbers, out):
    tl.store(out, tl.load(numbers) << 1.5)


def test_an_operation_that_fails_does_so_each_time(traces: interpreting_traces.Traces) -> None:
    for _ in range(4):
        with pytest.raises(Exception, match=r"unexpected type|invalid operands"):
            shift_by_a_number[(1,)](torch.ones(1), torch.ones(1))
    builder = interpreter.interpreter_builder
    assert not [name for name in vars(builder) if name.startswith("create_")], "recording has ended"
