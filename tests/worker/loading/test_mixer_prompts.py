"""Prompts of described mixers in chunks of our own: logits against transformers', and bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.worker.kernels.prompt_reference import PlainPrompts
from kvforge.worker.kernels.prompt_rows import PromptRows
from kvforge.worker.kernels.recurrent import StateOperations
from kvforge.worker.loading import determinism
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.serving_kernels import serving_kernels
from tests.pairs import every_pair

from .covering import HYBRID, MIXER, by_parts
from .random_models import HYBRIDS, NEEDS_CACHE
from .test_hybrids import MAGNIFIED, MAGNIFIED_SHARE, ROUNDING, cached_logits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*"),
    pytest.mark.usefixtures("alike_loads"),
    NEEDS_CACHE,
]
LENGTHS = (83, 1, 66)
FEW: dict[str, Any] = {"num_hidden_layers": 2}  # of which one has a state, for the interpreter
LAYERS = {
    "granite": ["mamba", "attention"],
    "kimi_linear": ["linear_attention", "full_attention"],
    "lfm2": ["conv", "full_attention"],
    "minimax": ["full_attention", "linear_attention"],
    "qwen3_5": ["linear_attention", "full_attention"],
    "qwen3_next": ["linear_attention", "full_attention"],
    "recurrent_gemma": ["recurrent", "attention"],
}
Tiny, Logits = Callable[..., LoadedModel], Callable[..., list[torch.Tensor]]
PLAIN = ("lfm2", "qwen3_5", "qwen3_5_moe", "qwen3_next", "granite", "bamba", "falcon_h1", "jamba")
PLAIN += ("kimi_linear", "minimax", "recurrent_gemma")
WITH_TRITON = ("kimi_linear", "minimax", "recurrent_gemma", "lfm2", "qwen3_next", "granite")


def interpreted(rows: PromptRows) -> StateOperations:
    """Return Triton's kernels over prompt rows, interpreted."""
    from kvforge.worker.device.targets import TARGETS
    from kvforge.worker.kernels.launching import LaunchSettings
    from kvforge.worker.kernels.prompt_operations import TritonPrompts

    return TritonPrompts(LaunchSettings(TARGETS["cpu"]), rows)


@pytest.fixture
def chunked(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """chunked(way, name, **settings) -> a model that computes prompts in chunks."""

    def load(way: str, name: str, **settings: Any) -> LoadedModel:
        # `check_prompts` compares rows alone and in company itself.
        monkeypatch.setattr(determinism, "_unsteady", lambda *_: "")
        model_type, fields = HYBRIDS[name]
        if way == "Triton":
            pytest.importorskip("triton")
            from kvforge.worker.attention.triton_attention import is_interpreted

            if not is_interpreted():
                pytest.skip("needs Triton's interpreter")
            kinds = "block_types" if name == "recurrent_gemma" else "layer_types"
            fields = fields | FEW | {kinds: LAYERS[name]}
        model = tiny(model_type, block_size=16, **settings, **fields)
        assert model.fused is not None
        form = PlainPrompts if way == "plain" else interpreted
        for name in ("for_prompts", "for_token_prompts"):
            monkeypatch.setattr(type(model.fused.operations), name, lambda _self, _dtype: form)
        assert "prompts: transformers" not in serving_kernels(model)["states"]
        return model

    return load


@pytest.mark.parametrize("name", by_parts(PLAIN, HYBRID, MIXER))
def test_prompts_in_chunks(name: str, chunked: Tiny, paged_logits: Logits) -> None:
    check_prompts("plain", name, chunked, paged_logits)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
@pytest.mark.parametrize("name", WITH_TRITON)
def test_prompts_in_chunks_with_tritons_kernels(name: str, chunked: Tiny, paged_logits: Logits) -> None:
    check_prompts("Triton", name, chunked, paged_logits)


def check_prompts(way: str, name: str, chunked: Tiny, paged_logits: Logits) -> None:
    """Their logits are transformers', with the bits of a prompt alone if they are cut at borders of chunks."""
    model, rng = chunked(way, name), np.random.default_rng(3)
    sequences = [rng.integers(0, model.vocab_size, count) for count in LENGTHS]
    alone = [paged_logits(model, [sequence], [[len(sequence)]], prompts=1)[0] for sequence in sequences]
    for got, sequence in zip(alone, sequences, strict=True):
        want = cached_logits(model, sequence, [len(sequence)])
        apart = (got - want).abs().amax(1) / want.abs().max()
        assert int((apart > ROUNDING).sum()) <= MAGNIFIED_SHARE * len(apart) and float(apart.max()) <= MAGNIFIED
    together = paged_logits(model, sequences, [[64, 0, 66], [19, 1, 0]], prompts=2)
    assert all(torch.equal(*each) for each in zip(together, alone, strict=True))
    # Cut elsewhere, where tokens were generated in between, and beside other generated tokens.
    for got, want in zip(paged_logits(model, sequences, [[64, 1, 5], [12, 0, 1], [7, 0, 60]]), alone, strict=True):
        assert float((got - want).abs().max()) <= MAGNIFIED * float(want.abs().max())


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
@pytest.mark.parametrize(("way", "state_dtype"), every_pair(["plain", "Triton"], ["float32", "bfloat16"]))
def test_a_prompt_leaves_the_same_state_in_any_schedule(
    way: str, state_dtype: str, chunked: Tiny, paged_logits: Logits
) -> None:
    """The token behind it has the same bits, and the first tokens those of a shorter prompt."""
    model = chunked(way, "qwen3_5", state_dtype=state_dtype)
    sequence = np.random.default_rng(5).integers(0, model.vocab_size, 72)
    whole, cut = (paged_logits(model, [sequence], [*counts, [1]])[0] for counts in ([[71]], [[64], [7]]))
    assert torch.equal(whole, cut)
    assert torch.equal(paged_logits(model, [sequence[:66]], [[66]])[0], whole[:66])
