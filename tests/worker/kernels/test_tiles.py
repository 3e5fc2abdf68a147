"""Products by tiles: plain torch's numbers, independent of a row's position and of the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("numba")

from kvforge.worker.cpu.kernel import cpu_kernels_problem
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import tiles
from kvforge.worker.kernels.cpu_operations import CpuOperations
from kvforge.worker.kernels.packed import EXPECTED_ROWS, Product, own_product, packing_problem
from kvforge.worker.kernels.steady import same_bits
from kvforge.worker.kernels.tiles import TICKET_ROWS, Tiles

pytestmark = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem())
# n, k: full and partial tiles of 64 and of 16 rows; one block of k, a few, and a partial one.
SHAPES = [(64, 64), (576, 576), (192, 576), (130, 1100), (20, 36), (40, 3000), (600, 1025), (1, 700), (96, 2048)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 17, 40, TICKET_ROWS, TICKET_ROWS + 1, 200)


@pytest.fixture(autouse=True)
def packing(cpu: Device) -> None:
    if problem := packing_problem(cpu, torch.float32):
        pytest.skip(problem)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def laid_out(weight: torch.Tensor, width: int) -> tuple[torch.Tensor, Tiles]:
    """Lay out a weight by hand, with NaN in missing rows; return the memory and its address."""
    n, k = weight.shape
    count = -(-n // width)
    whole = torch.cat((weight, torch.full((count * width - n, k), torch.nan)))
    memory = whole.view(count, width, k).transpose(1, 2).contiguous()
    return memory, Tiles(memory.data_ptr(), n, k, width, 4 * width * k, count)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [16, 32, 48, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_others(
    shape: tuple[int, int], width: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "threads_for", lambda _: threads)
    (n, k), x = shape, numbers(max(ROWS), shape[1])
    memory, own = laid_out(numbers(n, k), width)
    for bias in (None, numbers(n)):
        fitting = own.bias_for(bias)
        whole = own(x, fitting)
        wanted = linear(x.double(), numbers(n, k).double(), None if bias is None else bias.double())
        assert float((whole - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
        for rows in ROWS:
            for first in (0, max(ROWS) - rows):
                some = slice(first, first + rows)
                assert same_bits(own(x[some], fitting), whole[some]), (rows, first, bias is None)
    assert len(memory) == own.tiles


def test_sums_have_the_order_that_is_said() -> None:
    """Each product and sum is rounded once and the sum restarts after 1024, compared in float64, where products are
    exact."""
    n, k = 90, 1500
    weight, x, bias = numbers(n, k), numbers(7, k), numbers(n)
    memory, own = laid_out(weight, 64)
    ordered = torch.zeros(7, n)
    for block in (range(1024), range(1024, k)):
        part = torch.zeros(7, n)
        for index in block:
            part = (x[:, index : index + 1].double() * weight[:, index].double() + part.double()).float()
        ordered = ordered + part
    differs = own(x, own.bias_for(bias)) != ordered + bias
    assert float(differs.float().mean()) < 0.01, "but where 64 bits round twice"
    assert len(memory) == own.tiles


def test_nothing_behind_the_rows_is_read_or_written(cpu: Device) -> None:
    weight = numbers(130, 70)
    memory, own = laid_out(weight, 64)
    for rows in (1, 5, 6, 13):
        x = torch.cat((numbers(rows, 70), torch.full((1, 70), torch.nan)))
        target = torch.full((rows + 1, 192), -7.0)
        own.multiply(x, None, target[:rows])
        assert torch.equal(target[-1], torch.full((192,), -7.0))
        assert torch.allclose(target[:rows, :130], linear(x[:rows], weight), rtol=1e-4, atol=1e-4)
    assert len(memory) == own.tiles


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_weights_products_are_ours_and_have_onednns_bits(shape: tuple[int, int], cpu: Device) -> None:
    """A worker without Numba therefore gives the same tokens."""
    n, k = shape
    weight, operations = numbers(n, k), CpuOperations(cpu)
    packed = operations.pack(weight)
    if own_product(packed) is None:
        pytest.skip("oneDNN lays weights out in another way on this CPU, or it has no AVX2 alone")
    theirs = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
    for bias in (None, numbers(n)):
        product = Product(packed, bias)
        for rows in (2, 5, 40):
            x = numbers(rows, k)
            wanted = torch.ops.mkldnn._linear_pointwise(x, theirs, bias, "none", [], "")
            assert product.rows(rows) == rows
            assert same_bits(product(x), wanted) and same_bits(operations.linear(x, packed, bias), wanted)
            assert same_bits(product(x[None])[0], wanted), "whatever stands before the rows"
            apart = torch.cat((x, x), 1)[:, :k]
            assert not apart.is_contiguous() and same_bits(operations.linear(apart, packed, bias), wanted)


@pytest.mark.parametrize(("capability", "rows"), [("AVX512", 4), ("DEFAULT", 2)])
def test_other_cpus_have_onednns_products(
    capability: str, rows: int, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    packed = CpuOperations(cpu).pack(numbers(64, 1200))
    assert own_product(packed) is None
    assert Product(packed, None).rows(1) == rows, "rows of zeros beside a long one"


def test_a_layout_that_is_not_known_is_onednns(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "table_of", lambda *_: None)
    packed = CpuOperations(cpu).pack(numbers(64, 128))
    assert own_product(packed) is None
    x = numbers(2, 128)
    assert torch.allclose(Product(packed, None)(x), linear(x, numbers(64, 128)), rtol=1e-4, atol=1e-4)


def test_each_weight_of_a_shape_has_its_own_tiles(cpu: Device) -> None:
    """The tiles are searched once."""
    operations, x = CpuOperations(cpu), numbers(3, 128)
    weights = [numbers(64, 128), numbers(64, 128).flip(0).contiguous()]
    for packed, weight in [(operations.pack(weight), weight) for weight in weights]:
        assert torch.allclose(operations.linear(x, packed), linear(x, weight), rtol=1e-4, atol=1e-4)
