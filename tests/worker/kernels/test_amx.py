"""Products by AMX: plain torch's numbers, independent of a row's position, of the other rows and of the threads."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("numba")

from kvforge.protocol.errors import KernelError
from kvforge.worker.cpu.amx_kernel import BLOCK, DEPTH, ROWS, WIDE
from kvforge.worker.cpu.kernel import cpu_kernels_problem
from kvforge.worker.device.device import Device
from kvforge.worker.device.products import CPU_INSTRUCTIONS, keeps_from_tiles
from kvforge.worker.kernels import amx
from kvforge.worker.kernels.amx import AmxTiles, amx_problem
from kvforge.worker.kernels.cpu_operations import CpuOperations
from kvforge.worker.kernels.packed import Product, own_product, packing_problem
from kvforge.worker.kernels.steady import same_bits

pytestmark = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem())
PROBLEM = cpu_kernels_problem() or amx_problem() or ("" if keeps_from_tiles() else "the environment limits oneDNN more")
on_amx = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
# n, k: full and partial tiles of 64, one and many; one step of 32, several, and partial ones.
SHAPES = [(64, 32), (576, 576), (192, 1536), (130, 1100), (20, 36), (1, 700), (40, 31), (600, 1025)]
ROW_COUNTS = (1, 2, 3, 7, 15, 16, 17, 24, 31, 32, 33, 47, 48, 64, 65, 100)
MOST = 200


@pytest.fixture(autouse=True)
def packing(cpu: Device) -> None:
    if problem := packing_problem(cpu, torch.bfloat16):
        pytest.skip(problem)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def ours(device: Device, n: int, k: int) -> tuple[torch.Tensor, AmxTiles]:
    """Return a packed weight, which owns the memory, and its tiles."""
    packed = CpuOperations(device).pack(numbers(n, k))
    own = own_product(packed)
    assert isinstance(own, AmxTiles)
    return packed, own


@on_amx
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_others(
    shape: tuple[int, int], threads: int, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (n, k), x = shape, numbers(MOST, shape[1])
    packed, own = ours(cpu, n, k)
    x[11], x[150], x[37, 0] = torch.nan, torch.inf, -torch.inf
    for bias in (None, numbers(n)):
        fitting = own.bias_for(bias)
        monkeypatch.setattr(amx, "threads_for", lambda _: 1)
        whole = own(x, fitting)
        wanted = linear(x.double(), numbers(n, k).double(), None if bias is None else bias.double())
        finite = wanted.isfinite().all(1)
        assert int(finite.sum()) == MOST - 3
        assert float((whole - wanted)[finite].abs().max()) <= 4e-3 * float(wanted[finite].abs().max())
        monkeypatch.setattr(amx, "threads_for", lambda _: threads)
        for rows in (*ROW_COUNTS, MOST):
            for first in (0, 5, MOST - rows):
                some = slice(first, min(first + rows, MOST))
                assert same_bits(own(x[some], fitting), whole[some]), (rows, first, bias is None)
    assert packed.shape == shape


@on_amx
def test_sums_that_cancel_have_the_same_bits_too(cpu: Device) -> None:
    """Each result is nothing but the rounding of its sums, so that another order would show in every number."""
    k = 1536
    half = torch.randn(64, k // 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    order = torch.randperm(k, generator=torch.Generator().manual_seed(2))
    weight = torch.cat((half, -half), 1)[:, order].contiguous()
    x = torch.randn(100, k // 2, generator=torch.Generator().manual_seed(3)).bfloat16()
    x = torch.cat((x, x), 1)[:, order].contiguous()
    packed = CpuOperations(cpu).pack(weight)
    own = own_product(packed)
    assert own is not None
    whole = own(x, None)
    assert 0 < float(whole.abs().max()) < 1e-3 and float((whole != 0).float().mean()) > 0.9
    assert not same_bits(own(x.flip(1), None), own(x, None))
    for rows in ROW_COUNTS:
        assert same_bits(own(x[-rows:], None), whole[-rows:])


@on_amx
def test_nothing_behind_the_rows_is_read_or_written(cpu: Device) -> None:
    packed, own = ours(cpu, 130, 64)
    for rows in (1, 15, 17, 33):
        x = torch.cat((numbers(rows, 64), torch.full((1, 64), torch.nan, dtype=torch.bfloat16)))
        target = torch.full((rows + 1, own.tiles * WIDE), -7.0, dtype=torch.bfloat16)
        own.multiply(x, None, target[:rows])
        assert torch.equal(target[-1], torch.full((own.tiles * WIDE,), -7.0, dtype=torch.bfloat16))
        assert torch.allclose(target[:rows, :130], linear(x[:rows], numbers(130, 64)), rtol=2e-2, atol=2e-2)
    assert packed.shape == (130, 64)


@on_amx
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_ways_to_a_packed_weight_have_the_same_bits(shape: tuple[int, int], cpu: Device) -> None:
    (n, k), operations = shape, CpuOperations(cpu)
    packed = operations.pack(numbers(n, k))
    for bias in (None, numbers(n)):
        product = Product(packed, bias)
        for rows in (1, 5, 40):
            x = numbers(rows, k)
            wanted = operations.linear(x, packed, bias)
            assert product.rows(rows) == rows and wanted.shape == (rows, n)
            assert same_bits(product(x), wanted) and same_bits(product(x[None])[0], wanted)
            apart = torch.cat((x, x), 1)[:, :k]
            assert same_bits(operations.linear(apart, packed, bias), wanted)
            stored = torch.empty(rows, n)
            assert same_bits(operations.linear(x, packed, bias, stored), wanted.float())


@on_amx
def test_each_weight_of_a_shape_has_its_own_tiles(cpu: Device) -> None:
    operations, x = CpuOperations(cpu), numbers(3, 128)
    weights = [numbers(64, 128), numbers(64, 128).flip(0).contiguous()]
    for packed, weight in [(operations.pack(weight), weight) for weight in weights]:
        assert torch.allclose(operations.linear(x, packed), linear(x, weight), rtol=2e-2, atol=2e-1)


def test_parts_of_the_rows_stay_in_the_cache_and_reach_all_threads() -> None:
    wide = AmxTiles(0, 4096, 4096, 4096 // DEPTH, 4096 // WIDE)
    assert wide._part_rows(4096, 1) * 4096 * 2 == amx.CACHED_BYTES
    assert wide._part_rows(1, 8) == BLOCK
    narrow = AmxTiles(0, 64, 64, 2, 1)
    assert narrow._part_rows(4096, 8) == 4096 // 8 // amx.TICKETS_PER_THREAD
    assert narrow._part_rows(MOST, 64) == BLOCK


@on_amx
def test_products_that_depend_on_the_other_rows_are_onednns(
    cpu: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The difference is in the last bit of one number of one row."""
    multiply = AmxTiles.multiply

    def by_rows(this: AmxTiles, x: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor) -> None:
        multiply(this, x, bias, target)
        if len(x) == ROWS + 1:
            target.view(torch.int16)[-1, 0] += 1

    monkeypatch.setattr(AmxTiles, "multiply", by_rows)
    with caplog.at_level(logging.WARNING, "worker"):
        packed = CpuOperations(cpu).pack(numbers(64, 128))
    assert own_product(packed) is None
    assert "a weight of 64 x 128 is multiplied without AMX: 17 tokens have other bits than among 97" in caplog.text
    with pytest.raises(KernelError, match="17 tokens have other bits than among 97"):
        amx.amx_test(cpu)


@on_amx
def test_products_that_are_wrong_are_refused(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = AmxTiles.multiply

    def too_large(this: AmxTiles, x: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor) -> None:
        multiply(this, x, bias, target)
        target[-1] *= 1.25

    monkeypatch.setattr(AmxTiles, "multiply", too_large)
    with pytest.raises(KernelError, match="product by AMX kernel is wrong for a weight of 64 x 128"):
        CpuOperations(cpu).pack(numbers(64, 128))
    with pytest.raises(KernelError, match="product by AMX kernel is wrong for 1 tokens, a weight of 130 x 1100"):
        amx.amx_test(cpu)


def test_other_weights_are_onednns(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(2, 128), numbers(64, 128)

    def is_ours(weight: torch.Tensor) -> bool:
        packed = CpuOperations(cpu).pack(weight)
        assert torch.allclose(Product(packed, None)(x.to(weight.dtype)), linear(x, weight), rtol=2e-2, atol=2e-1)
        return isinstance(own_product(packed), AmxTiles)

    assert is_ours(weight) == (not PROBLEM)
    with monkeypatch.context() as patched:
        patched.setattr(amx, "amx_problem", lambda: "this CPU has no AMX")
        assert not is_ours(weight)
    with monkeypatch.context() as patched:
        patched.setattr(amx, "table_of", lambda *_: None)  # another layout
        assert not is_ours(weight)
    half = weight.half()
    assert amx.find_amx_tiles(half, half, cpu) is None
    monkeypatch.setenv(CPU_INSTRUCTIONS, "AVX512_CORE_BF16")  # a limit of the user's
    assert not is_ours(weight)


@pytest.mark.parametrize(
    ("supported", "permitted", "problem"),
    [
        (False, True, "this CPU has no AMX"),
        pytest.param(True, False, "the system does not let this process use AMX", marks=on_amx),
        pytest.param(True, True, "", marks=on_amx),
    ],
)
def test_what_the_kernel_needs(supported: bool, permitted: bool, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: permitted)
    assert amx_problem.__wrapped__() == problem
