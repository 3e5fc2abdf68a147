"""The grouped products of experts compute what experts one after the other do, whatever company a token has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvforge.protocol.errors import KernelError
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels.activations import SILU, Activation
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.router import AWAY

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from kvforge.worker.device.targets import TARGETS  # noqa: E402
from kvforge.worker.kernels.expert_sort import Blocks  # noqa: E402
from kvforge.worker.kernels.experts import Experts  # noqa: E402
from kvforge.worker.kernels.experts_selftest import experts_test  # noqa: E402
from kvforge.worker.kernels.fused import FusedOperations  # noqa: E402 - it imports triton
from kvforge.worker.kernels.grouped import multiply_down  # noqa: E402
from kvforge.worker.kernels.grouped_tiles import is_even, tiles_for, tokens_per_block  # noqa: E402
from kvforge.worker.kernels.launching import LaunchSettings  # noqa: E402
from tests.amount import thinned  # noqa: E402
from tools.aot.specialise import recorded  # noqa: E402

interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="only under Triton's interpreter")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OSS = Activation("clamped_swiglu", 1.702, 7.0)
DTYPES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
LADDER = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 300)


@dataclass(frozen=True)
class Layer:
    """Weights of experts, the last of which no token chooses: they are NaN."""

    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: Activation
    interleaved: bool
    shared_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None

    @property
    def matrices(self) -> ExpertMatrices:
        return ExpertMatrices(self.up, self.up_bias, self.down, self.down_bias, self.shared_up, self.shared_down)

    def run(self, operations: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        matrices = self.matrices
        found: torch.Tensor = operations.experts(x, chosen, weights, matrices, self.activation, self.interleaved)
        return found


def layer_of(
    device: Device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    activation: Activation = SILU,
    *,
    gated: bool = True,
    oss: bool = False,
    biased: bool = False,
    whole: bool = False,
    shared: int = 0,
) -> Layer:
    """whole: numbers whose sums are exact in any order. shared: shared experts."""
    experts, hidden, inner = sizes

    def random(*shape: int) -> torch.Tensor:
        numbers = torch.randint(-2, 3, shape) / 8 if whole else torch.randn(shape) * shape[-1] ** -0.5
        if len(shape) == 3:
            numbers[-1] = float("nan")
        return numbers.to(dtype=dtype, device=device.torch_device)

    rows = 2 * inner if gated else inner
    up, down = random(experts, rows, hidden), random(experts, hidden, inner)
    if oss:
        up, down = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (up, down))
    biases = (random(experts, rows), random(experts, hidden)) if biased else (None, None)
    blocks = (random(shared * rows, hidden), random(hidden, shared * inner)) if shared else (None, None)
    return Layer(up, biases[0], down, biases[1], activation, oss and gated, *blocks)


def tokens_of(
    device: Device, dtype: torch.dtype, count: int, layer: Layer, width: int, whole: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with NaN between and behind them, distinct experts without the last one, and their weights."""
    hidden = layer.up.shape[2]
    x = torch.full((count + 2, hidden + 8), float("nan"), dtype=dtype, device=device.torch_device)[:count, :hidden]
    x.copy_(torch.randint(-2, 3, (count, hidden)) if whole else torch.randn(count, hidden))
    scores = torch.randn(count, len(layer.up) - 1).exp()
    weights, chosen = scores.topk(width)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    if shared := layer.matrices.shared:
        numbers = torch.arange(len(layer.up), len(layer.up) + shared).expand(count, -1)
        factors = torch.ones(count, shared) if whole else torch.rand(count, 1).expand(-1, shared)
        chosen, weights = torch.cat((chosen, numbers), dim=1), torch.cat((weights, factors.to(dtype)), dim=1)
    return x, chosen.to(device.torch_device), weights.to(device.torch_device)


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    return float((got.double() - want.double()).norm() / want.double().norm()) <= tolerance


CASES: dict[str, dict[str, Any]] = {
    "silu": {},
    "gpt-oss": {"activation": OSS, "oss": True, "biased": True},
    "gate first, biased": {"activation": Activation("gelu_tanh"), "biased": True},
    "not gated": {"activation": Activation("relu2"), "gated": False},
    "not gated, transposed": {"activation": Activation("gelu"), "gated": False, "oss": True},
    "a shared one": {"shared": 1},
    "two shared ones": {"shared": 2},
    "two shared ones, not gated": {"activation": Activation("relu2"), "gated": False, "shared": 2},
}


@interpreted
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 2, 40])
def test_experts(case: str, count: int, cpu: Device) -> None:
    torch.manual_seed(count)
    layer = layer_of(cpu, torch.float16, (6, 64, 32), **CASES[case])
    given = tokens_of(cpu, torch.float16, count, layer, 2)
    got, want = (layer.run(each, *given) for each in (FusedOperations(cpu), PlainOperations()))
    assert got.shape == want.shape and got.dtype == torch.float16
    assert near(got, want, DTYPES[torch.float16])


@interpreted
@pytest.mark.parametrize("sizes", [(6, 72, 40), (3, 100, 33), (9, 64, 1)], ids=str)
def test_tiles_that_do_not_fit(sizes: tuple[int, int, int], cpu: Device) -> None:
    torch.manual_seed(0)
    for transposed in (False, True):
        layer = layer_of(cpu, torch.float32, sizes, oss=transposed, biased=True)
        given = tokens_of(cpu, torch.float32, 5, layer, 2)
        assert near(layer.run(FusedOperations(cpu), *given), layer.run(PlainOperations(), *given), 1e-5)


@interpreted
@torch.inference_mode()
def test_company_does_not_matter(cpu: Device) -> None:
    """Sums of these numbers are exact, so a difference would be a token's result in another place."""
    torch.manual_seed(0)
    layer = layer_of(cpu, torch.float32, (8, 64, 32), Activation("relu"), whole=True)
    x, chosen, weights = tokens_of(cpu, torch.float32, 300, layer, 3, whole=True)
    operations = FusedOperations(cpu)
    whole = layer.run(operations, x, chosen, weights)
    for count in LADDER[:: thinned(2)]:
        for first in (0, 300 - count):
            few = slice(first, first + count)
            assert torch.equal(layer.run(operations, x[few], chosen[few], weights[few]), whole[few]), count
    order = torch.randperm(300)
    assert torch.equal(layer.run(operations, x[order], chosen[order], weights[order]), whole[order])


@interpreted
@torch.inference_mode()
# The next test has a single shared expert.
@pytest.mark.parametrize("shared", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_company_does_not_matter_to_shared_experts(shared: int, cpu: Device) -> None:
    torch.manual_seed(0)
    layer = layer_of(cpu, torch.float32, (8, 64, 32), Activation("relu"), whole=True, shared=shared)
    given = tokens_of(cpu, torch.float32, 300, layer, 3, whole=True)
    operations = FusedOperations(cpu)
    whole = layer.run(operations, *given)
    assert near(whole, layer.run(PlainOperations(), *given), 1e-5)
    for count in LADDER[:: thinned(2)]:
        few = slice(300 - count, None)
        assert torch.equal(layer.run(operations, *(each[few] for each in given)), whole[few]), count


@interpreted
@pytest.mark.parametrize("shared", [1, 2])
def test_shared_experts_are_a_dense_block(shared: int, cpu: Device) -> None:
    """The result is the sum of the others' and the block's own."""
    torch.manual_seed(shared)
    layer = layer_of(cpu, torch.float32, (6, 64, 32), shared=shared)
    x, chosen, weights = tokens_of(cpu, torch.float32, 20, layer, 2)
    others = replace(layer, shared_up=None, shared_down=None).run(PlainOperations(), x, chosen[:, :2], weights[:, :2])
    assert layer.shared_up is not None and layer.shared_down is not None
    gate, up = (x @ layer.shared_up.T).chunk(2, dim=1)
    block = (torch.nn.functional.silu(gate) * up) @ layer.shared_down.T
    assert near(layer.run(FusedOperations(cpu), x, chosen, weights), others + weights[:, 2:3] * block, 1e-5)


class WithoutShared(FusedOperations):
    """Leaves shared experts out."""

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *others: Any) -> torch.Tensor:
        return super().experts(x, chosen, torch.where(chosen < 5, weights, 0.0), *others)


class Ungated(FusedOperations):
    """Chooses shared experts with weight 1."""

    def route(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(*given[:4])


@interpreted
@pytest.mark.parametrize(
    ("kind", "problem"), [(FusedOperations, ""), (WithoutShared, "experts"), (Ungated, "router")], ids=str
)
def test_shared_experts_are_tested_at_start(kind: type[FusedOperations], problem: str, cpu: Device) -> None:
    torch.manual_seed(0)
    layer = layer_of(cpu, torch.float16, (6, 64, 32), shared=2)
    matrices = replace(layer.matrices, up=layer.up[:5], down=layer.down[:5])
    experts = Experts(None, kind(cpu), matrices, SILU)
    if not problem:
        experts_test(experts, cpu)
        return
    with pytest.raises(KernelError, match=problem):
        experts_test(experts, cpu)


@interpreted
def test_all_tokens_of_one_expert_and_none(cpu: Device) -> None:
    layer = layer_of(cpu, torch.float16, (4, 64, 32))
    x, _, weights = tokens_of(cpu, torch.float16, 70, layer, 2)
    chosen = torch.tensor([[1, 0]]).expand(70, 2)
    assert near(
        layer.run(FusedOperations(cpu), x, chosen, weights), layer.run(PlainOperations(), x, chosen, weights), 4e-3
    )
    assert layer.run(FusedOperations(cpu), x[:0], chosen[:0], weights[:0]).shape == (0, 64)


@interpreted
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("case", ["silu", "gpt-oss"])
def test_experts_of_other_ranks_add_nothing(case: str, count: int, cpu: Device, monkeypatch: Any) -> None:
    """Parts that no program writes hold NaN here."""
    torch.manual_seed(count)
    layer = layer_of(cpu, torch.float16, (8, 64, 32), **CASES[case])
    x, chosen, weights = tokens_of(cpu, torch.float16, count, layer, 3)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        parts = []
        for held in (slice(0, 3), slice(3, 7)):
            parts_of = ("up", "up_bias", "down", "down_bias")
            given = {name: getattr(layer, name) for name in parts_of}
            mine = replace(layer, **{name: None if each is None else each[held] for name, each in given.items()})
            here = (chosen >= held.start) & (chosen < held.stop)
            local = torch.where(here, chosen - held.start, AWAY)
            got, want = (mine.run(each, x, local, weights) for each in (FusedOperations(cpu), PlainOperations()))
            assert got.isfinite().all() and near(got, want, DTYPES[torch.float16])
            assert not got[~here.any(1)].any(), "a token without experts here"
            parts.append(got.float())
    finally:
        torch.use_deterministic_algorithms(False)
    assert near(parts[0] + parts[1], layer.run(PlainOperations(), x, chosen, weights), DTYPES[torch.float16])


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
@torch.inference_mode()
def test_experts_on_a_gpu(dtype: torch.dtype, tolerance: float, case: str) -> None:
    """Results are those of plain torch, and have the same bits among any number of tokens."""
    device = open_device()
    torch.manual_seed(0)
    for sizes in ((17, 512, 384), (33, 320, 192), (9, 200, 104)):
        layer = layer_of(device, dtype, sizes, **CASES[case])
        x, chosen, weights = tokens_of(device, dtype, 3000, layer, 4)
        operations = FusedOperations(device)
        whole = layer.run(operations, x, chosen, weights)
        assert near(whole, layer.run(PlainOperations(), x, chosen, weights), tolerance)
        for count in LADDER:
            for first in range(37) if count == 1 else (0, 37, 3000 - count):
                few = slice(first, first + count)
                assert torch.equal(layer.run(operations, x[few], chosen[few], weights[few]), whole[few]), (sizes, count)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_depth_depends_on_the_weight_alone(dtype: torch.dtype, name: str) -> None:
    """Else the order of a sum would depend on the number of tokens."""
    target = TARGETS[name]
    for rows, k in ((64, 96), (1536, 768), (1000, 1000), (2048, 2048), (2880, 2880), (33, 64)):
        sizes = (8, 128, 2000, 4000, 65536)
        blocks = {tokens_per_block(pairs, 128, dtype, target, even=is_even(rows, k)) for pairs in sizes}
        every = [tiles_for(tokens, rows, k, dtype, target) for tokens in blocks]
        assert len({tiles.depth for tiles in every}) == 1
        for tiles in every:
            assert not is_even(rows, k) or (rows % tiles.rows == 0 and k % tiles.depth == 0)
            shared = (tiles.rows + tiles.tokens) * tiles.depth * dtype.itemsize * tiles.stages
            assert shared <= target.shared_bytes, (k, tiles)


def test_short_steps_are_not_prefetched() -> None:
    """A step of 32 numbers has no whole line of the cache: the kernel did not compile for an inner size of 96."""
    target = TARGETS["sm_90"]
    for inner, prefetched in ((96, 0), (768, 1)):
        weight, weights = torch.empty((8, 128, inner), dtype=torch.bfloat16, device="meta"), torch.empty((1, 2))
        tiles, pairs = tiles_for(16, 128, inner, torch.bfloat16, target), torch.empty((1, 2), dtype=torch.int32)
        x = torch.empty((2, inner), dtype=torch.bfloat16, device="meta")
        with recorded(target) as made:
            blocks = Blocks(pairs.to("meta"), pairs.to("meta"), 2, alone=True)
            multiply_down(LaunchSettings(target, overlap=True), x, weight, None, weights.to("meta"), blocks, tiles)
        (found,) = made
        names = found.kernel.arg_names
        constants = {names[place[0]]: value for place, value in found.constants.items()}
        assert constants["PREFETCH"] == prefetched and (tiles.depth >= 64) == bool(prefetched)
