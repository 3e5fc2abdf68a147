"""EAGLE-3 heads from a folder: how they are loaded, and when they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.protocol.errors import InvalidConfiguration, KernelError, UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.kernels.registry import Serving
from kvforge.worker.loading import eagle_heads
from kvforge.worker.loading.eagle_heads import is_eagle_head, load_eagle_head
from kvforge.worker.loading.heads import project
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from tests.worker.eagle_checkpoints import EAGLE_TAPS, EAGLE_TOKENS, EagleReference, write_eagle
from tests.worker.head_checkpoints import WEIGHTS

pytestmark = pytest.mark.usefixtures("quick_loads")
BLOCK_SIZE = 4


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_eagle(tmp_path)


@pytest.fixture
def model(head: Path, cpu: Device) -> LoadedModel:
    return load_model(head.parent / "model", dtype="float32", block_size=BLOCK_SIZE, device=cpu)


def changed(place: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(place / WEIGHTS)
    change(tensors)
    save_file(tensors, place / WEIGHTS, {"format": "pt"})


def configured(place: Path, **fields: Any) -> None:
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_head_is_told_from_a_draft_model(head: Path) -> None:
    assert is_eagle_head(head, "auto")
    assert not is_eagle_head(head.parent / "model", "auto")
    assert is_eagle_head(head / "config.json", "dummy")


def test_a_head_has_its_own_layout_and_names_the_layers_that_it_reads(head: Path, model: LoadedModel) -> None:
    found = load_eagle_head(head, model, "auto")
    assert found.geometry.bytes_per_block == BLOCK_SIZE * 4 * (2 * 4 * 8 + 64)
    assert found.taps == EAGLE_TAPS
    assert found.drafted is not None and len(found.drafted) == EAGLE_TOKENS
    assert (found.info.name, found.info.dtype) == ("eagle3", "float32")
    again = load_eagle_head(head, model, "auto").info.fingerprint
    assert again == found.info.fingerprint
    changed(head, lambda tensors: tensors["fc.weight"].mul_(2))
    assert load_eagle_head(head, model, "auto").info.fingerprint != again


@pytest.mark.parametrize(
    ("fields", "taps"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
    ],
)
def test_a_configuration_may_name_other_layers(
    fields: dict[str, Any], taps: tuple[int, ...], head: Path, model: LoadedModel
) -> None:
    configured(head, **fields)
    assert load_eagle_head(head, model, "auto").taps == taps


def test_a_head_may_have_embeddings_of_its_own(head: Path, model: LoadedModel) -> None:
    assert load_eagle_head(head, model, "auto").model.table is not None
    table = torch.randn(97, 64)
    changed(head, lambda tensors: tensors.update({"embed_tokens.weight": table}))
    assert torch.equal(load_eagle_head(head, model, "auto").model.table, table)


@pytest.mark.parametrize("adds_to_norm", [False, True])
def test_the_sum_begins_with_the_hidden_state_or_with_its_norm(
    adds_to_norm: bool, head: Path, model: LoadedModel
) -> None:
    configured(head, norm_before_residual=adds_to_norm)
    front = load_eagle_head(head, model, "auto").front
    operations = load_eagle_head(head, model, "auto").decoder.operations
    before, embedded = torch.randn(3, 64), torch.randn(3, 64)
    residual, joined = front.start(operations, embedded, before, None)
    torch.testing.assert_close(residual, joined[:, 64:] if adds_to_norm else before)
    assert EagleReference(head.parent).config["norm_before_residual"] == adds_to_norm


def test_attention_of_the_heads_shape_is_checked(
    head: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[Serving]()

    def broken(serving: Serving) -> None:
        checked.append(serving)
        raise KernelError("wrong results")

    monkeypatch.setattr(eagle_heads, "check_attention", broken)
    with pytest.raises(KernelError, match="wrong results"):
        load_eagle_head(head, model, "auto")
    assert [(shape.heads, shape.kv_heads, shape.head_size) for shape in checked[0].shapes] == [(8, 4, 8)]


def test_random_weights_make_a_head_of_a_configuration(head: Path, model: LoadedModel) -> None:
    found = load_eagle_head(head / "config.json", model, "dummy")
    assert found.drafted is None
    assert len(found.decoder.head.weight) == EAGLE_TOKENS


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 96}, "vocab_size = 96, and model has 97 tokens"),
        ({"hidden_size": "64"}, "hidden_size = '64': expected a whole number"),
        ({"hidden_size": 32}, r"fc\.weight is F32 \[64, 192\], and has to be plain numbers \[32, 192\]"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2: expected one layer"),
        ({"attention_bias": True}, "expected silu, and no biases"),
        ({"draft_vocab_size": 60}, r"lm_head\.weight is F32 \[61, 64\], and has to be plain numbers \[60, 64\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, r"reads what the layers \[1, 3, 7\] read, and model has 7"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], words: str, head: Path, model: LoadedModel) -> None:
    configured(head, **fields)
    with pytest.raises(InvalidConfiguration, match=f"'eagle3', an EAGLE-3 head: .*{words}") as caught:
        load_eagle_head(head, model, "auto")
    assert caught.value.field == "draft_model"


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "none such", "rope_theta": 1e4}},
        {"eagle_config": [1]},
        {"eagle_aux_hidden_state_layer_ids": ["1", "2", "3"]},
        {"rms_norm_eps": "small"},
    ],
)
def test_a_configuration_that_nothing_can_read_is_refused(
    fields: dict[str, Any], head: Path, model: LoadedModel
) -> None:
    configured(head, **fields)
    with pytest.raises(UnsupportedModel, match="eagle3 cannot be served: its EAGLE-3 head cannot be loaded: "):
        load_eagle_head(head, model, "auto")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"), r"midlayer\.mlp\.up_proj\.weight is missing"),
        (lambda tensors: tensors.pop("d2t"), r"the tensor d2t is missing, and has to be integers \[61\]"),
        (lambda tensors: tensors["d2t"].add_(97), r"the tensor d2t leads to token \d+ of 97"),
        (lambda tensors: tensors["norm.weight"].fill_(torch.nan), r"norm\.weight holds NaN"),
        (lambda tensors: tensors.update({"layers.1.x": torch.ones(1)}), r"layers\.1\.x is not one of an EAGLE-3 head"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    change: Callable[[dict[str, torch.Tensor]], Any], words: str, head: Path, model: LoadedModel
) -> None:
    changed(head, change)
    with pytest.raises(InvalidConfiguration, match=words):
        load_eagle_head(head, model, "auto")


def test_a_model_whose_layers_are_not_seen_is_refused(head: Path, model: LoadedModel) -> None:
    with pytest.raises(InvalidConfiguration, match="'eagle3', but model runs transformers' own layers, and heads read"):
        load_eagle_head(head, replace(model, fused=None), "auto")


@pytest.mark.parametrize("parts", [1, 3])
def test_a_projection_has_the_dtype_of_its_input(parts: int) -> None:
    """Kernels return parts in float32, also a single one: heads in bfloat16 failed on an H200."""

    class Parts:
        def linear_parts(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            found = torch.nn.functional.linear(x.float(), weight.float())
            return (found / parts).expand(parts, *found.shape)

    x, weight = (
        torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16() for size in ((2, 12), (4, 12))
    )
    found = project(Parts(), x, weight)  # type: ignore[arg-type]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.nn.functional.linear(x.float(), weight.float()).bfloat16())
