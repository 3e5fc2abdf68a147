"""Declared families: the described decoder computes transformers' layers, and a wrong declaration is caught."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.attention import AttentionOptions
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels.activations import Activation
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.layer_weights import FusedLayer
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.positions import QueryScale
from kvforge.worker.loading import determinism, families, fusion, load, parts, verification
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.probe import bound_options
from kvforge.worker.loading.row_independence import first_experts
from tests.pairs import every_pair

from .covering import by_parts, check_parts, covering
from .random_models import DESCRIBED, save

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from kvforge.worker.kernels.fused import FusedOperations  # noqa: E402 - it imports triton
from kvforge.worker.kernels.selftest import self_test  # noqa: E402

building = sys.modules["kvforge.worker.loading.build"]  # the package has a function of that name
SCHEDULE = [[5, 1, 2], [5, 0, 3], [1, 0, 1]]
INTERPRETED = [[10, 1, 3], [1, 0, 3]]  # Triton's interpreter is slow: a prompt, a chunk of one, and a decode
LENGTHS = (11, 1, 6)  # longer than the windows
ROUNDING = 2e-5  # of the largest logit, in float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """saved(name, dtype) -> the folder of a described model with random weights, written once."""
    folder = tmp_path_factory.mktemp("described")

    @cache
    def write(name: str, dtype: str) -> Path:
        return save(folder / f"{name} {dtype}".replace(" ", "_"), *DESCRIBED[name], getattr(torch, dtype))

    return write


@pytest.fixture
def loaded(saved: Callable[[str, str], Path], cpu: Device) -> Callable[..., LoadedModel]:
    """loaded(name, kernels=False, dtype="float32") -> a described model with random weights."""

    def load(name: str, kernels: bool = False, dtype: str = "float32") -> LoadedModel:
        device = replace(cpu, kernels=kernels)
        return load_model(saved(name, dtype), device=device, block_size=4, dtype=dtype)

    return load


@pytest.fixture(scope="module")
def is_described(saved: Callable[[str, str], Path], cpu: Device) -> Callable[[str, str], bool]:
    """is_described(name, dtype) -> whether the model loads as described while nothing is wrong, tried once."""

    @cache
    def load(name: str, dtype: str) -> bool:
        return (
            load_model(saved(name, dtype), device=replace(cpu, kernels=False), block_size=4, dtype=dtype).fused
            is not None
        )

    return load


# Those of the covering set are compared by `test_each_part_has_kernels`, which checks their parts too.
FEW = covering(DESCRIBED)


@pytest.mark.usefixtures("quick_loads")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in FEW else []) for name in DESCRIBED]
)
@torch.inference_mode()
def test_a_described_decoder_computes_transformers_layers(
    name: str,
    loaded: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With plain torch. `test_each_part_has_kernels` has kernels too, for each part."""
    monkeypatch.setattr(determinism, "_unsteady", lambda *_: "")  # the rows of packed weights are tried below
    model = loaded(name)
    check_parts(name, model)
    sequences = _sequences(model)
    _assert_near(_wanted(model, sequences, paged_logits), paged_logits(model, sequences, SCHEDULE))


@pytest.mark.usefixtures("quick_loads")
@pytest.mark.parametrize("name", by_parts(list(DESCRIBED)))
@torch.inference_mode()
def test_each_part_has_kernels(
    name: str,
    loaded: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None, the CPU's over packed weights, and Triton's."""
    monkeypatch.setattr("kvforge.worker.kernels.selftest.TOKENS", (1, 20))  # the interpreter is slow
    with monkeypatch.context() as patched:  # they have passed above
        patched.setattr(building, "foresee", lambda _module, _device: ())
        patched.setattr(building, "rehearse", lambda *_: None)
        packed = loaded(name, kernels=True)
        patched.setattr(determinism, "_unsteady", lambda *_: "")
        model = loaded(name)
    assert model.fused is not None and packed.fused is not None
    assert packed.info.determinism == "batch-invariant"
    check_parts(name, model)
    sequences = _sequences(model)
    wanted = _wanted(model, sequences, paged_logits)
    _assert_near(wanted, paged_logits(model, sequences, SCHEDULE))
    _assert_near(wanted, paged_logits(packed, sequences, SCHEDULE))
    if not families.needs_description(model.module):
        _assert_near(wanted, paged_logits(replace(packed, fused=None), sequences, SCHEDULE))
    if knobs.runtime.interpret:
        interpreted = replace(model.fused, operations=FusedOperations(model.device))
        self_test(interpreted, model.device)
        _assert_near(wanted, paged_logits(replace(model, fused=interpreted), sequences, INTERPRETED))


def _sequences(model: LoadedModel) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, model.vocab_size, count) for count in LENGTHS]


def _wanted(model: LoadedModel, sequences: list[Any], paged_logits: Callable[..., list[torch.Tensor]]) -> list[Any]:
    """Return the logits of transformers' layers."""
    if families.needs_description(model.module):
        return verification._eager_logits(model, sequences)
    return paged_logits(replace(model, fused=None), sequences, SCHEDULE)


def _assert_near(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    scale = max(float(want.abs().max()) for want in wanted)
    for got, want in zip(found, wanted, strict=True):
        assert float((got - want).abs().max()) <= ROUNDING * scale


def _unscaled(found: parts.DecoderParts) -> parts.DecoderParts:
    return replace(found, residual_scale=1.0)


def _norms(**changes: Any) -> Callable[[parts.DecoderParts], parts.DecoderParts]:
    def change(found: parts.DecoderParts) -> parts.DecoderParts:
        changed = [
            replace(layer, input_norm=None if layer.input_norm is None else replace(layer.input_norm, **changes))
            for layer in found.layers
        ]
        return replace(found, layers=tuple(changed))

    return change


def _layers(**changes: Any) -> Callable[[parts.DecoderParts], parts.DecoderParts]:
    def change(found: parts.DecoderParts) -> parts.DecoderParts:
        return replace(found, layers=tuple(replace(layer, **changes) for layer in found.layers))

    return change


def _each(change: Callable[[Any], Any]) -> Callable[[parts.DecoderParts], parts.DecoderParts]:
    return lambda found: replace(found, layers=tuple(map(change, found.layers)))


def _without_norm_of_values(layer: Any) -> Any:
    return replace(layer, head_norms=replace(layer.head_norms, value=None))


def _of_second_layer(layer: Any) -> Any:
    return layer if layer.kv_layer is None else replace(layer, kv_layer=1)


def _without_factors(layer: Any) -> Any:
    return replace(layer, beside=replace(layer.beside, mixture=replace(layer.beside.mixture, factors=None)))


def _routed_by_another_norm(layer: Any) -> Any:
    norm = replace(layer.beside.router_norm, epsilon=100.0)
    return replace(layer, beside=replace(layer.beside, router_norm=norm))


def _without_weight_of_queries(layer: Any) -> Any:
    norm = layer.latent.query_norm
    norm = replace(norm, weight=torch.ones_like(norm.weight))
    return replace(layer, latent=replace(layer.latent, query_norm=norm))


def _of_latents(**changes: Any) -> Callable[[parts.DecoderParts], parts.DecoderParts]:
    return _each(lambda layer: replace(layer, latent=replace(layer.latent, **changes)))


def _one_table(found: parts.DecoderParts) -> parts.DecoderParts:
    return replace(found, layers=tuple(replace(layer, rotary=0) for layer in found.layers))


def _family(**changes: Any) -> Callable[[parts.DecoderParts], parts.DecoderParts]:
    def change(found: parts.DecoderParts) -> parts.DecoderParts:
        return replace(found, family=replace(found.family, **changes))

    return change


def _mixtures(**changes: Any) -> Callable[[parts.DecoderParts], parts.DecoderParts]:
    return _of_mixtures(lambda mixture: replace(mixture, **changes))


def _routers(**changes: Any) -> Callable[[parts.DecoderParts], parts.DecoderParts]:
    return _of_mixtures(lambda mixture: replace(mixture, router=replace(mixture.router, **changes)))


def _of_mixtures(change: Callable[[Any], Any]) -> Callable[[parts.DecoderParts], parts.DecoderParts]:
    def changed(found: parts.DecoderParts) -> parts.DecoderParts:
        layers = [
            layer if layer.mixture is None else replace(layer, mixture=change(layer.mixture)) for layer in found.layers
        ]
        return replace(found, layers=tuple(layers))

    return changed


def _scaling_results(mixture: Any) -> Any:
    return replace(mixture, mixture=replace(mixture.mixture, scales_input=False))


# One changed part of each kind: family, change.
PLANTED: dict[str, tuple[str, Callable[[parts.DecoderParts], parts.DecoderParts]]] = {
    "another activation": ("llama", _layers(activation=Activation("relu"))),
    "another factor of xIELU": ("apertus", _layers(activation=Activation("xielu", alpha=0.5, negative=1.0))),
    "no factor of residuals": ("granite", _unscaled),
    "no factor of embeddings": ("granite", _family(embedding_scale="")),
    "no divisor of logits": ("granite", _family(logit_divisor="")),
    "no factor of logits": ("cohere2", _family(logit_scale="")),
    "no cap of logits": ("gemma2", _family(logit_softcap="")),
    "no limit of Q, K and V": ("olmo", _layers(clip=0.0)),
    "a limit of Q, K and V": ("llama", _layers(clip=0.4)),
    "another epsilon of a norm without weight": ("olmo", _norms(epsilon=1.0)),
    "one rotary table for two": ("granite_swa", _one_table),
    "no offset of a norm": ("gemma2", _norms(offset=0.0)),
    "a norm that is not centred": ("cohere2", _norms(centred=False)),
    "no bias of a norm": ("starcoder2", _norms(bias=None)),
    "no norm of attention's result": ("gemma2", _layers(attended_norm=None)),
    "no norm of the feed-forward block's result": ("olmo2", _layers(fed_norm=None)),
    "no norm before the feed-forward block": ("llama", _layers(inner_norm=None)),
    "no norms of heads": ("qwen3", _layers(head_norms=None)),
    "norms of heads before the rotation": ("hunyuan", _family(norms_after_rotation=False)),
    "no rotation": ("llama", _layers(rotary=None)),
    "no factor of queries by position": ("ministral3", _layers(query_scale=None)),
    "another growth of queries": ("ministral3", _layers(query_scale=QueryScale(0.27, 4))),
    "a growth of queries that has none": ("llama", _layers(query_scale=QueryScale(0.1, 24))),
    "rotation in every layer": ("cohere2", _one_table),
    "one rotary table": ("gemma3", _layers(rotary=1)),
    "halves for neighbours": ("glm4", _family(interleaved=False)),
    "blocks in series": ("cohere2", _family(is_parallel=False)),
    "no factor of V": ("mimo_v2_flash", _layers(value_scale=1.0)),
    "no norm of V": ("gemma4", _each(_without_norm_of_values)),
    "K and V of another layer": ("gemma4", _each(_of_second_layer)),
    "no block of the token": ("gemma4", _layers(token_norm=None)),
    "no factor of a layer": ("gemma4", _layers(output_scale=1.0)),
    "no experts beside": ("gemma4 with experts", _layers(beside=None)),
    "no factors of experts": ("gemma4 with experts", _each(_without_factors)),
    "another norm before a router": ("gemma4 with experts", _each(_routed_by_another_norm)),
    "another activation of experts": ("mixtral", _mixtures(activation=Activation("relu"))),
    "no shared experts": ("glm4_moe", _mixtures(is_shared=False)),
    "no bias of the choice": ("minimax_m2", _mixtures(choice_bias=None)),
    "fewer experts": ("qwen3_moe", _routers(chosen=2)),
    "weights that are not normalised": ("qwen3_moe", _routers(normalises=False)),
    "weights that are normalised": ("qwen2_moe", _routers(normalises=True)),
    "another function of scores": ("minimax_m2", _routers(scores="softmax")),
    "no factor of a router": ("glm4_moe", _routers(scaling=1.0)),
    "a factor of results, not of inputs": ("llama4", _of_mixtures(_scaling_results)),
    "no factor of queries without rotation": ("llama4", _layers(query_scale=None)),
    "no groups of experts": ("glm4_moe", _routers(groups=1)),
    "groups by their best two": ("deepseek_v2", _routers(group_best=2)),
    "no norm of latents": ("deepseek_v3", _of_latents(latent_norm=None)),
    "halves for neighbours of latents": ("deepseek_v3", _of_latents(interleaved=False)),
    "another norm of the latents of queries": ("deepseek_v2", _each(_without_weight_of_queries)),
}


# The changes that escape when the tolerance for 16 bits is tripled, and one each of latents, experts and heads. A check
# of 16 bits that is too weak misses these first; the other changes in 16 bits are soak tests.
IN_16_BITS = (
    "another factor of xIELU",
    "another norm of the latents of queries",
    "another activation of experts",
    "weights that are normalised",
    "weights that are not normalised",
    "a factor of results, not of inputs",
    "one rotary table",
    "one rotary table for two",
    "rotation in every layer",
    "no norm of latents",
    "no factors of experts",
    "norms of heads before the rotation",
)


@pytest.fixture
def plant(
    loaded: Callable[..., LoadedModel],
    is_described: Callable[[str, str], bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Callable[[str, str], None]:
    """plant(change, dtype): check that a model with the changed part is not served as described."""

    def check(what: str, dtype: str) -> None:
        assert_caught(what, dtype, loaded, is_described, monkeypatch, caplog)

    return check


# In float32 the check is a hundred times as strict: a sixth of the changes, and the others in soak tests.
IN_32_BITS = tuple(PLANTED)[::6]


@pytest.mark.parametrize(
    ("what", "dtype"), [*((what, "float32") for what in IN_32_BITS), *((what, "bfloat16") for what in IN_16_BITS)]
)
def test_a_wrong_part_is_caught_at_load(what: str, dtype: str, plant: Callable[[str, str], None]) -> None:
    plant(what, dtype)


@pytest.mark.parametrize("what", [what for what in PLANTED if what not in IN_32_BITS])
def test_any_other_wrong_part_is_caught_in_32_bits(what: str, plant: Callable[[str, str], None]) -> None:
    plant(what, "float32")


@pytest.mark.parametrize("what", [what for what in PLANTED if what not in IN_16_BITS])
def test_any_other_wrong_part_is_caught_in_16_bits(what: str, plant: Callable[[str, str], None]) -> None:
    plant(what, "bfloat16")


def assert_caught(
    what: str,
    dtype: str,
    loaded: Callable[..., LoadedModel],
    is_described: Callable[[str, str], bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name, change = PLANTED[what]
    find = parts.parts_of
    # The checks before the weights are read, and that of rows alone and in company, run in
    # test_a_described_decoder_computes_transformers_layers and test_each_part_has_kernels.
    monkeypatch.setattr(building, "foresee", lambda _module, _device: ())
    monkeypatch.setattr(building, "rehearse", lambda *_: None)
    monkeypatch.setattr(determinism, "_unsteady", lambda *_: "")

    def planted(module: Any) -> parts.DecoderParts | None:
        found = find(module)
        assert found is not None
        changed = change(found)
        if changed.family.norms_after_rotation != found.family.norms_after_rotation:
            layers = [replace(each, head_norms=replace(each.head_norms, after_rotation=False)) for each in found.layers]  # type: ignore[type-var]
            changed = replace(changed, layers=tuple(layers))
        return changed  # if it changed nothing, the model would be described below

    assert dtype == "float32" or is_described(name, dtype)  # in float32 these tests find it described too
    monkeypatch.setattr(fusion, "parts_of", planted)
    if name.startswith(("llama4", "deepseek")):  # transformers' layers cannot take its place
        with pytest.raises(UnsupportedModel, match=r"logits|paged attention"):
            loaded(name, dtype=dtype)
        return
    assert loaded(name, dtype=dtype).fused is None
    assert "running its layers one operation at a time" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_of_scores_without_yarns_factor_is_refused(
    dtype: str, loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' attention modules multiply their scale by the square of yarn's `mscale`."""

    def unscaled(module: Any) -> tuple[AttentionOptions, ...]:
        size = module.config.qk_nope_head_dim + module.config.qk_rope_head_dim
        found = bound_options(module)
        assert all(options.scaling > 1.1 * size**-0.5 for options in found)
        return tuple(replace(options, scaling=size**-0.5) for options in found)

    monkeypatch.setattr(load, "bound_options", unscaled)
    with pytest.raises(UnsupportedModel, match=r"logits|paged attention"):
        loaded("deepseek_v3", dtype=dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    every_pair(["qwen3_moe", "glm4_moe", "gemma3", "cohere2", "deepseek_v3"], ["float16", "bfloat16"]),
)
def test_in_float32_a_description_of_16_bits_is_exact(
    name: str, dtype: str, loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router with close scores may choose other experts in 16 bits: then only float32 tells right from wrong."""
    model = loaded(name, dtype=dtype)
    assert model.fused is not None
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, count) for count in verification.LENGTHS]
    exact = verification._exact_logits(model, sequences)
    assert verification._right_in_float32(model, sequences, exact)
    wrong = replace(model, fused=replace(model.fused, embedding_scale=1.05 * model.fused.embedding_scale))
    assert not verification._right_in_float32(wrong, sequences, exact)


def test_a_name_that_is_missing_leaves_the_model_to_transformers(
    loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "worker")
    changed = replace(families.FAMILIES["qwen3.Qwen3ForCausalLM"], inner_norm="second_norm")
    monkeypatch.setitem(families.FAMILIES, "qwen3.Qwen3ForCausalLM", changed)
    assert loaded("qwen3").fused is None
    assert "Qwen3ForCausalLM runs through transformers" in caplog.text and "second_norm" in caplog.text


def test_layers_with_the_same_k_and_v_share_their_memory(loaded: Callable[..., LoadedModel]) -> None:
    shapes = loaded("gemma4").geometry.layers
    assert [each.shared_with for each in shapes] == [None, None, None, 2]
    assert all(each.shared_with is None for each in loaded("gemma3").geometry.layers)


@pytest.mark.parametrize(
    ("name", "layers"), every_pair(["llama", "cohere", "gemma3", "gemma4", "olmo2", "deepseek_v3"], [1, 3])
)
def test_writing_alone_stores_the_k_and_v_of_a_whole_pass(
    name: str, layers: int, loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer with K and V of its own neither attends nor feeds."""
    model, attended = loaded(name), list[FusedLayer]()
    fused = model.fused
    assert fused is not None
    if layers == 1 and fused.token_inputs is None:
        fused = replace(fused, layers=fused.layers[:1])
    attend = FusedDecoder._attend

    def watched(self: FusedDecoder, layer: FusedLayer, *rest: Any) -> torch.Tensor:
        attended.append(layer)
        return attend(self, layer, *rest)

    monkeypatch.setattr(FusedDecoder, "_attend", watched)
    starts, counts = np.array([0, 0, 6], np.int32), np.array([7, 1, 1], np.int32)
    stored, calls = list[list[torch.Tensor]](), list[int]()
    with torch.inference_mode():
        for write in (FusedDecoder.hidden, FusedDecoder.write):
            pool = KvPool(model.geometry, 8, model.device)
            for tensor in pool.tensors():
                tensor.zero_()
            batch = pool.batch(np.arange(6, dtype=np.int32).reshape(3, 2), starts, counts, counts == 1)
            positions = torch.cat(
                [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
            )
            attended.clear()
            write(fused, torch.arange(5, 14), positions, batch, pool)
            stored.append([tensor.clone() for tensor in pool.tensors()])
            calls.append(len(attended))
    assert all(torch.equal(one, other) for one, other in zip(*stored, strict=True))
    assert any(tensor.any() for tensor in stored[0])
    shared = sum(layer.kv_layer is not None for layer in fused.layers)
    assert calls == [len(fused.layers), len(fused.layers) - 1 - shared]


@pytest.mark.parametrize("name", ["llama4", "gemma4 with experts", "mixtral", "llama"])
def test_the_kernels_of_experts_are_checked_at_start(name: str, loaded: Callable[..., LoadedModel]) -> None:
    model = loaded(name)
    assert model.fused is not None
    mixture = next(filter(None, (each.mixture for each in model.fused.layers)), None)
    experts = first_experts(model.module, PlainOperations(), model.fused)
    assert (experts is None) == (mixture is None) == (name == "llama")
    if experts is not None and mixture is not None:
        pairs = ((experts.matrices.up, mixture.matrices.up), (experts.matrices.down, mixture.matrices.down))
        assert all(torch.equal(one, other) for one, other in pairs)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DESCRIBED)
def test_a_described_decoder_serves_on_a_gpu(name: str, dtype: str, tmp_path: Path) -> None:
    """Loading compares its logits with transformers' own, and its rows with other numbers of rows."""
    folder = save(tmp_path / "model", *DESCRIBED[name], getattr(torch, dtype))
    model = load_model(folder, device=open_device("cuda"), block_size=16, dtype=dtype)
    assert model.fused is not None
    assert model.info.determinism == "batch-invariant"
