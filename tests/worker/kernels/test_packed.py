"""Weights packed by oneDNN: the same numbers as plain torch, and the unpacked weights are freed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvforge.process.collector import keep_all
from kvforge.protocol.errors import KernelError
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import PlainOperations, choose_operations, packed
from kvforge.worker.kernels.packed import PackedOperations, PackedRows, packing_problem, stored_bytes
from kvforge.worker.loading import fusion, load
from kvforge.worker.loading.model import LoadedModel

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
SHAPES = [(1, 1, 1), (1, 7, 5), (3, 97, 33), (8, 64, 64), (17, 130, 72), (100, 31, 129)]  # rows, n, k

CPU = Device("cpu", torch.device("cpu"), "CPU")
pytestmark = pytest.mark.skipif(bool(packing_problem(CPU, torch.float32)), reason=packing_problem(CPU, torch.float32))
# Some CPUs multiply packed float32 but not bfloat16: each is tested with the dtypes that it packs.
narrow = pytest.mark.skipif(bool(packing_problem(CPU, torch.bfloat16)), reason=packing_problem(CPU, torch.bfloat16))
DTYPES = (torch.float32, pytest.param(torch.bfloat16, marks=narrow))


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    assert got.shape == want.shape and got.dtype == want.dtype
    return float((got.double() - want.double()).norm()) <= tolerance * float(want.double().norm())


def weights_of(model: LoadedModel) -> list[torch.Tensor]:
    assert model.fused is not None
    return list(model.fused.product_weights())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@torch.inference_mode()
def test_packed_products_are_the_plain_ones(
    rows: int, n: int, k: int, biased: bool, dtype: torch.dtype, cpu: Device
) -> None:
    torch.manual_seed(0)
    ops, plain, tolerance = PackedOperations(cpu), PlainOperations(), TOLERANCE[dtype]
    x, weight = torch.randn(2 * rows, k).to(dtype)[::2], torch.randn(2 * n, k).to(dtype)  # non-contiguous rows
    bias = torch.randn(2 * n).to(dtype) if biased else None
    laid_out = ops.pack(weight)
    assert laid_out.is_mkldnn and torch.equal(laid_out.to_dense(), weight)
    assert near(ops.linear(x, laid_out, bias), plain.linear(x, weight, bias), tolerance)
    assert near(ops.linear_parts(x, laid_out, bias), plain.linear_parts(x, weight, bias), tolerance)
    assert near(ops.gated(x, laid_out, bias), plain.gated(x, weight, bias), 2 * tolerance)
    wide, wanted = (torch.full((rows, 2 * n), float("nan")) for _ in range(2))
    assert ops.linear(x, laid_out, bias, wide) is wide
    assert near(wide, plain.linear(x, weight, bias, wanted), tolerance)
    assert near(ops.linear(x, weight, bias), plain.linear(x, weight, bias), 0.0)  # a tied head may stay plain


@pytest.mark.parametrize(
    ("tied", "dtype"),
    [
        (False, "float32"),
        pytest.param(True, "float32", marks=pytest.mark.soak),
        pytest.param(False, "bfloat16", marks=[narrow, pytest.mark.soak]),
        pytest.param(True, "bfloat16", marks=narrow),
    ],
)
def test_what_was_packed_is_given_back(
    tied: bool, dtype: str, tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one: the previous weight is freed before the next is packed. At the end only the embedding is left, or
    nothing if it is tied to the head."""
    gc.collect()
    keep_all()  # the collections below walk what this test makes alone
    unpacked: list[StorageWeakRef] = []
    alive: list[int] = []
    pack, verify = PackedOperations.pack, load.verify

    def count() -> int:
        gc.collect()
        return sum(not each.expired() for each in unpacked)

    def noted(model: LoadedModel, *reference: Any, **how: Any) -> Any:
        storages = [each.untyped_storage() for each in model.module.parameters() if each.dim() == 2]
        if not reference:
            unpacked.extend(map(StorageWeakRef, {each.data_ptr(): each for each in storages}.values()))
        return verify(model, *reference, **how)

    def counted(self: PackedOperations, weight: torch.Tensor) -> torch.Tensor:
        alive.append(count())
        return pack(self, weight)

    monkeypatch.setattr(load, "verify", noted)
    monkeypatch.setattr(PackedOperations, "pack", counted)
    model = tiny("llama", dtype=dtype, tie_word_embeddings=tied)
    assert alive == list(range(9 if tied else 10, 0 if tied else 1, -1))
    assert count() == (0 if tied else 1) and all(weight.is_mkldnn for weight in weights_of(model))
    width, products = model.dtype.itemsize, sum(weight.numel() for weight in weights_of(model))
    assert sum(each.nbytes for each in model.module.parameters()) == (5 * 64 + (0 if tied else 97 * 64)) * width
    assert products * width <= sum(map(stored_bytes, weights_of(model))) < 1.1 * products * width


def test_the_head_of_a_tied_model_is_packed_beside_it_where_it_is_small(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "table_of", lambda *_: None)  # an unknown layout
    share = 97 * 64 / (97 * 64 + 2 * 480 * 64 + 5 * 64)
    for limit, is_packed in ((share + 1e-3, True), (share - 1e-3, False)):
        monkeypatch.setattr(fusion, "TIED_HEAD_SHARE_MAX", limit)
        model = tiny("llama", tie_word_embeddings=True)
        assert [weight.is_mkldnn for weight in weights_of(model)] == [True] * 8 + [is_packed]
        assert model.fused is not None
        table = model.module.get_input_embeddings().weight
        assert model.fused.table.data_ptr() == table.data_ptr() == model.module.lm_head.weight.data_ptr()


@pytest.mark.parametrize(
    ("what", "settings"), [("kernels = 'reference'", {"kernels": False}), ("float16", {"dtype": "float16"})]
)
def test_nothing_is_packed_where_it_is_not_wanted(
    what: str, settings: dict[str, Any], tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedOperations, "pack", None)
    model = tiny("llama", **settings)
    assert model.fused is not None and type(model.fused.operations) is PlainOperations
    assert not any(weight.is_mkldnn for weight in weights_of(model))
    assert not any(isinstance(part, PackedRows) for part in model.module.modules())
    assert what in packing_problem(model.device, model.dtype)


def test_a_cpu_or_a_torch_that_cannot_serves_as_before(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        assert type(choose_operations(cpu, torch.float32)) is PlainOperations
        return packing_problem(cpu, torch.float32)

    assert isinstance(choose_operations(cpu, torch.float32), PackedOperations)
    with monkeypatch.context() as patch:
        patch.setattr("kvforge.worker.device.device.cpu_kernels_problem", lambda: "Numba cannot be imported")
        assert type(choose_operations(cpu, torch.float32)) is PackedOperations
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert told() == "this torch has no oneDNN"
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
        assert told() == "packed products were not measured on SVE256 CPUs"


@pytest.mark.parametrize("rows", [1, 20])
def test_a_product_that_is_wrong_is_refused(
    rows: int, tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    product = packed._product

    def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found = product(x, weight, bias)
        if len(x) == rows:
            found[-1, -1] += 0.01 * found.abs().max()
        return found

    monkeypatch.setattr(packed, "_product", wrong)
    problem = f"packed product kernel is wrong for {rows} tokens, a weight of 97 x 64, float32.*; set kernels = 'ref"
    with pytest.raises(KernelError, match=problem):
        tiny("llama")


def test_what_serves_is_compared_with_transformers_unpacked_weights(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the packed weights themselves, which would affect both sides if they were unpacked."""
    pack = PackedOperations.pack
    monkeypatch.setattr(PackedOperations, "pack", lambda self, weight: pack(self, weight.flip(0).contiguous()))
    with pytest.raises(KernelError, match=r"with packed weights: .* differs .*; set kernels = 'reference'"):
        tiny("llama")


def test_logits_of_a_few_rows_are_computed_for_no_others(
    tiny: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain products of 5 to 15 rows compute 16 rows."""
    sequences = [np.arange(3, 10)]
    for kernels, computed in ((True, 7), (False, 16)):
        model = tiny("llama", kernels=kernels)
        assert model.fused is not None
        asked: list[int] = []

        class Noted(type(model.fused.operations)):  # type: ignore[misc]
            def linear(self, x: Any, weight: Any, bias: Any = None, output: Any = None) -> torch.Tensor:
                if output is not None:
                    asked.append(len(x))  # noqa: B023
                return super().linear(x, weight, bias, output)

        operations = Noted(model.device) if kernels else Noted()
        paged_logits(replace(model, fused=replace(model.fused, operations=operations)), sequences, [[7]])
        assert asked == [computed]


def test_a_narrow_weight_whose_only_result_is_near_0_is_packed() -> None:
    """A router's or a gate's: the check compares with results of the usual size."""
    x = torch.empty(1, 128).normal_(generator=torch.Generator().manual_seed(1))  # as the check draws it
    weight = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    weight -= (x @ weight.t()) / (x @ x.t()) * x
    assert float((x @ weight.t()).abs()) < 1e-5
    assert PackedOperations(CPU).pack(weight).shape == (1, 128)
    real = packed._product
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KernelError):
        patched.setattr(packed, "_product", lambda *given: real(*given) + 0.01)
        PackedOperations(CPU).pack(weight + 0)
