"""Multi-token prediction modules of checkpoints: how they are loaded, and when they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvforge.protocol.errors import InvalidConfiguration, UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.loading.draft_model import join_head
from kvforge.worker.loading.heads import DraftHead, MtpFront
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.mtp import names_of
from kvforge.worker.loading.mtp_heads import load_mtp_head
from kvforge.worker.loading.source import Source
from kvforge.worker.loading.weight_bytes import weight_bytes
from tests.worker.head_checkpoints import MODULES, WEIGHTS, write_mtp
from tests.worker.loading.published_models import BLOCKS, fp8_blocks
from tests.worker.loading.random_models import save

pytestmark = pytest.mark.usefixtures("quick_loads")
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """written(family) -> the folder of its checkpoint, written once."""

    @cache
    def write(family: str) -> Path:
        return write_mtp(tmp_path_factory.mktemp(family), family)

    return write


@pytest.fixture
def copied(written: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """copied(family) -> the folder of a copy of its checkpoint."""
    return lambda family: copytree(written(family), tmp_path / family)


@pytest.fixture
def glm(copied: Callable[[str], Path]) -> Path:
    return copied("glm4_moe")


def opened(source: Path, device: Device, load_format: str = "auto") -> tuple[LoadedModel, DraftHead]:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE, "device": device}
    load = partial(load_model, source, load_format=load_format, **settings)
    model = load()
    return model, load_mtp_head(source, model, load_format, 0, partial(load, mtp=True))


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    """Models of unchanged checkpoints, by their families."""
    return {}


@pytest.fixture
def reopened(
    models: dict[str, LoadedModel], written: Callable[[str], Path], cpu: Device
) -> Callable[[Path], DraftHead]:
    """reopened(source) -> the head of a changed copy, for the model of the unchanged one: it has the same weights."""

    def load_head(source: Path) -> DraftHead:
        family, settings = source.name, {"dtype": "float32", "block_size": BLOCK_SIZE, "device": cpu}
        if family not in models:
            models[family] = load_model(written(family), **settings)  # type: ignore[arg-type]
        load = partial(load_model, source, mtp=True, **settings)  # type: ignore[arg-type]
        return load_mtp_head(source, models[family], "auto", 0, load)

    return load_head


def changed(place: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(place / WEIGHTS)
    change(tensors)
    save_file(tensors, place / WEIGHTS, {"format": "pt"})
    return place


def test_a_head_adds_its_keys_and_values_and_a_hidden_state_to_each_token(glm: Path, cpu: Device) -> None:
    model, head = opened(glm, cpu)
    joined = join_head(model, head)
    kv, hidden = 2 * 2 * 16, 64  # two KV heads of 16; the hidden size
    assert head.geometry.bytes_per_block == BLOCK_SIZE * 4 * (kv + hidden)
    own = head.geometry.bytes_per_block + 4 * BLOCK_SIZE  # and the id of each token
    assert joined.geometry.bytes_per_block == model.geometry.bytes_per_block + own
    assert weight_bytes(joined) == weight_bytes(model) + head.bytes
    assert head.bytes > 2 * 64 * 64 * 4
    assert head.info.name == "the MTP module of glm4_moe"


def test_the_embedding_and_the_vocabulary_head_are_those_of_the_model(glm: Path, cpu: Device) -> None:
    model, head = opened(glm, cpu)
    assert model.fused is not None
    assert head.decoder.table is model.fused.table
    assert head.decoder.head is model.fused.head


def test_another_module_has_another_fingerprint(glm: Path, reopened: Callable[[Path], DraftHead]) -> None:
    first = reopened(glm).info.fingerprint
    assert reopened(glm).info.fingerprint == first

    def scale(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[name] = tensors[name] * 1.5

    for name in ("eh_proj", "self_attn.k_proj"):
        other = reopened(changed(glm, partial(scale, name=f"model.layers.3.{name}.weight"))).info.fingerprint
        assert other != first
        first = other


def test_random_weights_have_a_module_of_the_models_own_layer(
    tiny: Callable[..., LoadedModel], tmp_path: Path, cpu: Device
) -> None:
    tiny("llama")
    _, head = opened(tmp_path / "llama", cpu, "dummy")
    assert isinstance(head.front, MtpFront)
    assert head.front.projection.shape == (64, 128)
    assert len(head.decoder.layers) == 1


def test_random_weights_of_a_model_of_images_and_text_have_a_module(
    written: Callable[[str], Path], cpu: Device
) -> None:
    model, head = opened(written("qwen3_5_moe"), cpu, "dummy")
    assert model.geometry.states
    assert not head.geometry.states
    assert head.decoder.layers[0].mixer is None
    assert isinstance(head.front, MtpFront)
    assert head.front.projection.shape == (64, 128)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("enorm", r"the tensor model\.layers\.3\.enorm\.weight of glm4_moe is missing, .* plain numbers \[64\]"),
        ("hnorm", r"the tensor model\.layers\.3\.hnorm\.weight of glm4_moe is missing"),
        ("shared_head.norm", r"missing: model\.layers\.3\.shared_head\.norm\.weight"),
        ("self_attn.o_proj", r"missing: model\.layers\.3\.self_attn\.o_proj\.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, words: str, glm: Path, reopened: Callable[[Path], DraftHead]) -> None:
    place = changed(glm, lambda tensors: tensors.pop(f"model.layers.3.{name}.weight"))
    with pytest.raises((InvalidConfiguration, UnsupportedModel), match=words):
        reopened(place)


@pytest.mark.parametrize("name", ["enorm", "hnorm", "eh_proj", "self_attn.k_proj"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_damaged_number_is_refused(name: str, value: float, glm: Path, reopened: Callable[[Path], DraftHead]) -> None:
    whole = f"model.layers.3.{name}.weight"
    place = changed(glm, lambda tensors: tensors[whole].view(-1)[3:4].fill_(value))
    with pytest.raises(
        (InvalidConfiguration, UnsupportedModel), match=rf"NaN or infinity.*{whole}|{whole}.*NaN or inf"
    ):
        reopened(place)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("eh_proj", (64, 64), r"model\.layers\.3\.eh_proj\.weight of glm4_moe is F32 \[64, 64\], .* \[64, 128\]"),
        ("hnorm", (32,), r"model\.layers\.3\.hnorm\.weight of glm4_moe is F32 \[32\]"),
        ("mlp.gate", (8, 63), r"model\.layers\.3\.mlp\.gate\.weight is \[8, 63\] and has to be \[8, 64\]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(
    name: str, shape: tuple[int, ...], words: str, glm: Path, reopened: Callable[[Path], DraftHead]
) -> None:
    place = changed(glm, lambda tensors: tensors.update({f"model.layers.3.{name}.weight": torch.zeros(shape)}))
    with pytest.raises((InvalidConfiguration, UnsupportedModel), match=words):
        reopened(place)


def test_a_projection_in_codes_is_refused(glm: Path, reopened: Callable[[Path], DraftHead]) -> None:
    codes = torch.zeros((64, 128), dtype=torch.float8_e4m3fn)
    place = changed(glm, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": codes}))
    with pytest.raises(InvalidConfiguration, match=r"eh_proj\.weight of glm4_moe is F8_E4M3 \[64, 128\]") as caught:
        reopened(place)
    assert caught.value.field == "draft_model"


def test_a_checkpoint_without_a_module_is_refused(glm: Path, cpu: Device) -> None:
    own = {name: each for name, each in load_file(glm / WEIGHTS).items() if not name.startswith("model.layers.3.")}
    save_file(own, glm / WEIGHTS, {"format": "pt"})
    with pytest.raises(InvalidConfiguration, match=r"but glm4_moe has no tensors model\.layers\.3\.\*") as caught:
        opened(glm, cpu)
    assert caught.value.field == "draft_model"


def test_further_layers_that_are_no_module_are_still_refused(glm: Path, cpu: Device) -> None:
    """Only a layer with a module's projection may lie behind the model's own."""
    config = json.loads((glm / "config.json").read_text())
    (glm / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(UnsupportedModel, match=r"not used by the model: model\.layers\.2\."):
        load_model(glm, dtype="float32", block_size=BLOCK_SIZE, device=cpu)


def test_families_without_known_modules_are_refused(tmp_path: Path, cpu: Device) -> None:
    place = save(tmp_path / "llama", "llama", {})
    words = "heads are known of deepseek_v3, ernie4_5_moe, glm4_moe, .*, qwen3_next, and llama is a model of type llama"
    with pytest.raises(InvalidConfiguration, match=words):
        opened(place, cpu)


@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.soak), "qwen3_5_moe"])
def test_a_module_of_qwen_3_5_is_that_of_the_whole_checkpoint_and_of_its_text_alone(
    family: str, written: Callable[[str], Path], cpu: Device
) -> None:
    """The published files have images too; the same weights as a model of text give the same module."""
    whole = opened(written(family), cpu)[1]
    text = opened(written(family).with_name(f"{family} plain"), cpu)[1]
    assert whole.info.name == f"the MTP module of {family}"
    assert whole.decoder.layers[0].mixer is None
    assert isinstance(whole.front, MtpFront)
    assert isinstance(text.front, MtpFront)
    assert whole.info.fingerprint == text.info.fingerprint
    assert bool(whole.front.token_norm.offset) == bool(text.front.token_norm.offset)


def test_experts_of_a_module_may_be_stored_together(
    copied: Callable[[str], Path], reopened: Callable[[Path], DraftHead]
) -> None:
    """Published files have both forms; those that transformers writes have each expert alone."""
    place = copied("qwen3_5_moe")
    alone = reopened(place)

    def joined(tensors: dict[str, torch.Tensor]) -> None:
        experts = "mtp.layers.0.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}{number}.{name}_proj.weight") for number in range(4)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{experts}gate_up_proj": torch.cat((gate, up), 1), f"{experts}down_proj": down}

    assert reopened(changed(place, joined)).info.fingerprint == alone.info.fingerprint


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("qwen3_5", "mtp.fc", r"the tensor mtp\.fc\.weight of qwen3_5 is missing, .* plain numbers \[64, 128\]"),
        ("qwen3_5", "mtp.norm", r"missing: mtp\.norm\.weight"),
        ("qwen3_5", "mtp.layers.0.self_attn.q_norm", r"missing: mtp\.layers\.0\.self_attn\.q_norm\.weight"),
        (
            "mimo_v2_flash",
            "model.mtp.layers.0.pre_mlp_layernorm",
            r"missing: model\.mtp\.layers\.0\.pre_mlp_layernorm\.weight",
        ),
        ("ernie4_5_moe", "model.mtp_linear_proj.0", r"the tensor model\.mtp_linear_proj\.0\.weight of ernie4_5_moe is"),
        ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj", r"missing: model\.mtp_block\.0\.mlp\.up_proj\.weight"),
    ],
)
def test_a_missing_tensor_of_each_family_has_its_own_name(
    family: str, name: str, words: str, copied: Callable[[str], Path], reopened: Callable[[Path], DraftHead]
) -> None:
    place = changed(copied(family), lambda tensors: tensors.pop(f"{name}.weight"))
    with pytest.raises((InvalidConfiguration, UnsupportedModel), match=words):
        reopened(place)


def test_a_checkpoint_of_qwen_3_5_without_a_module_is_refused(copied: Callable[[str], Path], cpu: Device) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    with pytest.raises(InvalidConfiguration, match=r"but qwen3_5 has no tensors mtp\.layers\.0\.\*"):
        opened(changed(copied("qwen3_5"), without), cpu)


def test_a_module_with_parts_that_are_not_read_is_refused(
    copied: Callable[[str], Path], reopened: Callable[[Path], DraftHead]
) -> None:
    place = copied("qwen3_5")
    file = place / "config.json"
    config = json.loads(file.read_text())
    text = config["text_config"] | {"mtp_use_dedicated_embeddings": True}
    file.write_text(json.dumps(config | {"text_config": text}))
    with pytest.raises(InvalidConfiguration, match=r"embeddings of its own for it \(mtp_use_dedicated_embeddings\)"):
        reopened(place)
    file.write_text(json.dumps(config))
    changed(place, lambda tensors: tensors.update({"mtp.fc.bias": torch.zeros(64)}))
    with pytest.raises(InvalidConfiguration, match=r"the tensor mtp\.fc\.bias of qwen3_5 is not one of a known module"):
        reopened(place)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe"])
def test_a_module_in_blocks_of_fp8_is_read_where_nothing_multiplies_these(
    family: str, copied: Callable[[str], Path], cpu: Device
) -> None:
    """The model itself is dequantised by transformers, which does not know the module."""
    place = copied(family)
    want = dict[str, torch.Tensor]()

    def quantised(tensors: dict[str, torch.Tensor]) -> None:
        for name, weight in list(tensors.items()):
            if name.endswith(("q_proj.weight", "o_proj.weight")):
                codes, want[name] = fp8_blocks(name, weight)
                tensors.update(codes)

    changed(place, quantised)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))
    _, head = opened(place, replace(cpu, kernels=False))
    (found,) = (each for name, each in want.items() if "o_proj" in name and name.startswith(MODULES[family].begin))
    assert torch.equal(head.decoder.layers[0].output.weight, found)


@pytest.mark.parametrize("kind", ["glm_ocr", "glm4v_moe", "deepseek_v32", "minimax_m2"])
def test_other_families_with_published_modules_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    source = Source("safetensors", tmp_path, tmp_path, (tmp_path / "config.json",))
    with pytest.raises(InvalidConfiguration, match=f"is a model of type {kind}: leave it out"):
        names_of(source, transformers.PretrainedConfig())


def test_models_whose_hidden_states_are_not_seen_are_refused(tiny: Callable[..., LoadedModel]) -> None:
    def never() -> LoadedModel:
        raise AssertionError("loaded")

    model = tiny("llama")
    with pytest.raises(InvalidConfiguration, match="'mtp', but llama runs transformers' own layers"):
        load_mtp_head("nowhere", replace(model, fused=None), "auto", 0, never)
