"""The check at a worker's start finds products with bits that depend on the number of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, cast

import pytest
import torch

from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.targets import TARGETS
from kvforge.worker.kernels import SLAB, choose_operations, fused, row_counts
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.linear import FEW, choose_tiles, steady_parts
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.recurrent import MixerStep
from kvforge.worker.kernels.steady import same_bits, unsteady_products, unsteady_steps
from kvforge.worker.loading.determinism import make_batch_invariant
from kvforge.worker.loading.model import LoadedModel
from tests.worker.step.company import wide_model

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 64}
ROWS_OFF = 33


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return wide_model(tmp_path_factory.mktemp("model"), open_device("cpu"), "float32", **(SHAPE | {"vocab_size": 300}))


def test_products_that_keep_to_it_pass(model: LoadedModel) -> None:
    assert model.fused is not None
    assert unsteady_products(model.fused, model.device) == ""
    assert model.info.determinism == "batch-invariant"


@pytest.mark.parametrize(
    ("operation", "named"), [("linear_parts", "the projection from attention"), ("gated", "the gated product")]
)
def test_one_bit_of_one_row_is_found(
    model: LoadedModel, operation: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one row count the last row of a product is slightly larger."""
    assert model.fused is not None
    real = getattr(model.fused.operations, operation)

    def off(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        found: torch.Tensor = real(x, *arguments)
        if len(x) == ROWS_OFF:
            last = found[..., -1, :]
            last[0] = torch.nextafter(last[0], torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(model.fused.operations, operation, off)
    problem = make_batch_invariant(model, model.fused.operations)
    assert problem.startswith(f"{named} of {ROWS_OFF} tokens has other bits")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_few_results_of_a_token_are_never_the_librarys(name: str) -> None:
    """The library has another kernel for each row count there, and a gate of one number gives a trial too little
    data."""
    target = replace(TARGETS[name], steady=True)
    for n in (1, 8, FEW, 49159):
        tiles = [choose_tiles(rows, n, 1024, target, divisible=False, gated=False) for rows in (1, 17, 431, 4096)]
        assert all(tiles) == bool(target.matrix or target.backend != "cuda")
        assert choose_tiles(4096, n, 1024, TARGETS[name], divisible=False, gated=False) is None


@pytest.mark.parametrize("k", [64, 512])
@pytest.mark.parametrize("n", [2, 3, 8, 24])
def test_few_results_of_few_rows_are_those_among_many_on_a_cpu(n: int, k: int) -> None:
    """MKL has kernels of their own for few rows on Intel's CPUs with AVX-512."""
    generator = torch.Generator().manual_seed(n)
    x, weight = torch.randn((80, k), generator=generator), torch.randn((n, k), generator=generator)
    operations = PlainOperations()
    whole = operations.linear(x, weight)
    for rows in range(1, 40):
        for first in (0, 80 - rows):
            assert same_bits(operations.linear(x[first : first + rows], weight), whole[first : first + rows])


@pytest.mark.parametrize("divisible", [False, True])
@pytest.mark.parametrize(("n", "k"), [(128, 2048), (32, 2880), (160, 5120), (256, 7168), (64, 192)])
def test_a_routers_sum_has_as_many_parts_for_any_number_of_rows(n: int, k: int, divisible: bool) -> None:
    target = replace(TARGETS["sm_90"], steady=True)
    tiles = [choose_tiles(rows, n, k, target, divisible=divisible, gated=False) for rows in (1, 16, 64, 500, 9000)]
    kept = {(each.parts * each.inside, each.depth, each.warps) for each in tiles if each is not None}
    assert None not in tiles and len(kept) == 1
    ((parts, depth, _),) = kept
    assert k % (parts * depth) == 0 and parts == (
        1 if not divisible or k == 192 else {2880: 15, 5120: 10, 7168: 14}.get(k, 8)
    )
    used = {each.parts for each in tiles if each is not None}
    assert used == {parts, 1}, "few tokens are divided, many are not"


def test_narrow_sums_have_as_many_parts_for_any_number_of_rows() -> None:
    """As 32 tiles of rows are too few to read a weight at the memory's bandwidth."""
    target = replace(TARGETS["sm_90"], steady=True)
    for n, k, parts in (
        (2048, 4096, 2),
        (1536, 8192, 2),
        (2048, 2048, 1),
        (2880, 4096, 1),
        (2048, 4224, 1),
        (200, 4096, 1),
    ):
        assert steady_parts(n, k, target) == parts
        assert steady_parts(n, k, replace(target, name="sm_100")) == 1, "measured on Hopper alone"
        for rows in (1, 16, 17, 64, 65, 128, 129, 192, 193, 256, 257, 384, 385, 640, 641, 9000):
            tiles = choose_tiles(rows, n, k, target, divisible=True, gated=False)
            assert tiles is None or tiles.parts * tiles.inside == parts
            assert (tiles is None) == (rows > 64 if parts == 1 else 256 < rows <= 384)
            whole = choose_tiles(rows, n, k, target, divisible=False, gated=False)
            assert whole is None or whole.parts * whole.inside == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (1536, 8192), (128, 2048), (32, 2880)])
def test_sums_in_parts_have_the_same_bits_among_any_number_of_rows_on_a_gpu(n: int, k: int, biased: bool) -> None:
    operations = choose_operations(open_device("auto"), torch.bfloat16)
    torch.manual_seed(n)
    x, weight, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in ((1000, k), (n, k), (n,)))

    def added(first: int, count: int) -> torch.Tensor:
        return reduce(
            torch.add, operations.linear_parts(x[first : first + count], weight, bias if biased else None).float()
        )

    whole = added(0, 1000).bfloat16()
    for count in (*range(1, 70), 100, 128, 129, 200, 256, 300, 511, 512, 900):
        for first in (0, 1000 - count):
            assert same_bits(added(first, count).bfloat16(), whole[first : first + count]), (count, first)


@pytest.mark.parametrize("steady", [False, True])
def test_where_no_kernel_is_ours_few_results_are_made_of_as_many_rows_each(
    steady: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case of a T4 in 16 bits."""
    target = replace(TARGETS["sm_75"], steady=steady)
    assert choose_tiles(3, 1, 64, target, divisible=False, gated=False) is None
    monkeypatch.setattr(fused, "current_target", lambda _: target)
    asked = []
    real = fused.linear
    monkeypatch.setattr(fused, "linear", lambda x, *rest: asked.append(len(x)) or real(x, *rest))
    operations, x = FusedOperations(open_device("cpu")), torch.randn(70, 64).half()
    few, many = torch.randn(FEW, 64).half(), torch.randn(FEW + 1, 64).half()
    assert torch.allclose(operations.linear(x, few), torch.nn.functional.linear(x, few), atol=1e-2)
    assert asked == ([SLAB] * 3 if steady else [])
    operations.linear(x, many)
    assert len(asked) == (3 if steady else 0), "of many a trial tells"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 8, 60, 4999])
def test_few_results_have_the_same_bits_among_any_number_of_rows_on_a_gpu(n: int, dtype: torch.dtype) -> None:
    operations = choose_operations(open_device("auto"), dtype)
    torch.manual_seed(n)
    for _ in range(300 // n + 1):
        x, weight = torch.randn((700, 1024), device="cuda").to(dtype), torch.randn((n, 1024), device="cuda").to(dtype)
        whole = operations.linear(x, weight)
        for count in range(1, 700, 31):
            for first in (0, 700 - count):
                rows = slice(first, first + count)
                assert same_bits(operations.linear(x[rows], weight), whole[rows]), (count, first)


@pytest.mark.parametrize(("instructions", "least"), [("AVX2", [1, 1, 2, 2]), ("AVX512", [4, 4, 4, 4])])
def test_a_long_row_is_never_multiplied_by_itself(
    instructions: str, least: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN sums a single row of more than a thousand numbers in another order than several.

    With AVX-512, it multiplies four rows in less time than one.
    """
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    assert [row_counts.least_rows(k) for k in (64, 1024, 1025, 14336)] == least
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert len(row_counts.padded(torch.ones(1, 1536, dtype=dtype))) == least[3]
        assert len(row_counts.padded(torch.ones(1, 1024, dtype=dtype))) == least[1]
        assert len(row_counts.padded(torch.ones(5, 1024, dtype=dtype))) == 5


def test_a_product_in_a_recurrent_layer_that_depends_on_the_rows_is_found(
    cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=generator) for shape in ((12, 40), (40, 4))]

    class Step:
        products = (*weights, torch.randn((2, 5, 7)))  # the last one of each head by itself

    operations, steps = PlainOperations(), [cast(MixerStep, Step())]
    assert unsteady_steps(operations, steps, cpu) == ""
    multiply = PlainOperations.linear

    def planted(self: PlainOperations, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return multiply(self, x, *given) * (1 + 1e-6 * (len(x) == 3))

    monkeypatch.setattr(PlainOperations, "linear", planted)
    found = unsteady_steps(operations, steps, cpu)
    assert found.startswith("a product of 12 numbers in a recurrent layer of 3 tokens has other bits")
    monkeypatch.setattr(PlainOperations, "linear", multiply)
    by_head = PlainOperations.by_head

    def planted_by_head(self: PlainOperations, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return by_head(self, x, *given) * (1 + 1e-6 * (len(x) == 3))

    monkeypatch.setattr(PlainOperations, "by_head", planted_by_head)
    found = unsteady_steps(operations, steps, cpu)
    assert found.startswith("a product of 14 numbers in a recurrent layer of 3 tokens has other bits")
