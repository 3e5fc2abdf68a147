"""Products of few tokens on Hopper have the bits of the kernels that serve other tokens and other GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention import KvLayer
from kvforge.worker.attention.prefill_plan import gluon_problem
from kvforge.worker.device.device import open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import TARGETS, current_target
from kvforge.worker.kernels import hopper_codes, stored_experts, stored_linear, stored_project
from kvforge.worker.kernels.activations import SILU, Activation
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.hopper_codes import can_sum
from kvforge.worker.kernels.router import AWAY
from kvforge.worker.kernels.stored import Codes, StoredWeight
from tests.worker.kernels.launches import compiler_environment
from tests.worker.kernels.test_stored import Layout, random_codes
from tools.aot.results import VERSION

DEVICE = open_device("auto")
HOPPER = DEVICE.runs_kernels and current_target(DEVICE).hopper
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
LAYOUTS = (
    *(("int4", 128, "", 1), ("int4", 128, "zeros", 1), ("int4", 64, "", 1), ("int4", 64, "zeros", 1)),
    ("nf4", 64, "", 1),
)
PLAIN = LAYOUTS[0]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: "-".join(map(str, each)))
each_count = pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16])


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Numbers of sizes that differ widely, so that the order of a sum shows."""
    generator = torch.Generator(DEVICE.torch_device).manual_seed(seed)
    sizes = torch.randint(-8, 8, shape, generator=generator, device=DEVICE.torch_device)
    found = torch.randn(shape, generator=generator, device=DEVICE.torch_device) * torch.exp2(sizes.float())
    return found.to(dtype)


class Kernels:
    """Both ways of an operation: with the kernels of Hopper, and without.

    Attributes:
        launches: Launches of the former.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations = FusedOperations(DEVICE)
        self.launches = 0
        self._off = False
        for module in (stored_linear, stored_project, stored_experts):
            monkeypatch.setattr(module, "can_sum", self._can_sum)

    def _can_sum(self, codes: Codes, x: torch.Tensor, results: int, halves: int, target: Target) -> bool:
        can = not self._off and can_sum(codes, x, results, halves, target)
        self.launches += can
        return can

    def equal(self, run: Callable[[], torch.Tensor]) -> bool:
        """Return whether `run` has the same bits in both ways."""
        before, self._off = self.launches, False
        found = run()
        assert self.launches > before, "no kernel of Hopper was launched"
        self._off = True
        right = run()
        self._off = False
        return torch.equal(found, right)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def weight(n: int, k: int, layout: Layout, dtype: torch.dtype, *experts: int) -> StoredWeight:
    return StoredWeight(random_codes(n, k, layout, experts=experts), dtype)


@pytest.mark.gpu
@needs_hopper
@each_layout
@each_count
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [128, 640, 2048, 4096])
def test_products_have_the_bits_of_the_others(
    layout: Layout, tokens: int, dtype: torch.dtype, k: int, kernels: Kernels
) -> None:
    both, down, ops = weight(832, k, layout, dtype), weight(64, k, layout, dtype), kernels.operations
    bias, x = numbers(832, dtype=dtype), numbers(tokens, k + 8, dtype=dtype)[:, :k]
    wide = torch.empty((tokens, 832), device=DEVICE.torch_device)
    for activation in (SILU, Activation("gelu_tanh")):
        assert kernels.equal(partial(ops.gated, x, both, bias, activation))
    assert kernels.equal(lambda: ops.linear(x, both, bias, wide).clone())
    assert kernels.equal(lambda: ops.activated(x, both, None, Activation("relu2")))
    assert kernels.equal(lambda: ops.linear_parts(x, down))


@pytest.mark.gpu
@needs_hopper
@each_layout
@each_count
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("biased", [False, True])
def test_projections_have_the_bits_of_the_others(
    layout: Layout, tokens: int, head_size: int, biased: bool, kernels: Kernels
) -> None:
    heads, kv_heads, k, dtype = 3, 2, 1408, torch.bfloat16
    n = (heads + 2 * kv_heads) * head_size
    projection, bias = weight(n, k, layout, dtype), numbers(n) if biased else None
    x, angles = numbers(tokens, k), torch.rand((tokens, head_size), device=DEVICE.torch_device) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.randperm(24, device=DEVICE.torch_device)[:tokens].int()
    slots[tokens // 2] = -1

    def run() -> torch.Tensor:
        shape = (6, 4, kv_heads, head_size)
        cache = KvLayer(*(torch.full(shape, 7.0, dtype=dtype, device=DEVICE.torch_device) for _ in range(2)))
        query = kernels.operations.project(x, projection, bias, cos, sin, cache, lambda: slots)
        assert query is not None
        return torch.cat([each.flatten() for each in (query, cache.keys, cache.values)])

    assert kernels.equal(run)


@pytest.mark.gpu
@needs_hopper
@each_layout
@pytest.mark.parametrize("inner", [640, 768])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_of_one_token_have_the_bits_of_the_others(
    layout: Layout, inner: int, biased: bool, kernels: Kernels
) -> None:
    experts, hidden, dtype = 12, 2048, torch.bfloat16
    up, down = weight(2 * inner, hidden, layout, dtype, experts), weight(hidden, inner, layout, dtype, experts)
    biases = (numbers(experts, 2 * inner), numbers(experts, hidden)) if biased else (None, None)
    matrices = ExpertMatrices(up, biases[0], down, biases[1])
    x = numbers(1, hidden)
    weights, chosen = torch.rand((1, experts), device=DEVICE.torch_device).topk(4)
    before = kernels.launches
    assert kernels.equal(lambda: kernels.operations.expert_parts(x, chosen, weights, matrices, SILU))
    assert kernels.launches == before + 2


@pytest.mark.gpu
@needs_hopper
def test_an_expert_of_another_rank_changes_no_other(kernels: Kernels) -> None:
    experts, hidden, inner, dtype = 4, 512, 256, torch.bfloat16
    up, down = weight(2 * inner, hidden, PLAIN, dtype, experts), weight(hidden, inner, PLAIN, dtype, experts)
    matrices = ExpertMatrices(up, numbers(experts, 2 * inner), down, numbers(experts, hidden))
    x, chosen = numbers(1, hidden), torch.tensor([[2, AWAY, 0]], device=DEVICE.torch_device)
    weights = torch.tensor([[0.5, 0.3, 0.2]], device=DEVICE.torch_device)
    assert kernels.equal(lambda: kernels.operations.expert_parts(x, chosen, weights, matrices, SILU)[[0, 2]])


@pytest.mark.gpu
@needs_hopper
def test_a_broken_row_changes_no_other(kernels: Kernels) -> None:
    k = 1024
    down = weight(128, k, PLAIN, torch.bfloat16)
    x = numbers(7, k)
    right = kernels.operations.linear(x, down)
    x[3], x[4] = float("nan"), float("inf")
    found = kernels.operations.linear(x, down)
    others = [0, 1, 2, 5, 6]
    assert kernels.launches == 2
    assert torch.equal(found[others], right[others])
    assert bool(found[3].isnan().all())


def test_what_the_kernels_cannot_do_is_left_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    target, x = TARGETS["sm_90"], torch.empty((3, 1024), dtype=torch.bfloat16, device="meta")

    def codes(layout: Layout) -> Codes:
        return random_codes(128, 1024, layout)

    assert all(can_sum(codes(layout), x, 128, 1, target) for layout in LAYOUTS)
    for layout in (
        ("int4", 256, "", 1),
        ("int4", 0, "", 1),
        ("int8", 32, "", 1),
        ("e2m1", 32, "", 1),
        ("nf4", 128, "", 1),
    ):
        assert not can_sum(codes(layout), x, 128, 1, target)
    plain = codes(PLAIN)
    assert not can_sum(plain, x, 120, 1, target), "rows that fill no tile"
    assert not can_sum(plain, x.expand(17, 3, 1024)[:, 0], 128, 1, target), "more tokens"
    assert not can_sum(plain, x[:0], 128, 1, target), "no token"
    assert not can_sum(plain, torch.empty((3, 1028), device="meta", dtype=x.dtype)[:, :1024], 128, 1, target)
    assert not can_sum(plain, x, 128, 1, TARGETS["sm_80"]) and not can_sum(plain, x, 128, 1, TARGETS["gfx942"])
    assert not can_sum(plain, x, 128, 1, replace(target, chained=False)), "the interpreter"
    monkeypatch.setattr(hopper_codes, "gluon_problem", lambda: gluon_problem("4.0.0"))
    assert not can_sum(plain, x, 128, 1, target), "a Triton with an unknown Gluon"


COMPILE = """
import subprocess
from pathlib import Path
import torch
import triton
from triton.experimental.gluon._runtime import GluonASTSource
from kvforge.worker.device.targets import TARGETS
from tools.aot.specialise import gpu_target
from tools.aot.stored import OF_HOPPER, _product

target = TARGETS["sm_90"]
for layout in OF_HOPPER:
    made = _product(target, torch.bfloat16, 1, layout, "gated").specialisation
    source = GluonASTSource(made.kernel, made.types, made.constants, made.attributes)
    found = triton.compile(source, target=gpu_target(target), options=made.options).asm
    path = Path(triton.knobs.cache.dir) / "few.cubin"
    path.write_bytes(found["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    lines = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    copies = found["ptx"].count("cp.async.bulk.tensor")
    print(layout.extra == "zeros", lines.count("HGMMA"), lines.count("WARPGROUP.ARRIVE"), copies)
"""


@pytest.mark.skipif(version("triton") != VERSION, reason=f"what Triton {VERSION} makes of the kernel")
def test_products_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """With too few registers each instruction waits for the one before: with 32 for the copying warp, not 24."""
    command = [sys.executable, "-c", COMPILE]
    environment = compiler_environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert len(told) == 5
    for zeros, products, waits, copies in told:
        assert int(products) >= 8 and int(products) >= 4 * int(waits) > 0, told
        # In the first turns and in the others: words, scales and x, and zeros where there are some.
        assert int(copies) >= 2 * (4 if zeros == "True" else 3), told
