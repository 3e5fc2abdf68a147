"""Models with recurrent states beside attention: their logits, tokens and bits, against transformers' own.

Weights are random and tiny. Sequences are longer than a chunk of every family, and end before, at and behind its
border. The two forms of a state's layers, for chunks and for single tokens, differ by more than other roundings. Logits
are therefore compared with those that transformers' own cache gives for the same chunks.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvforge.protocol.errors import InvalidConfiguration, KernelError, UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import cpu_prompts
from kvforge.worker.kernels.cpu_operations import CpuOperations
from kvforge.worker.kernels.layer_weights import NO_FACTORS, LayerFactors
from kvforge.worker.loading import determinism, families, mixer_steps, mixers, probe, trial, verification
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.mixers import MIXING, mixers_of
from kvforge.worker.loading.model import ATTENTION_NAME, LoadedModel, use_attention
from kvforge.worker.loading.rope import context_tokens
from kvforge.worker.loading.row_cache import RowCache
from kvforge.worker.loading.serving_kernels import serving_kernels
from kvforge.worker.loading.trial import LADDER, OFFSET, SINGLES, unsteady_mixers
from kvforge.worker.loading.verification import verify
from tests.pairs import every_pair

from .cached_logits import cached_logits
from .covering import HYBRID, MIXER, by_parts, check_parts, covering
from .random_models import HYBRIDS, NEEDS_CACHE, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*"),
    NEEDS_CACHE,
]
CHUNKS = dict.fromkeys(("falcon_mamba", "jamba", "mamba", "recurrent_gemma"), 1)
CHUNKS |= dict.fromkeys(("bamba", "falcon_h1", "granite", "mamba2"), 16)  # 64 in the others
CHUNKS |= dict.fromkeys([name for name in HYBRIDS if name.startswith("nemotron_h")], 16)
DESCRIBED = (
    "bamba",
    "falcon_h1",
    "granite",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "nemotron_h with experts",
    "nemotron_h with latent experts",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "recurrent_gemma",
)
NEMOTRON = "nemotron_h.NemotronHForCausalLM"
NEMOTRON_EXPERTS = families.FAMILIES[NEMOTRON].mixture
assert NEMOTRON_EXPERTS is not None
FEW = covering(list(HYBRIDS), HYBRID)
LONGEST_CHUNK, SHORTEST_UNIT = 64, 16  # 16: two blocks, and longer than a window
# With kernels for generated tokens.
STEPPING = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granite",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "nemotron_h with experts",
    "nemotron_h with latent experts",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "recurrent_gemma",
)
# Of the largest logit, in float32. Described models add in other orders than transformers. Some positions magnify any
# rounding: with Qwen3-Next's random weights logits change by up to 5e-4 if each weight changes by 6e-8, and both
# transformers' float32 and the described layers are 3e-4 from float64 there.
ROUNDING, MAGNIFIED, MAGNIFIED_SHARE = 2e-5, 1e-3, 0.1
LIMITED = ("nemotron_h",)  # described families with limits of the time steps of prompts


@pytest.fixture(autouse=True)
def _unsteady_rows_are_sought_once(
    request: pytest.FixtureRequest, quick_loads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skip the trial of rows alone and in company, seconds of each load, but in `test_logits_and_bits`."""
    if request.function is not test_logits_and_bits:
        monkeypatch.setattr(determinism, "_unsteady", lambda *_: "")


def test_a_file_is_parsed_once_for_all_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` parses it again for each class, which took a quarter of the load of a small model."""
    from transformers.models.jamba import modeling_jamba as module

    source, parse = inspect.getsource(module), ast.parse
    parsed: list[str] = []

    def noted(code: str) -> ast.Module:
        parsed.append(code)
        return parse(code)

    monkeypatch.setattr(ast, "parse", noted)
    mixers._classes_in.cache_clear()
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
    keep = [kind.__name__ for kind in kinds if mixers._keeps_state(kind)]
    assert (keep, parsed) == (["JambaMambaMixer"], [source])
    monkeypatch.undo()
    mixer, decoder = (inspect.getsource(vars(module)[name]) for name in ("JambaMambaMixer", "JambaMambaDecoderLayer"))
    assert mixer.endswith(mixers._classes_in(source)["JambaMambaMixer"])
    assert decoder.endswith(mixers._classes_in(source)["JambaMambaDecoderLayer"])


def units() -> list[Any]:
    """Return the families with the lengths of their sequences: what they are counted in, and what the first has more.

    Those outside of the covering set are soak tests; `test_each_family_is_described` loads them in `make test`.

    They are counted in chunks of the family, at least of a block. Kernels that go token by token have chunks of their
    own, the longest ones, and so the first sequence goes on behind one of these. The soak tests have the longest
    chunks and nothing more.
    """
    found = []
    for name in HYBRIDS:
        chunk = CHUNKS.get(name, LONGEST_CHUNK)
        unit = max(chunk, SHORTEST_UNIT)
        marks = [] if name in FEW else [pytest.mark.soak]
        found.append(pytest.param(name, unit, LONGEST_CHUNK - unit if chunk == 1 else 0, id=name, marks=marks))
    longer = [pytest.param(name, LONGEST_CHUNK, 0, id=f"{name}-long", marks=pytest.mark.soak) for name in CHUNKS]
    return found + longer


def schedules_of(unit: int, more: int, limited: bool = False) -> dict[str, list[list[int]]]:
    """Return the tokens of each pass for sequences of 2 x unit - 1 + more, 1, unit + 2 and unit tokens.

    limited: Time steps of prompts have limits. transformers does not apply them to a chunk of one token, so that none
    may be cut off, where ours apply them to all prompt tokens.
    """
    most, first = unit - 4, 6 if limited else 5
    return {
        "at once": [[2 * unit - 1 + more, 1, unit + 2, unit]],
        "chunks with decodes": [
            [first, 1, 2, 1],
            [most + more, 0, most + 2, 1],
            [1, 0, 1, most],
            [1, 0, 1, 1],
            [most + 5 - first, 0, 0, 1],
        ],
    }


def checked(name: str, tiny: Callable[..., LoadedModel]) -> LoadedModel:
    """Return a model after a check of its parts."""
    model_type, fields = HYBRIDS[name]
    model = tiny(model_type, block_size=16, **fields)
    assert model.wants_kinds and model.geometry.state_blocks > 0
    assert model.prompt_chunk == CHUNKS.get(name, 64)
    assert (model.fused is not None) == (name in DESCRIBED)
    check_parts(HYBRID + name, model)
    return model


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name not in FEW])
def test_each_family_is_described(name: str, tiny: Callable[..., LoadedModel]) -> None:
    """Loading compares the logits of a few tokens with transformers'."""
    checked(name, tiny)


@pytest.mark.parametrize(("name", "unit", "more"), units())
def test_logits_and_bits(
    name: str, unit: int, more: int, tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    """Logits are transformers' own in any schedule, and have the same bits if prompts are cut at borders of chunks."""
    model = checked(name, tiny)
    assert model.info.determinism == "batch-invariant"
    rng = np.random.default_rng(3)
    schedules = schedules_of(unit, more, name in LIMITED)
    sequences = [rng.integers(0, model.vocab_size, count) for count in schedules["at once"][0]]
    for schedule in schedules.values():
        found = paged_logits(model, sequences, schedule)
        for row, (got, sequence) in enumerate(zip(found, sequences, strict=True)):
            want = cached_logits(model, sequence, [counts[row] for counts in schedule])
            scale = float(want.abs().max())
            assert scale > 0.01
            apart = (got - want).abs().amax(1) / scale
            if name in DESCRIBED:
                assert int((apart > ROUNDING).sum()) <= MAGNIFIED_SHARE * len(apart) and float(apart.max()) <= MAGNIFIED
            else:
                assert float(apart.max()) <= ROUNDING
    alone = [paged_logits(model, [sequence], [[len(sequence)]])[0] for sequence in sequences]
    chunked = paged_logits(model, sequences, [[unit + more, 0, 0, unit], [0, 1, unit, 0], [unit - 1, 0, 2, 0]])
    for got, want in zip(chunked, alone, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("bamba", {"attn_layer_indices": []}),
        ("granite", {"layer_types": 3 * ["mamba"]}),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": 2 * ["conv"]}),
        ("qwen3_5", {"num_hidden_layers": 2, "layer_types": 2 * ["linear_attention"]}),
    ],
)
def test_a_family_without_layers_that_attend_runs_through_transformers(
    name: str,
    without: dict[str, Any],
    tiny: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model_type, fields = HYBRIDS[name]
    with caplog.at_level("INFO"):
        model = tiny(model_type, block_size=16, **{**fields, **without})
    assert model.fused is None
    assert "runs through transformers: none of its layers attends" in caplog.text
    sequence = np.random.default_rng(3).integers(0, model.vocab_size, 70)
    (found,) = paged_logits(model, [sequence], [[66], [1], [3]])
    with torch.inference_mode():  # without transformers' cache, which asks a layer that attends for its length
        want = model.module(input_ids=torch.as_tensor(sequence)[None], use_cache=False).logits[0].float()
    torch.testing.assert_close(found, want, rtol=0, atol=ROUNDING * float(want.abs().max()))


@pytest.mark.parametrize(
    ("name", "kind", "changed"),
    [
        ("qwen3_next", "qwen3_next.Qwen3NextForCausalLM", {"rotary": lambda _decoder, _layer: None}),
        ("lfm2", "lfm2.Lfm2ForCausalLM", {"inner_norm": ""}),
        ("lfm2", "lfm2.Lfm2ForCausalLM", {"activation": "gelu"}),
        ("bamba", "bamba.BambaForCausalLM", {"is_parallel": True}),
        ("minimax", "minimax.MiniMaxForCausalLM", {"normed_residual": lambda _layer: None}),
        ("minimax", "minimax.MiniMaxForCausalLM", {"factors": lambda _layer: NO_FACTORS}),
        ("recurrent_gemma", "recurrent_gemma.RecurrentGemmaForCausalLM", {"embedding_factor": ""}),
        ("recurrent_gemma", "recurrent_gemma.RecurrentGemmaForCausalLM", {"rotary": lambda _decoder, _layer: None}),
    ],
)
def test_a_wrong_declaration_is_refused(
    name: str,
    kind: str,
    changed: dict[str, Any],
    tiny: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model then runs through transformers' layers."""
    monkeypatch.setitem(families.FAMILIES, kind, replace(families.FAMILIES[kind], **changed))
    model_type, fields = HYBRIDS[name]
    assert tiny(model_type, block_size=16, **fields).fused is None


def test_each_factor_of_a_layer_counts(tiny: Callable[..., LoadedModel]) -> None:
    """Of Falcon-H1."""
    model_type, fields = HYBRIDS["falcon_h1"]
    model = tiny(model_type, block_size=16, **fields)
    assert model.fused is not None
    verify(model)
    for name in vars(LayerFactors()):
        layers = []
        for layer in model.fused.layers:
            assert getattr(layer.factors, name) != 1.0
            feed = replace(layer.feed, gate_factor=1.0) if name == "gate" else layer.feed
            layers.append(replace(layer, factors=replace(layer.factors, **{name: 1.0}), feed=feed))
        with pytest.raises(UnsupportedModel, match="differs from transformers' own"):
            verify(replace(model, fused=replace(model.fused, layers=tuple(layers))))


def test_a_wrong_description_of_a_step_is_refused(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = mixer_steps.STEPS["lfm2.Lfm2ShortConv"]

    def reversed_taps(mixer: Any) -> Any:
        step: Any = describe(mixer)
        return replace(step, convolution=replace(step.convolution, weight=step.convolution.weight.flip(1)))

    monkeypatch.setitem(mixer_steps.STEPS, "lfm2.Lfm2ShortConv", reversed_taps)
    model_type, fields = HYBRIDS["lfm2"]
    assert tiny(model_type, block_size=16, **fields).fused is None


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "silu"},
        {"mixture": replace(NEMOTRON_EXPERTS, shared="")},
    ],
    ids=["activation", "shared experts"],
)
def test_a_wrong_description_of_single_blocks_is_found_at_load(
    change: dict[str, Any], tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.FAMILIES, NEMOTRON, replace(families.FAMILIES[NEMOTRON], **change))
    model_type, fields = HYBRIDS["nemotron_h with latent experts"]
    assert tiny(model_type, block_size=16, **fields).fused is None


def test_a_decoder_that_is_not_described_steps_as_described_or_row_by_row(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, fields = HYBRIDS["mamba2"]
    assert len(tiny(model_type, block_size=16, **fields).context.steps) == 2
    with monkeypatch.context() as patched:
        describe = mixer_steps._mamba_2

        def without_skips(mixer: Any) -> Any:
            step: Any = describe(mixer)
            return replace(step, space=replace(step.space, skips=torch.zeros_like(step.space.skips)))

        patched.setitem(mixer_steps.STEPS, "mamba2.Mamba2Mixer", without_skips)
        assert tiny(model_type, block_size=16, **fields).context.steps == {}
    monkeypatch.setattr(CpuOperations, "advance_state_space", lambda _self, inputs, *_: inputs.gate.clone())
    with pytest.raises(KernelError, match="the state space kernel is wrong"):
        tiny(model_type, block_size=16, **fields)


@pytest.mark.usefixtures("alike_loads")
@pytest.mark.parametrize("name", by_parts(STEPPING, HYBRID, MIXER))
def test_generated_tokens_of_all_rows_are_computed_together(
    name: str,
    tiny: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside prompts too; their chunks run through transformers' module."""
    model_type, fields = HYBRIDS[name]
    model, calls = tiny(model_type, block_size=16, **fields), list[int]()
    operations = type(model.context.operations if model.fused is None else model.fused.operations)
    name = "advance_state_space" if name == "minimax" else "convolve"  # an operation of each layer
    run = getattr(operations, name)

    def noted(self: Any, x: Any, *given: Any) -> torch.Tensor:
        calls.append(len(getattr(x, "mixed", x)))
        found: torch.Tensor = run(self, x, *given)
        return found

    monkeypatch.setattr(operations, name, noted)
    layers = len({tensor.layer for tensor in model.geometry.states})
    sequences = [list(range(9)), list(range(70)), [5, 6, 7]]
    paged_logits(model, sequences, [[8, 65, 2]])
    assert calls == []
    paged_logits(model, sequences, [[8, 65, 2], [1, 5, 1]])
    assert calls == [2] * layers


def test_hybrids_are_not_quantised_at_load(tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their packed forms were not tried on a chip that multiplies in 8 bits."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    model_type, fields = HYBRIDS["lfm2"]
    with pytest.raises(InvalidConfiguration, match="layers with a recurrent state, and such models are not quantised"):
        tiny(model_type, block_size=16, weight_dtype="int8", **fields)


def test_a_mixer_that_depends_on_other_rows_is_found(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, fields = HYBRIDS["lfm2"]
    model = tiny(model_type, block_size=16, **fields)
    assert model.fused is not None and unsteady_mixers(model) == ""
    part = mixers_of(model.module)[0]
    forward = part.forward
    monkeypatch.setattr(part, "forward", lambda hidden: forward(hidden) * (1 + 1e-6 * hidden.shape[1]))
    assert "Lfm2ShortConv of 1 tokens has other bits" in unsteady_mixers(model)


def test_a_projection_that_depends_on_other_rows_is_found(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, fields = HYBRIDS["lfm2"]
    model = tiny(model_type, block_size=16, **fields)
    project = mixers_of(model.module)[0].in_proj.forward
    for wrong in (1, 3, 129):  # in batches of so many tokens alone

        def planted(hidden: torch.Tensor, wrong: int = wrong) -> torch.Tensor:
            return project(hidden) * (1 + 1e-6 * (hidden.shape[1] == wrong))

        monkeypatch.setattr(mixers_of(model.module)[0].in_proj, "forward", planted)
        assert f"Lfm2ShortConv of {wrong} tokens has other bits" in unsteady_mixers(model)


def test_the_trial_mixes_a_token_of_many_batches_once_and_single_ones_each_time(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 844 tokens in 45 batches; a rest that depends on anything but its token is seen in batches of one."""
    model_type, fields = HYBRIDS["lfm2"]
    model, mixed = tiny(model_type, block_size=16, **fields), list[int]()
    run = mixers._mixed_behind_zeros
    factor = [0.0]

    def counted(*given: Any) -> torch.Tensor:
        mixed.append(1)
        return run(*given) * (1 + factor[0] * len(mixed))

    monkeypatch.setattr(mixers, "_mixed_behind_zeros", counted)
    monkeypatch.setattr(trial, "SINGLES", SINGLES)  # as in a load that serves
    assert unsteady_mixers(model) == ""
    batches = [*(range(first, first + 1) for first in range(SINGLES))]
    batches += [range(first, first + count) for count in LADDER[1:] for first in (0, OFFSET)]
    assert sum(map(len, batches)) + max(LADDER) + OFFSET == 844
    assert len(mixed) == max(LADDER) + OFFSET + SINGLES == 190
    factor[0] = 1e-6
    assert "Lfm2ShortConv of 1 tokens has other bits" in unsteady_mixers(model)


def test_wrong_decays_of_lightning_attention_are_refused(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = mixer_steps.STEPS["minimax.MiniMaxLightningAttention"]

    def of_other_heads(mixer: Any) -> Any:
        step: Any = describe(mixer)
        return replace(step, space=replace(step.space, rates=step.space.rates.flip(0)))

    monkeypatch.setitem(mixer_steps.STEPS, "minimax.MiniMaxLightningAttention", of_other_heads)
    model_type, fields = HYBRIDS["minimax"]
    assert tiny(model_type, block_size=16, **fields).fused is None


def test_decays_of_lightning_attention_are_exact_in_16_bits(tiny: Callable[..., LoadedModel]) -> None:
    """The model has the slopes in its dtype. Others than the published ones stay as they are."""
    model_type, fields = HYBRIDS["minimax"]
    mixer = mixers_of(tiny(model_type, block_size=16, dtype="bfloat16", **fields).module)[0]
    rates = -mixer.get_slope_rate().flatten()
    step: Any = mixer_steps.step_of(mixer)
    assert torch.equal(step.space.rates, rates) and not torch.equal(mixer.slope_rate.float().flatten(), -rates)
    mixer.slope_rate.mul_(2)
    step = mixer_steps.step_of(mixer)
    assert torch.equal(step.space.rates, -mixer.slope_rate.float().flatten())


def test_wrong_gates_of_a_recurrent_unit_are_refused(
    tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own random weights open all gates alike."""
    name = "recurrent_gemma.RecurrentGemmaRecurrentBlock"
    describe = mixer_steps.STEPS[name]

    def exchanged(mixer: Any) -> Any:
        step: Any = describe(mixer)
        return replace(step, gates=torch.cat(step.gates.chunk(2, dim=2)[::-1], dim=2))

    folder = save(tmp_path / "model", *HYBRIDS["recurrent_gemma"])
    assert load_model(folder, device=cpu, block_size=16).fused is not None
    monkeypatch.setitem(mixer_steps.STEPS, name, exchanged)
    assert load_model(folder, device=cpu, block_size=16).fused is None


def test_minimax_begins_with_layers_of_lightning_attention(
    tiny: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
    eager_logits: Callable[..., torch.Tensor],
) -> None:
    """As the published models do; transformers' cache then counts no tokens. Longer than a block of transformers'."""
    fields = {**HYBRIDS["minimax"][1], "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    model = tiny("minimax", block_size=16, max_position_embeddings=512, **fields)
    assert model.fused is not None
    sequence = np.random.default_rng(3).integers(0, model.vocab_size, 300)
    want = eager_logits(model, sequence)
    for schedule in ([[300]], [[128], [130], [1], [41]]):
        apart = (paged_logits(model, [sequence], schedule)[0] - want).abs().amax(1) / want.abs().max()
        assert int((apart > ROUNDING).sum()) <= MAGNIFIED_SHARE * len(apart) and float(apart.max()) <= MAGNIFIED


@pytest.mark.usefixtures("alike_loads")
@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "recurrent_gemma",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("minimax", "qwen3_next", "granite")),
    ],
)
def test_greedy_tokens_are_those_of_generate(
    name: str, tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    model_type, fields = HYBRIDS[name]
    model = tiny(model_type, block_size=16, **fields)
    prompt = np.random.default_rng(5).integers(3, model.vocab_size, 70)
    use_attention(model.module, "eager")
    whole = model.module.generate(
        torch.as_tensor(prompt)[None], max_new_tokens=12, do_sample=False, use_cache=True, eos_token_id=None
    )[0].numpy()
    use_attention(model.module, ATTENTION_NAME)
    logits = paged_logits(model, [whole[:-1]], [[70], *[[1]] * 11])[0]
    assert logits[69:].argmax(-1).tolist() == whole[70:].tolist()


@pytest.mark.parametrize("name", by_parts(list(HYBRIDS), HYBRID, MIXER))
def test_states_in_bfloat16(
    name: str, tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    check_states_in_16_bits(name, "bfloat16", tiny, paged_logits)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("jamba", marks=pytest.mark.soak)])
def test_states_in_float16(
    name: str, tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    check_states_in_16_bits(name, "float16", tiny, paged_logits)


def with_all_experts(name: str) -> tuple[str, dict[str, Any]]:
    """Return a model of `HYBRIDS`. Random routers of Kimi Linear would choose other experts after another rounding."""
    model_type, fields = HYBRIDS[name]
    every = {"num_experts_per_tok": fields["num_local_experts"]} if name == "kimi_linear" else {}
    return model_type, fields | every


def check_states_in_16_bits(
    name: str, dtype: str, tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    """A convolution keeps its inputs in the model's dtype, and transformers computes the others' states in float32."""
    model_type, fields = with_all_experts(name)
    model = tiny(model_type, block_size=16, dtype=dtype, **fields)
    for tensor in model.geometry.states:
        assert tensor.dtype == (getattr(torch, dtype) if tensor.name == "conv 0" else torch.float32)
    sequence = np.random.default_rng(5).integers(0, model.vocab_size, 70)
    assert torch.equal(paged_logits(model, [sequence], [[70]])[0], paged_logits(model, [sequence], [[64], [6]])[0])


@pytest.mark.usefixtures("alike_loads")
@pytest.mark.parametrize(
    ("name", "state_dtype", "allowed"),
    every_pair(
        ["kimi_linear", "mamba2", "minimax", "qwen3_5", "recurrent_gemma"], [("bfloat16", 0.05), ("float16", 0.01)]
    ),
)
def test_states_kept_in_16_bits(
    name: str,
    state_dtype: str,
    allowed: float,
    tiny: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    """Half of the memory, other tokens and so another fingerprint; bits do not depend on the schedule."""
    model_type, fields = with_all_experts(name)
    wide, model = (tiny(model_type, block_size=16, state_dtype=each, **fields) for each in ("float32", state_dtype))
    assert (wide.info.state_dtype, model.info.state_dtype) == ("float32", state_dtype)
    assert wide.info.fingerprint != model.info.fingerprint
    sizes = [sum(each.nbytes for each in of.geometry.states if "rec" in each.name) for of in (wide, model)]
    assert sizes[0] == 2 * sizes[1]
    sequence = np.random.default_rng(5).integers(0, model.vocab_size, 90)
    want = paged_logits(wide, [sequence], [[88], [1], [1]])[0]
    found = [paged_logits(model, [sequence], schedule)[0] for schedule in ([[88], [1], [1]], [[64], [24], [1], [1]])]
    assert torch.equal(*found)
    assert 0 < float((found[0] - want).abs().max()) <= allowed * float(want.abs().max())


@pytest.mark.usefixtures("alike_loads")
@pytest.mark.parametrize(
    ("name", "kv_dtype", "allowed"), every_pair(["lfm2", "jamba", "kimi_linear"], [("int8", 0.02), ("fp8", 0.1)])
)
def test_keys_and_values_of_8_bits_beside_states(
    name: str,
    kv_dtype: str,
    allowed: float,
    tiny: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    """Quantising K and V rounds the logits, as in a model without states, and leaves the states alone."""
    model_type, fields = HYBRIDS[name]
    model = tiny(model_type, block_size=16, **fields)
    quantised = tiny(model_type, block_size=16, kv_dtype=kv_dtype, **fields)
    assert quantised.geometry.bytes_per_block < model.geometry.bytes_per_block / 2
    assert quantised.geometry.state_blocks >= model.geometry.state_blocks
    sequence = np.random.default_rng(5).integers(0, model.vocab_size, 70)
    want = paged_logits(model, [sequence], [[70]])[0]
    found = [paged_logits(quantised, [sequence], schedule)[0] for schedule in ([[70]], [[64], [6]])]
    assert torch.equal(*found)
    assert 0 < float((found[0] - want).abs().max()) <= allowed * float(want.abs().max())


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_a_state_without_attention_is_divided_into_few_pages(block_size: int, tiny: Callable[..., LoadedModel]) -> None:
    """A block of tokens takes a page, so that pages must be small beside a state, but not too many."""
    sizes = {"num_heads": 32, "head_dim": 64, "state_size": 128, "chunk_size": 16, "expand": 32}
    model = tiny("mamba2", block_size=block_size, n_groups=1, **sizes)
    assert (model.info.kv_layout, model.geometry.kv_dtype) == ("states", "float32")
    assert 200 <= model.geometry.state_blocks <= 280
    assert serving_kernels(model)["decode"] == serving_kernels(model)["prefill"] == "no layer attends"


def test_a_model_without_positions_has_no_context_length_of_its_own() -> None:
    config = transformers.AutoConfig.for_model("mamba2")
    assert context_tokens(config, 0) == 1 << 17
    assert context_tokens(config, 1 << 20) == 1 << 20
    with pytest.raises(InvalidConfiguration, match="no layer of its attends to all tokens"):
        context_tokens(config, 1 << 31)
    attends = transformers.PretrainedConfig(layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedModel, match="no max_position_embeddings"):
        context_tokens(attends, 0)


@pytest.mark.parametrize(
    ("name", "kernels", "wanted"),
    [
        ("kimi_linear", True, "generated tokens: Numba, all rows together; prompts: Numba, token by token; 2 layers"),
        ("olmo_hybrid", True, "transformers' own: 3 layers, one row after the other"),
        ("jamba", True, "generated tokens: Numba, all rows together; prompts: Numba, token by token; 2 layers"),
        ("nemotron_h", True, "generated tokens: Numba, all rows together; prompts: Numba, token by token; 2 layers"),
        ("lfm2", True, "generated tokens: Numba, all rows together; prompts: Numba, token by token; 2 layers"),
        ("lfm2", False, "generated tokens: plain torch, all rows together; prompts: transformers' own; 2 layers"),
    ],
)
def test_the_kernels_of_states_are_named(
    name: str, kernels: bool, wanted: str, tiny: Callable[..., LoadedModel]
) -> None:
    model_type, fields = HYBRIDS[name]
    assert serving_kernels(tiny(model_type, block_size=16, kernels=kernels, **fields))["states"] == wanted


@pytest.mark.parametrize("kernels", [True, False])
def test_a_state_that_is_not_carried_over_is_found_at_load(
    kernels: bool, tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, fields = HYBRIDS["lfm2"]
    model = tiny(model_type, block_size=16, kernels=kernels, **fields)
    verify(model)
    if kernels:
        monkeypatch.setattr(cpu_prompts, "states_before", lambda states, _rows: torch.zeros_like(states.read()))
    else:
        monkeypatch.setattr(
            RowCache, "__init__", lambda self, _state=None: self.__dict__.update(state={}, _begun=False)
        )
    with pytest.raises(UnsupportedModel, match="differs from transformers' own"):
        verify(model)


def test_logits_in_parts_advance_the_state_once(
    tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, fields = HYBRIDS["granite"]  # with a factor of its logits
    model = tiny(model_type, block_size=16, **fields)
    sequence = np.random.default_rng(5).integers(0, model.vocab_size, 40)
    schedule = [[33], [1], [6]]
    want = paged_logits(model, [sequence], schedule)[0]
    whole = LoadedModel.forward

    def by_parts(self: LoadedModel, ids: Any, places: Any, wanted: torch.Tensor, batch: Any, pool: Any) -> torch.Tensor:
        if len(wanted) < 2:
            return whole(self, ids, places, wanted, batch, pool)
        parts = [*wanted.split(1)]
        return torch.cat(list(self.forward_by_parts(ids, places, parts, batch, pool)))

    monkeypatch.setattr(LoadedModel, "forward", by_parts)
    got = paged_logits(model, [sequence], schedule)[0]
    assert float((got - want).abs().max()) <= ROUNDING * float(want.abs().max())
    assert "forward" not in model.module.base_model.__dict__


PROJECTIONS = {
    "bamba": (["in_proj"], "out_proj"),
    "falcon_h1": (["in_proj"], "out_proj"),  # its input is scaled before
    "falcon_mamba": (["in_proj"], "out_proj"),
    "granite": (["in_proj"], "out_proj"),
    "jamba": (["in_proj"], "out_proj"),
    "kimi_linear": (["b_proj", "f_a_proj", "g_a_proj", "k_proj", "q_proj", "v_proj"], "o_proj"),
    "lfm2": (["in_proj"], "out_proj"),
    "mamba": (["in_proj"], "out_proj"),
    "mamba2": (["in_proj"], "out_proj"),
    "nemotron_h": (["in_proj"], "out_proj"),
    "olmo_hybrid": (["a_proj", "b_proj", "g_proj", "k_proj", "q_proj", "v_proj"], "o_proj"),
    "qwen3_5": (["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z"], "out_proj"),
    "qwen3_next": (["in_proj_ba", "in_proj_qkvz"], "out_proj"),
}


@pytest.mark.usefixtures("alike_loads")
@pytest.mark.parametrize("name", by_parts(list(PROJECTIONS), HYBRID, MIXER))
def test_projections_are_computed_for_all_rows_at_once(
    name: str, tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    model_type, fields = HYBRIDS[name]
    model = tiny(model_type, block_size=16, **fields)
    part = mixers_of(model.module)[0]
    found = part.__dict__[MIXING].projections
    assert found.output is not None
    assert (sorted(place.name for place in found.inputs), found.output.name) == PROJECTIONS[name]
    seen = []
    for place in (*found.inputs, found.output):
        place.module.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    paged_logits(model, [list(range(9)), list(range(70)), [5]], [[9, 70, 1]])
    assert seen == [80] * len(seen) and len(seen) == len(found.inputs) + 1


def test_mixers_run_as_transformers_wrote_them_outside_a_step(tiny: Callable[..., LoadedModel]) -> None:
    model_type, fields = HYBRIDS["lfm2"]
    model = tiny(model_type, block_size=16, **fields)
    (first, second) = mixers_of(model.module)
    assert [part.__dict__[MIXING].index for part in (first, second)] == [0, 1]
    tokens = torch.randn(1, 9, 64)
    assert torch.equal(first(tokens), type(first).forward(first, tokens))


def test_an_older_transformers_is_named(tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.Cache, "get_conv_state")
    model_type, fields = HYBRIDS["lfm2"]
    reason = rf"lfm2 cannot be served: .*transformers {transformers.__version__} keeps it in another way: install 5\.21"
    with pytest.raises(UnsupportedModel, match=reason):
        tiny(model_type, block_size=16, **fields)


def test_layers_that_attend_in_two_shapes_are_refused_by_name(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's K and V must be equal parts of a page. No family in transformers has such layers."""
    read, heads = probe._read_call, iter((1, 2))

    def other(*given: Any) -> Any:
        options, shape = read(*given)
        return options, replace(shape, kv_heads=next(heads))

    monkeypatch.setattr(probe, "_read_call", other)
    model_type, fields = HYBRIDS["lfm2"]
    with pytest.raises(UnsupportedModel, match="layers that attend differ in shape"):
        tiny(model_type, block_size=16, **fields | {"layer_types": ["conv", "full_attention", "full_attention"]})


@pytest.mark.parametrize("name", ["jamba", "qwen3_next"])
@torch.no_grad()
def test_in_float32_a_hybrid_of_16_bits_is_exact(name: str, tiny: Callable[..., LoadedModel]) -> None:
    """Recurrent layers and their states are widened too: what only rounding explains is not refused."""
    model_type, fields = HYBRIDS[name]
    model = tiny(model_type, block_size=16, dtype="bfloat16", **fields)
    assert model.fused is not None
    sequences = [np.random.default_rng(0).integers(0, model.vocab_size, count) for count in verification.LENGTHS]
    exact = verification._exact_logits(model, sequences)
    assert verification._right_in_float32(model, sequences, exact)
    wrong = replace(model, fused=replace(model.fused, embedding_scale=1.05 * model.fused.embedding_scale))
    assert not verification._right_in_float32(wrong, sequences, exact)
