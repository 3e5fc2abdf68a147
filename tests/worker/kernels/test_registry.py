"""No kernel is launched undeclared, every declared one is checked at the start, and a worker can run without
kernels."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from kvforge import worker
from kvforge.protocol.errors import GpuError, InvalidConfiguration, KernelError, WorkerError
from kvforge.protocol.messages import WorkerWelcome
from kvforge.worker.attention import AttentionOptions, choose_attention, selftest
from kvforge.worker.attention.expanded_space import ExpandedSpaces
from kvforge.worker.attention.selftest import AttentionShape
from kvforge.worker.attention.triton_attention import is_interpreted
from kvforge.worker.config import WorkerConfig
from kvforge.worker.device.check import require_right
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels import choose_operations, registry
from kvforge.worker.kernels.activations import SILU
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.experts import Experts
from kvforge.worker.kernels.packed import packing_problem, quantising_problem
from kvforge.worker.kernels.quantised import quantise_int8
from kvforge.worker.kernels.registry import CPU_KERNELS, KERNELS, CpuKernelEntry, Kernel, Serving
from kvforge.worker.loading import determinism
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.mixers import FIRST_VERSION
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.engine import Engine
from tests.pairs import every_pair
from tests.worker.conftest import TINY
from tests.worker.device.test_device import BLOCK_SIZE, ROWS, WIDTH, tokens_of
from tests.worker.loading.random_models import HYBRIDS, LINEAR_HEADS, MAMBA_2

DEVICE = open_device("auto")
CPU = open_device("cpu")
PACKAGE = Path(worker.__file__).parent
runs_kernels = pytest.mark.skipif(
    not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"
)
# Wide enough for every kernel: a head of 64 can be projected into the cache, an inner size of 128 gated.
SHAPE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"head_dim": 64, "num_hidden_layers": 1, "vocab_size": 5000}
LATENTS = {"num_key_value_heads": 2, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 48, "v_head_dim": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64}
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA_2, "mamba_n_heads": 16, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "deepseek_v3": {**LATENTS, **ROUTED, "first_k_dense_replace": 0},  # and rotary keys of 64
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "kimi_linear": {
        **LATENTS,
        "q_lora_rank": None,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {
        **LINEAR_HEADS,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
RECURRENT = {
    "kvforge.worker.cpu.convolution_kernel": "lfm2",
    "kvforge.worker.cpu.delta_kernel": "qwen3_5",
    "kvforge.worker.cpu.prompt_convolution_kernel": "lfm2",
    "kvforge.worker.cpu.prompt_kernel": "qwen3_5",
    "kvforge.worker.cpu.selective_kernel": "jamba",
    "kvforge.worker.cpu.state_space_kernel": "bamba",
}  # models with steps that run a kernel
SHAPES_OF_LATENTS = (  # of the portable kernels, and of Hopper's
    AttentionShape(2, 1, 48, AttentionOptions(0.125), latent=32),
    AttentionShape(2, 1, 320, AttentionOptions(0.125), latent=256),
)


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Return each module's name and tree, parsed once for all tests."""
    return [
        (".".join(path.relative_to(PACKAGE.parents[1]).with_suffix("").parts), ast.parse(path.read_text()))
        for path in PACKAGE.rglob("*.py")
    ]


def jitted(tree: ast.Module) -> set[str]:
    """Return the functions that Triton or Gluon compiles."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                if isinstance(called, ast.Attribute) and called.attr == "jit":
                    found.add(node.name)
    return found


def launched(tree: ast.Module) -> set[str]:
    """Return the names in `name[grid](...)`."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return names([call.value for call in calls if isinstance(call, ast.Subscript)])


def names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that are read."""
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return read | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def test_every_kernel_is_declared() -> None:
    """Every launched kernel is in the registry under its launching module; other functions are called by a kernel."""
    every, functions, helpers = set(), set(), set()
    for name, tree in modules():
        functions |= jitted(tree)
        helpers |= names(list(ast.walk(tree)))
        every |= {(name, kernel) for kernel in launched(tree)}
    launches = {(module, name) for module, name in every if name in functions}
    assert launches == {(kernel.module, kernel.name) for kernel in KERNELS}
    assert len(launches) >= 16
    assert functions - {name for _, name in launches} <= helpers, "neither launched nor part of another"


def test_every_kernel_of_the_cpu_is_declared() -> None:
    """They are declared where they are defined, and nothing else creates one."""
    made = {
        (name, node.name)
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Call) and names([each.func]) == {"cpu_kernel"} for each in node.decorator_list)
    }
    assert made == {(kernel.module, kernel.name) for kernel in CPU_KERNELS}
    for name, tree in modules():
        called = names([node.func for node in ast.walk(tree) if isinstance(node, ast.Call)])
        assert "CpuKernel" not in called or name == "kvforge.worker.cpu.kernel"


def test_every_kernel_has_a_reference_without_kernels() -> None:
    for kernel in (*KERNELS, *CPU_KERNELS):
        code = getattr(kernel.reference, "__code__", None)
        assert code is None or "triton" not in Path(code.co_filename).name
        assert callable(kernel.reference) and callable(kernel.check)


# ------------------------------------------------------------------------------------------------- the check at start


class Spoilt:
    """A stand-in for a kernel that corrupts the kernel's output."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launches += 1
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            before = [each.clone() for each in tensors]
            self.kernel[grid](*arguments, **options)
            for old, new in zip(before, tensors, strict=True):
                raw = [each.view(torch.uint8) if each.dtype == torch.float8_e4m3fn else each for each in (old, new)]
                changed = (raw[0] != raw[1]) & ~(raw[0].isnan() & raw[1].isnan())
                raw[1][changed] = raw[1][changed] + 1

        return launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


class Refused:
    """A stand-in for a kernel that does not compile."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            raise OutOfResources(140288, 101376, "shared memory")

        return launch


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    made: dict[str, LoadedModel] = {}

    def load(model_type: str) -> LoadedModel:
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            (folder / "config.json").write_text(
                json.dumps({**TINY, **SHAPE, **FIELDS.get(model_type, {}), "model_type": model_type})
            )
            with pytest.MonkeyPatch.context() as patched:  # not the subject here
                patched.setattr(determinism, "_unsteady", lambda *_: "")
                made[model_type] = load_model(folder, load_format="dummy", dtype="float16", device=DEVICE, block_size=8)
        return made[model_type]

    return load


@pytest.fixture
def serving(
    loaded: Callable[[str], LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Serving]:
    """Return a model that uses kernels for layers, attention and sampling, also where they are interpreted."""

    def make(model_type: str = "llama") -> Serving:
        from kvforge.worker.kernels.fused import FusedOperations

        fused = loaded(model_type).fused
        assert fused is not None
        if not DEVICE.runs_kernels:
            monkeypatch.setattr(Device, "runs_kernels", property(lambda device: device.kernels))
            monkeypatch.setattr(selftest, "_PREFILLS", ((0, 0, 3), (1, 3, 9)))
            monkeypatch.setattr(selftest, "_DECODES", ((0, 0), (1, 0), (6, 2)))
        shapes = (AttentionShape(2, 1, 64, AttentionOptions(0.125)),)
        attention = choose_attention(DEVICE, "triton")
        float16 = torch.float16
        fused = replace(fused, operations=FusedOperations(DEVICE))
        up, down = torch.randn(6, 128, 64).to(DEVICE.torch_device), torch.randn(6, 64, 64).to(DEVICE.torch_device)
        experts = Experts(None, fused.operations, ExpertMatrices(up.half() / 8, None, down.half() / 8, None), SILU)
        numbers = (DEVICE, attention, shapes, float16, float16, 8, 5000, fused, tmp_path / "remembered")
        return Serving(*numbers, ranks=2, experts=experts, codes=frozenset({"int4"}))

    return make


def model_of(kernel: Kernel) -> str:
    if kernel.module == "kvforge.worker.kernels.combine":
        return "gemma2"
    if kernel.name == "xielu_kernel":
        return "apertus"
    if kernel.module.endswith(("state_space_kernels", "prompt_state_space")):
        return "bamba"
    if kernel.name in ("selective_kernel", "selective_scan_kernel"):
        return "jamba"
    if kernel.name == "convolve_kernel" or kernel.module.endswith("prompt_convolution"):
        return "lfm2"
    if kernel.name == "channel_pairs_kernel":
        return "kimi_linear"
    if kernel.name in ("delta_kernel", "gated_norm_kernel") or kernel.module.endswith("prompt_delta"):
        return "qwen3_5_text"
    if kernel.name in ("by_head_kernel", "latent_inputs_kernel", "wide_linear_kernel"):
        return "deepseek_v3"
    return "qwen3" if kernel.name == "head_norm_kernel" else "llama"


@runs_kernels
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
@pytest.mark.parametrize(
    ("fault", "kernel"),
    every_pair([Spoilt, Refused], KERNELS),
    ids=lambda each: f"{each.module}.{each.name}" if isinstance(each, Kernel) else None,
)
def test_a_kernel_that_is_wrong_or_does_not_compile_is_refused_at_start(
    fault: type[Any], kernel: Kernel, serving: Callable[[str], Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel.hopper and DEVICE.architecture[0] != "sm_90":
        pytest.skip("runs on NVIDIA's Hopper only")
    started = serving(model_of(kernel))
    if kernel.module == "kvforge.worker.attention.prefill_copy":
        started = replace(started, kv_dtype=torch.int8)
    if kernel.name == "shared_decode_kernel":
        steady = replace(DEVICE, steady=True)
        started = replace(started, device=steady, attention=choose_attention(steady, "triton"))
    if ".attention.latent_" in kernel.module:
        started = replace(started, shapes=SHAPES_OF_LATENTS[kernel.hopper :][:1])
    if kernel.name == "prefill_portable" and DEVICE.architecture[0] == "sm_90":
        started = replace(started, dtype=torch.float32, kv_dtype=torch.float32)
    stand_in = fault(kernel.function) if fault is Spoilt else fault()
    monkeypatch.setattr(import_module(kernel.module), kernel.name, stand_in)
    with pytest.raises(KernelError, match=r"kernels = 'reference'") as caught:
        kernel.check(started)
    words = str(caught.value)
    if fault is Spoilt:
        assert "kernel is wrong for" in words and stand_in.launches
    else:
        assert "kernel cannot be compiled or launched for" in words
        assert "OutOfResources: out of resource: shared memory, Required: 140288, Hardware limit: 101376" in words


@runs_kernels
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
# Qwen3 has the kernels of Llama, and norms of heads.
@pytest.mark.parametrize("model_type", [pytest.param("llama", marks=pytest.mark.soak), "qwen3"])
def test_right_kernels_pass(model_type: str, serving: Callable[[str], Serving]) -> None:
    started = serving(model_type)
    registry.check_kernels(replace(started, shapes=(*started.shapes, *SHAPES_OF_LATENTS[:1])))


@runs_kernels
def test_attention_over_expanded_keys_is_checked_where_it_runs(serving: Callable[[str], Serving]) -> None:
    started = serving("deepseek_v3")
    asked: list[tuple[tuple[AttentionShape, ...], torch.dtype]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            registry, "attention_test", lambda *given, kv_dtype, **_: asked.append((tuple(given[2]), kv_dtype))
        )
        for spaces in (None, ExpandedSpaces(DEVICE.torch_device)):
            patched.setattr(started.attention, "expanded_spaces", spaces, raising=False)
            registry._attention(replace(started, kv_dtype=torch.int8))
    heads = SHAPE["num_attention_heads"]
    expanded = tuple((each.heads, each.kv_heads, each.head_size, each.latent) for each in asked[3][0])
    assert expanded == ((heads, heads, 112, 0),) and asked[3][1] == started.dtype
    assert asked[1] == ((), started.dtype) and asked[0] == asked[2] == (started.shapes, torch.int8)


@pytest.mark.skipif(bool(CPU.cpu_kernels_problem), reason=CPU.cpu_kernels_problem)
@pytest.mark.parametrize(
    ("compiles", "kernel"),
    every_pair([True, False], CPU_KERNELS),
    ids=lambda each: f"{each.module}.{each.name}" if isinstance(each, CpuKernelEntry) else None,
)
def test_a_kernel_of_the_cpu_that_is_wrong_or_does_not_compile_is_refused_at_start(
    compiles: bool, kernel: CpuKernelEntry, write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvforge.worker.cpu.kernel import CpuKernel

    right = getattr(import_module(kernel.module), kernel.name)
    skipped = []

    def spoilt(this: CpuKernel, threads: int, **numbers: float) -> None:
        if this is not right:
            called(this, threads, **numbers)
        elif compiles:
            skipped.append(this.name)  # its output stays unchanged
        else:
            raise RuntimeError("LLVM ERROR: Cannot select")

    if kernel.module in RECURRENT:
        if not hasattr(transformers.Cache, "get_conv_state"):
            pytest.skip(f"transformers is older than {FIRST_VERSION}")
        model_type, fields = HYBRIDS[RECURRENT[kernel.module]]
        folder = write_config(model_type, **fields)
    else:
        folder = write_config("qwen3", **SHAPE)
    plain = replace(CPU, kernels=False)  # unpacked weights, as at a start
    fused = load_model(folder, load_format="dummy", dtype="float32", device=plain, block_size=8).fused
    assert fused is not None
    fused = replace(fused, operations=choose_operations(CPU, torch.float32))
    if kernel.module == "kvforge.worker.cpu.int8_kernels":
        if problem := quantising_problem(CPU, torch.float32, "int8"):
            pytest.skip(problem)
        fused = replace(fused, head=replace(fused.head, weight=quantise_int8(fused.head.weight)))
    if kernel.module == "kvforge.worker.cpu.tile_kernel":
        from kvforge.worker.kernels.packed import own_product

        if own_product(choose_operations(CPU, torch.float32).pack(torch.randn(130, 1100))) is None:  # type: ignore[attr-defined]
            pytest.skip("oneDNN's layout on this CPU is another one: the kernel does not run")
    dtype = torch.float32
    if kernel.module == "kvforge.worker.cpu.amx_kernel":
        from kvforge.worker.device.products import keeps_from_tiles
        from kvforge.worker.kernels.amx import amx_problem

        dtype = torch.bfloat16
        if problem := amx_problem() or packing_problem(CPU, dtype):
            pytest.skip(problem)
        if not keeps_from_tiles():
            pytest.skip("the environment limits oneDNN more")
    called = CpuKernel.__call__
    monkeypatch.setattr(CpuKernel, "__call__", spoilt)
    shapes = (AttentionShape(2, 1, 64, AttentionOptions(0.125)),)
    started = Serving(CPU, choose_attention(CPU), shapes, dtype, dtype, 8, 5000, fused, folder)
    with pytest.raises(KernelError, match=r"kernels = 'reference'"):
        kernel.check(started)
    assert bool(skipped) == compiles


DEVICE_FAILURES: list[Exception] = [  # a restart may find a healthy device or free memory
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
KERNEL_FAILURES: list[Exception] = [  # every restart would fail again
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: misaligned address"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("PassManager::run failed"),
    OutOfResources(140288, 101376, "shared memory"),
]


@pytest.mark.parametrize("error", [*DEVICE_FAILURES, *KERNEL_FAILURES], ids=str)
def test_what_the_device_itself_fails_at_stays_its_failure(error: Exception, cpu: Device) -> None:
    def fail() -> str:
        raise error

    with pytest.raises(WorkerError, match=re.escape(str(error))) as caught:
        require_right(cpu, "decode", "any", fail, "do this")
    assert type(caught.value) is (GpuError if error in DEVICE_FAILURES else KernelError)
    assert ("do this" in str(caught.value)) == (error in KERNEL_FAILURES)


def test_a_kernel_that_does_not_compile_after_the_check_is_told_alike(cpu: Device) -> None:
    """As in a trial of the largest step, which may use other tiles."""
    with pytest.raises(KernelError, match=r"shared memory.*; set kernels = 'reference'"), cpu.errors("trying"):
        raise OutOfResources(140288, 101376, "shared memory")
    with (
        pytest.raises(KernelError, match=r"trying failed on .*: CompilationError: no such type; set"),
        cpu.errors("trying"),
    ):
        raise CompilationError("def f():\n    x = 1\n", ast.parse("x = 1").body[0], "no such type")


def test_a_compilers_quotation_is_left_out(cpu: Device) -> None:
    def fail() -> str:
        raise CompilationError("def f():\n    x = 1\n", ast.parse("x = 1").body[0], "no such type")

    with pytest.raises(
        KernelError, match=r"the decode kernel cannot be .* for heads of 7: CompilationError: no such type; do"
    ):
        require_right(cpu, "decode", "heads of 7", fail, "do")


# --------------------------------------------------------------------------------------------------- no kernel at all


@pytest.fixture
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the launch of every kernel fail."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        raise AssertionError(f"{self} was launched")

    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "run", launch)
    if not DEVICE.runs_kernels:  # pretend that the device runs kernels
        monkeypatch.setattr(Device, "runs_kernels", property(lambda device: device.kernels))


def engine(folder: Path, **fields: Any) -> Engine:
    (folder / "config.json").write_text(json.dumps({**TINY, **SHAPE, "model_type": "llama"}))
    welcome = WorkerWelcome(
        rid=0, version=1, boot="b", tables_path="", slots_max=8, blocks_per_sequence_max=WIDTH, step_tokens_max=64,
        step_rows_max=ROWS, block_size=BLOCK_SIZE,
    )  # fmt: skip
    config = WorkerConfig(
        name="w", model=str(folder), load_format="dummy", dtype="float16", blocks=30, graphs="on", **fields
    )
    return Engine(config, welcome, lambda phase, fraction: None)


@runs_kernels
@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_way_out_launches_no_kernel(kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start to sampled, filtered and copied rows. Without this setting the first kernel of the start fails."""
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path))  # an empty cache
    with pytest.raises(KernelError, match=r"AssertionError: .* was launched; .* kernels = 'reference'"):
        engine(tmp_path, kv_dtype=kv_dtype)
    with pytest.raises(KernelError, match=r"AssertionError: .* was launched; set kernels = 'reference'"):
        engine(tmp_path, kv_dtype=kv_dtype, attention="reference")  # the other parts use kernels
    made = engine(tmp_path, kv_dtype=kv_dtype, kernels="reference")
    assert [len(tokens) for tokens in tokens_of(made)] == [ROWS] * 5
    made.close()


def test_the_way_out_and_triton_contradict_each_other(cpu: Device) -> None:
    for refuse in (
        lambda: WorkerConfig(name="w", model="m", attention="triton", kernels="reference"),
        lambda: choose_attention(replace(cpu, kernels=False), "triton"),
    ):
        with pytest.raises(InvalidConfiguration, match="kernels = 'reference'") as caught:
            refuse()
        assert caught.value.field == "attention"
    with pytest.raises(InvalidConfiguration, match="must be one of auto, reference"):
        WorkerConfig(name="w", model="m", kernels="none")
