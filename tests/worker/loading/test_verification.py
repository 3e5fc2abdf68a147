"""The comparison at load accepts results nearer to float32 than transformers', and refuses wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.loading import probe, verification
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import ATTENTION_NAME, LoadedModel, use_attention
from kvforge.worker.loading.probe import bound_shapes
from kvforge.worker.loading.verification import TOLERANCE, distance, in_float32
from tests.worker.conftest import TINY

SEQUENCES = [np.random.default_rng(0).integers(0, TINY["vocab_size"], 7)]


def like_qwen(folder: Path, dtype: torch.dtype) -> Path:
    """Return a tiny Qwen2 with large, similar scores, through biases of Q and K in their slowest dimension."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen2", **TINY)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in module.model.layers:
        for projection, size in ((layer.self_attn.q_proj, 256.0), (layer.self_attn.k_proj, 64.0)):
            projection.weight.data.view(-1, 16, 64)[:, [7, 15]] = 0
            projection.bias.data.view(-1, 16)[:, 7] = size
    module.to(dtype).save_pretrained(folder)
    return folder


@torch.no_grad()
def eager(module: Any) -> list[torch.Tensor]:
    ids = torch.as_tensor(SEQUENCES[0])[None]
    return [module(input_ids=ids, use_cache=False).logits[0].float()]


def load(folder: Path, device: Device, **settings: Any) -> LoadedModel:
    return load_model(folder, device=device, block_size=4, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_16_bits_round_hard_is_served(
    dtype: torch.dtype, tmp_path: Path, cpu: Device, caplog: pytest.LogCaptureFixture
) -> None:
    folder = like_qwen(tmp_path, dtype)
    keywords: dict[str, Any] = {"attn_implementation": "eager"}
    narrow = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **keywords)
    wide = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **keywords)
    theirs = distance(eager(narrow), eager(wide))
    assert theirs > TOLERANCE[dtype], "else it would be no such model"
    with caplog.at_level("DEBUG", "kvforge.worker.loading.verification"):
        assert load(folder, cpu, dtype=str(dtype).removeprefix("torch.")).dtype == dtype
    assert "of the largest from float32, transformers' own" in caplog.text


def test_weights_that_are_widened_for_a_moment_give_float32(tmp_path: Path, cpu: Device) -> None:
    """The logits equal those of weights loaded as float32; afterwards the model is unchanged."""
    folder = like_qwen(tmp_path, torch.bfloat16)
    narrow = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    wide = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in narrow.state_dict().items()}
    with in_float32(narrow):
        assert distance(eager(narrow), eager(wide)) < 1e-5
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in narrow.state_dict().items()} == before
    with pytest.raises(IndexError), in_float32(narrow):
        narrow(input_ids=torch.tensor([[TINY["vocab_size"]]]))
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in narrow.state_dict().items()} == before


def test_a_head_may_be_given_numbers_in_the_dtype_of_its_weight() -> None:
    """As Mamba's is. The weight is widened after its dtype was read."""
    head = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    x = torch.arange(8.0)[None] / 8
    with torch.no_grad(), in_float32(head):
        found = head(x.to(head.weight.dtype))
    assert torch.equal(found, x @ head.weight.float().T)


@pytest.mark.parametrize("kind", ["rounded hard", "plain"])
def test_a_wrong_answer_in_16_bits_is_refused(
    kind: str, tmp_path: Path, cpu: Device, tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the model where transformers itself is far from float32: that distance excuses no error."""
    forward = LoadedModel.forward

    def wrong(self: LoadedModel, token_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return forward(self, token_ids.flip(0), positions, *rest)

    monkeypatch.setattr(LoadedModel, "forward", wrong)
    with pytest.raises(UnsupportedModel, match=r"in bfloat16 its logits are \S+ of the largest away .* own attention"):
        if kind == "plain":
            tiny("llama", dtype="bfloat16")
        else:
            load(like_qwen(tmp_path, torch.bfloat16), cpu, dtype="bfloat16")


def either_way(*cases: tuple[Any, ...]) -> list[Any]:
    """Return each case with a described model and with another one; most of the latter are soak tests."""
    others = [
        pytest.param(False, *each, marks=[] if each[2] and each[0] == 0.44 else pytest.mark.soak) for each in cases
    ]
    return [*((True, *each) for each in cases), *others]


@pytest.mark.parametrize(
    ("described", "ours", "theirs", "right", "accepted"),
    either_way(
        (0.44, 0.43, True, True),  # observed with random Mixtral weights, where rounding decides the routing
        (0.44, 0.43, False, False),
        (0.44, 0.21, True, None),  # not alike: accepted from a described router alone
        (0.44, 0.21, False, False),
        (0.51, 0.50, True, False),  # at this distance the comparison proves nothing
        (float("nan"), 0.43, True, False),
        (0.44, float("nan"), True, False),
    ),
)
def test_where_chance_decides_which_is_nearer_float32_has_to_agree(
    described: bool,
    ours: float,
    theirs: float,
    right: bool,
    accepted: bool | None,
    tiny: Callable[..., LoadedModel],
    monkeypatch: Any,
) -> None:
    if not described:
        monkeypatch.setattr("kvforge.worker.loading.parts.family_of", lambda _module: None)
    model = tiny("mixtral", dtype="bfloat16", num_local_experts=4)
    assert (model.fused is not None) == described
    attention = model.context.attention
    told = iter((0.4, ours, theirs))
    monkeypatch.setattr(verification, "distance", lambda *logits: next(told, None) or distance(*logits))
    forward = LoadedModel.forward

    def wrong(self: LoadedModel, token_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return forward(self, token_ids, positions * 2 if self.dtype == torch.float32 else positions, *rest)

    if not right:
        monkeypatch.setattr(LoadedModel, "forward", wrong)
    if described if accepted is None else accepted:
        verification.verify(model)
    else:
        with pytest.raises(UnsupportedModel, match=r"in bfloat16 its logits are \S+ of the largest away"):
            verification.verify(model)
    assert model.context.attention is attention, "the trial's is not left behind"


def test_numbers_that_a_dtype_cannot_hold_are_said(tmp_path: Path, cpu: Device) -> None:
    """Every weight is finite, but the computed numbers are not."""
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **TINY))
    module.lm_head.weight.data *= 60_000 / module.lm_head.weight.abs().max()
    module.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="in float16 are not finite: load it with dtype bfloat16 or float32"):
        load(tmp_path, cpu, dtype="float16")
    assert load(tmp_path, cpu, dtype="bfloat16").dtype == torch.bfloat16


def test_the_model_is_left_with_paged_attention(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("llama")
    assert model.module.config._attn_implementation == ATTENTION_NAME
    use_attention(model.module, ATTENTION_NAME)


def test_a_model_without_its_sinks_is_refused(
    write_config: Callable[..., Path], cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config("gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32"}
    model = load(folder, cpu, **settings)
    assert all(shape.sinks for shape in bound_shapes(model.module, model.geometry.layers)), "checked at a start"
    monkeypatch.setattr(probe, "_sinks", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="paged attention differs from transformers' own"):
        load(folder, cpu, **settings)
