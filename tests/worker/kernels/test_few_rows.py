"""Products of a few rows with a packed weight have oneDNN's bits, or are oneDNN's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from worker.device.device import Device
from worker.device.host_kernel import host_kernel_problem
from worker.kernels import few_rows
from worker.kernels.host import HostOperations
from worker.kernels.packed import EXPECTED_ROWS, Product, few_rows_of, packing_problem
from worker.kernels.steady import same_bits

pytestmark = pytest.mark.skipif(bool(host_kernel_problem()), reason=host_kernel_problem())
# n, k: tiles of 64 and of 16 rows, whole and not; one block of k, a few, and a part of one.
SHAPES = [(64, 64), (576, 576), (192, 576), (130, 1100), (20, 36), (40, 3000), (600, 1025), (1, 700), (96, 2048)]


@pytest.fixture(autouse=True)
def packing(cpu: Device) -> None:
    if problem := packing_problem(cpu, torch.float32):
        pytest.skip(problem)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def onednns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Of many rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
    many = torch.cat((x, numbers(9, x.shape[1])))
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(many, packed, bias, "none", [], "")
    return found[: len(x)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_rows_have_the_bits_that_they_have_among_many(
    shape: tuple[int, int], threads: int, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "threads_for", lambda _: threads)
    (n, k), operations = shape, HostOperations(cpu)
    weight = numbers(n, k)
    packed = operations.pack(weight)
    for bias in (None, numbers(n)):
        product = Product(packed, bias)
        for rows in (1, 2, 3):
            x = numbers(rows, k)
            wanted = onednns(x, weight, bias)
            given = torch.cat((x, torch.full((product.rows(rows) - rows, k), torch.nan)))
            assert same_bits(product(given)[:rows], wanted), (rows, bias is None)
            assert same_bits(operations.linear(x, packed, bias), wanted)
            assert same_bits(product(given[None])[0, :rows], wanted), "whatever stands before the rows"


def test_here_they_are_our_kernels(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all above would be oneDNN's, compared with itself."""
    ran: list[int] = []
    run = few_rows.FewRows.run
    monkeypatch.setattr(few_rows.FewRows, "run", lambda self, x, *rest: (ran.append(x.numel()), run(self, x, *rest)))
    operations = HostOperations(cpu)
    packed = operations.pack(numbers(64, 128))
    ran.clear()
    for rows in (1, 3, 4):
        operations.linear(numbers(rows, 128), packed)
    if not ran:
        pytest.skip("oneDNN lays weights out, or adds up, in another way on this CPU")
    assert ran == [128, 384], "of four rows oneDNN's"


def test_where_onednn_adds_up_in_another_order_it_makes_them(
    cpu: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    giver = few_rows.Giver(cpu)
    monkeypatch.setattr(few_rows, "_is_onednns", lambda *_: False)
    for _ in range(2):
        weight = numbers(64, 128)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        with caplog.at_level("INFO", "worker"):
            giver.give(packed, weight)
        assert Product(packed, None).rows(1) == 1
        assert same_bits(Product(packed, None)(weight[:1]), onednns(weight[:1], weight, None))
    assert len(caplog.messages) == 1, "told once for a shape"
    assert "single rows times 64 x 128 are oneDNN's" in caplog.text


@pytest.mark.parametrize("width", [16, 32, 48, 64])
def test_tiles_of_any_width_are_read(width: int, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other CPUs have them: laid out by hand."""
    n, k = 90, 1500
    weight, x = numbers(n, k), numbers(2, k)
    tiles = -(-n // width)
    whole = torch.cat((weight, torch.full((tiles * width - n, k), torch.nan)))
    laid_out = whole.view(tiles, width, k).transpose(1, 2).contiguous()
    own = few_rows.FewRows(laid_out.data_ptr(), n, k, width, 4 * width * k, tiles, 3)
    for bias in (None, numbers(n)):
        found = own(x, own.bias_for(bias))
        assert torch.allclose(found, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
        ordered = torch.zeros(2, n)
        for block in (slice(0, 1024), slice(1024, k)):
            part = torch.zeros(2, n)
            for index in range(block.start, block.stop):  # a product is exact in 64 bits, so the sum rounds once
                part = (x[:, index : index + 1].double() * weight[:, index].double() + part.double()).float()
            ordered = ordered + part
        if bias is not None:
            ordered = ordered + bias
        assert float((found != ordered).float().mean()) < 0.01, "but where 64 bits round twice"


def test_another_order_is_found(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel's blocks were of another length: near, and other bits."""
    run = few_rows.FewRows.run

    def other(self: Any, x: torch.Tensor, bias: Any, target: torch.Tensor) -> None:
        run(self, x, bias, target)
        target[0, 5] = torch.nextafter(target[0, 5], torch.tensor(torch.inf))

    monkeypatch.setattr(few_rows.FewRows, "run", other)
    packed = HostOperations(cpu).pack(numbers(64, 128))
    assert few_rows_of(packed) is None


def test_16_bits_are_onednns(cpu: Device) -> None:
    weight = numbers(64, 128).bfloat16()
    few_rows.Giver(cpu).give(weight, weight)
    assert not vars(weight)
