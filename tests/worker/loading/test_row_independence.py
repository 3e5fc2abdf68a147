"""Replacements for a transformers model's modules compute the same, and the trial finds those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

from kvforge.worker.device.device import open_device
from kvforge.worker.kernels import choose_operations
from kvforge.worker.kernels.activations import Activation
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.experts import Experts, find_activation, grouped_experts
from kvforge.worker.kernels.packed import PackedOperations
from kvforge.worker.kernels.packed_table import read_from, table_of
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.loading.determinism import make_batch_invariant
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.row_independence import PackedLinear, SteadyLinear, make_rows_steady
from kvforge.worker.loading.weight_bytes import weight_bytes
from tests.worker.loading.test_architectures import ARCHITECTURES

FUSED = ("llama", "llama MQA", "llama yarn", "qwen2", "qwen2 windows", "qwen3", "mistral", "smollm3 without positions")


@pytest.fixture(autouse=True)
def _undescribed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every family through transformers, as those without a description are."""
    monkeypatch.setattr("kvforge.worker.loading.parts.family_of", lambda _module: None)


# Described families run through transformers only where their description fails; without the mark, one for each kind
# of products and norms.
AGAIN = ("qwen3 MoE", "gemma", "gemma3", "granite", "olmo2", "olmo3", "starcoder2", "cohere2", "glm4", "granite_swa")
AGAIN += ("exaone4", "gpt2 inverse scaling", "axk1 larger values")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak] if name in AGAIN else [])
        for name in ARCHITECTURES
        if name not in FUSED
    ],
)
def test_every_architecture_is_steady(name: str, tiny: Callable[..., LoadedModel]) -> None:
    """All architectures that transformers runs."""
    model_type, fields = ARCHITECTURES[name]
    model = tiny(model_type, **fields)
    assert model.fused is None
    assert model.info.determinism == "batch-invariant"
    assert not [part for part in model.module.modules() if type(part) is torch.nn.Linear]


def test_fast_is_what_transformers_has(write_config: Callable[..., Path]) -> None:
    folder = write_config("phi3")
    device = open_device("cpu", steady=False)
    model = load_model(folder, load_format="dummy", dtype="float32", device=device, block_size=4)
    assert model.info.determinism == "fast"
    assert type(model.module.lm_head) is torch.nn.Linear


def test_a_row_that_depends_on_others_is_found_and_nothing_promised(tiny: Callable[..., LoadedModel]) -> None:
    """With 17 tokens, one number of one token is slightly larger."""
    model = tiny("phi3")
    operations = choose_operations(model.device, model.dtype)
    assert make_batch_invariant(model, operations) == ""

    def off(_part: Any, _given: Any, found: torch.Tensor) -> torch.Tensor:
        if found.shape[1] == 17:
            found[0, -1, 0] = torch.nextafter(found[0, -1, 0], torch.tensor(torch.inf))
        return found

    hook = model.module.model.layers[0].self_attn.qkv_proj.register_forward_hook(off)
    problem = make_batch_invariant(model, operations)
    hook.remove()
    assert problem.startswith("the layers of Phi3ForCausalLM are transformers' own: the query of layer ")
    assert "of 17 tokens has other bits" in problem


def test_a_model_that_cannot_be_tried_is_promised_nothing(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise IndexError("no layer 2")

    monkeypatch.setattr("kvforge.worker.loading.trial._run", fail)
    model = tiny("phi3")
    assert model.info.determinism == f"not promised: {model.unsteady}"
    assert model.unsteady.endswith("own: a trial of the layers failed: IndexError: no layer 2")
    assert not model.wants_kinds


def test_all_layers_are_tried_if_one_needs_a_layer_that_was_left_out(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("olmo2", num_hidden_layers=4)
    layers = list(model.module.model.layers)
    ran: set[int] = set()

    def needs_the_second(part: Any, *_: Any) -> None:
        ran.add(id(part))
        if part is layers[0] and len(model.module.model.layers) < 4:
            raise KeyError("the states of layer 1")

    for layer in layers:
        layer.register_forward_hook(needs_the_second)
    assert make_batch_invariant(model, choose_operations(model.device, model.dtype)) == ""
    assert ran == set(map(id, layers))


def test_layers_of_one_kind_are_tried_once(tiny: Callable[..., LoadedModel]) -> None:
    """The results keep the layers' order."""
    model = tiny("olmo2", num_hidden_layers=4)
    before = list(model.module.model.layers)
    ran = []
    for layer in before:
        layer.register_forward_hook(lambda part, *_: ran.append(part))
    assert make_batch_invariant(model, choose_operations(model.device, model.dtype)) == ""
    assert set(map(id, ran)) == {id(before[0])}
    assert list(model.module.model.layers) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_experts_give_what_transformers_do(dtype: torch.dtype) -> None:
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    part = MixtralExperts(config).to(dtype)
    for parameter in part.parameters():
        parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(29, 64, generator=generator).to(dtype)
    weights, chosen = torch.topk(torch.randn(29, 4, generator=generator).softmax(-1), 2)
    wanted = part(x, chosen, weights.to(dtype))
    operations = choose_operations(open_device("cpu"), dtype)
    ours = Experts(part, operations, ExpertMatrices(part.gate_up_proj.detach(), None, part.down_proj.detach(), None))
    got = ours(x, chosen, weights.to(dtype))
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((got - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernels", [False, True])
def test_experts_are_replaced_where_nothing_else_is_steady(
    dtype: torch.dtype, architecture: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU without a grouped torch kernel. Modules of transformers 5.17 lack the last field that is read."""
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    part = MixtralExperts(config).to(dtype)
    vars(part).pop("has_post_expert_norm", None)
    module = torch.nn.Sequential(part)
    gpu: Any = SimpleNamespace(computes_on_cores=False, architecture=(architecture, 1), runs_kernels=kernels)
    make_rows_steady(module, PlainOperations(), gpu)
    part.has_post_expert_norm = False  # the installed transformers reads it
    weights, chosen = torch.full((3, 2), 0.5).to(dtype), torch.tensor([[0, 1], [1, 2], [3, 0]])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    ran = []
    monkeypatch.setattr(Experts, "_all", lambda self, x, *_: ran.append(x) or x)
    with torch.no_grad():
        module[0].forward(x, chosen, weights)
    by_torch = dtype == torch.bfloat16 and architecture in ("sm_90", "sm_100") and not kernels
    assert bool(ran) != by_torch


@pytest.mark.parametrize(("act", "kind"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_the_activation_of_experts_is_found_by_its_results(act: str, kind: str) -> None:
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, hidden_act=act)
    assert find_activation(MixtralExperts(config)) == (Activation(kind), False)


def test_an_unknown_activation_is_not_guessed() -> None:
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, hidden_act="quick_gelu")
    part = MixtralExperts(config)
    assert find_activation(part) == (None, False)
    assert grouped_experts(part, PlainOperations()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_experts_of_gpt_oss_give_what_transformers_do(dtype: torch.dtype) -> None:
    """Transposed weights, biases, and gate and up in turn."""
    config = GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    part = GptOssExperts(config).to(dtype)
    for parameter in part.parameters():
        parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    x = 4 * torch.randn(29, 64, generator=generator).to(dtype)
    weights, chosen = torch.topk(torch.randn(29, 4, generator=generator).softmax(-1), 2)
    wanted = part(x, chosen, weights.to(dtype))
    ours = grouped_experts(part, PlainOperations())
    assert ours is not None and ours.activation is not None
    assert (ours.activation.kind, ours.activation.limit, ours.interleaved) == ("clamped_swiglu", 7.0, True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    got = ours(x, chosen, weights.to(dtype))
    assert float((got - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize("name", ["mixtral", "qwen3 MoE"])
@torch.inference_mode()
def test_a_models_experts_run_as_grouped_products(
    name: str, tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    """The logits stay those of transformers, through the kernels that a GPU would run."""
    knobs = pytest.importorskip("triton").knobs
    if not knobs.runtime.interpret:
        pytest.skip("only under Triton's interpreter")
    from kvforge.worker.kernels.fused import FusedOperations  # imports triton

    model_type, fields = ARCHITECTURES[name]
    model = replace(tiny(model_type, kernels=False, **fields), fused=None)
    sequences, schedule = [torch.arange(3, 24).numpy(), torch.arange(7, 12).numpy()], [[20, 4], [1, 1]]
    wanted = paged_logits(model, sequences, schedule)
    gpu: Any = SimpleNamespace(computes_on_cores=False, runs_kernels=True, architecture=("sm_90", 132))
    make_rows_steady(model.module, FusedOperations(model.device), gpu)
    ran = [part for part in model.module.modules() if isinstance(part.__dict__.get("forward"), Experts)]
    assert ran and all(part.forward.activation is not None for part in ran)
    for got, want in zip(paged_logits(model, sequences, schedule), wanted, strict=True):
        assert float((got - want).abs().max()) <= 1e-4 * float(want.abs().max())


@torch.inference_mode()
def test_an_embedding_of_any_class_reads_a_packed_table() -> None:
    operations = choose_operations(open_device("cpu"), torch.float32)
    if not isinstance(operations, PackedOperations):
        pytest.skip("nothing is packed on this CPU")
    part = Gemma3TextScaledWordEmbedding(100, 64, 0, embed_scale=8.0)
    weight = part.weight.detach().clone()
    table = table_of(operations.pack(weight), weight)
    if table is None:
        pytest.skip("oneDNN lays weights out otherwise on this CPU")
    ids = torch.tensor([[3, 99, 0, 3]])
    wanted = part(ids)
    read_from(part, table)
    assert not list(part.parameters())
    assert torch.equal(part(ids), wanted)
    assert torch.equal(part.state_dict()["weight"], weight)
    assert isinstance(part, Gemma3TextScaledWordEmbedding)


def test_no_weight_is_held_twice(tiny: Callable[..., LoadedModel]) -> None:
    """With a tied head, an untied head, and experts; all weights are counted."""
    for name, tied in (("gemma2", True), ("phi3", False), ("mixtral", False)):
        model_type, fields = ARCHITECTURES[name]
        model = tiny(model_type, **{**fields, "tie_word_embeddings": tied, "vocab_size": 512})
        plain = tiny(model_type, kernels=False, **{**fields, "tie_word_embeddings": tied, "vocab_size": 512})
        numbers = sum(each.numel() for each in plain.module.parameters())
        assert 4 * numbers <= weight_bytes(plain) < 4.2 * numbers
        assert weight_bytes(model) <= 1.25 * weight_bytes(plain), name  # padding of blocks matters in a tiny model
        linears = [part for part in model.module.modules() if isinstance(part, (PackedLinear, SteadyLinear))]
        assert len(linears) > 4
