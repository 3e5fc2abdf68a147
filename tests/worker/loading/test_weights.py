"""Loads with wrong tensors are refused: each class of tensor in turn is dropped, renamed, reshaped, or broken.

Each refusal must name the tensor; a load that succeeds is a fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.protocol.errors import KvforgeError, UnsupportedModel
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.loading import build, find_source, fingerprint, read_config
from kvforge.worker.loading.fingerprint import PIECE_WORDS, _on_device, _sums
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from tests.worker.loading.gguf_files import Tensors, write_gguf

Weights = dict[str, torch.Tensor]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
MOE = {"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
pytestmark = pytest.mark.usefixtures("quick_loads")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", MOE),
}

METADATA: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "attention.key_length": 16,
        "attention.value_length": 16,
        "expert_count": 3,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
    }
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """modules(name) -> one of MODELS with random unpacked weights, built once."""
    from tests.worker.conftest import TINY

    made: dict[str, LoadedModel] = {}

    def get(name: str) -> Any:
        if name not in made:
            model_type, fields = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            config = {**TINY, **SMALL, "model_type": model_type, **fields}
            (folder / "config.json").write_text(json.dumps(config))
            keywords: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "block_size": 4}
            made[name] = load_model(folder, device=open_device("cpu", kernels=False), **keywords)
        return made[name].module

    yield get
    made.clear()


def fill(path: Path, device: Device) -> Any:
    """Run the load up to the weights; the later parts have their own tests."""
    source = find_source(path, "auto")
    return build(source, read_config(source), torch.float32, device, lambda _phase, _done: None, 0)


def refusal(path: Path, device: Device) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        fill(path, device)
    return str(caught.value)


def classes(names: Any) -> list[str]:
    """Return one name of each class of tensors: in the last layer and expert, and outside the layers."""
    numbered = {name for name in names if ".0." in name}
    return sorted(name for name in names if name not in numbered and ".experts.1." not in name)


def changed(weights: Weights, name: str, how: str) -> tuple[Weights, str]:
    """Return the weights with one tensor changed, and the name that the error must contain."""
    tensor = weights[name]
    others = {key: value for key, value in weights.items() if key != name}
    match how:
        case "dropped":
            return others, name
        case "renamed":
            return others | {f"other.{name}": tensor}, f"other.{name}"
        case "reshaped":
            return others | {name: torch.cat((tensor, tensor))}, name
        case _:
            broken = tensor.clone()
            broken.view(-1)[-1] = float("nan") if how == "NaN" else float("inf")
            return others | {name: broken}, name


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HOW = ("dropped", "renamed", "reshaped", "NaN", "infinite")
# In `make test`: each model, and each change. The other pairs are soak tests.
FEW = {
    ("llama", "dropped"),
    ("qwen2", "renamed"),
    ("qwen2", "infinite"),
    ("qwen3_moe", "reshaped"),
    ("qwen3_moe", "NaN"),
}


def each_change(*of_models: tuple[str, ...]) -> list[Any]:
    """Return every model's parameters with every change; pairs of a model and a change that are not in FEW as soak."""
    return [
        pytest.param(*model, how, marks=[] if (model[0], how) in FEW else [pytest.mark.soak])
        for model in of_models
        for how in HOW
    ]


@pytest.mark.parametrize(("model", "how"), each_change(*((model,) for model in MODELS)))
def test_no_tensor_of_a_folder_may_be_changed(
    model: str, how: str, modules: Callable[[str], Any], tmp_path: Path, cpu: Device
) -> None:
    modules(model).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    assert len(classes(whole)) >= 12
    for name in classes(whole):
        weights, word = changed(whole, name, how)
        save_file(weights, path, metadata={"format": "pt"})
        said = refusal(tmp_path, cpu)
        merged = name.partition(".experts.")[0]  # experts become one tensor of the model
        assert word in said or (merged != name and f"{merged}.experts" in said), (word, said)
        assert tmp_path.name in said
    save_file(whole, path, metadata={"format": "pt"})
    assert fingerprint(fill(tmp_path, cpu), "") == fingerprint(modules(model), "")


@pytest.mark.parametrize(
    ("model", "architecture", "how"), each_change(("llama", "llama"), ("qwen2", "qwen2"), ("qwen3_moe", "qwen3moe"))
)
def test_no_tensor_of_a_gguf_file_may_be_changed(
    model: str, architecture: str, how: str, modules: Callable[[str], Any], tmp_path: Path, cpu: Device
) -> None:
    module, path = modules(model), tmp_path / "tiny.gguf"

    def write(change: Callable[[Tensors], object]) -> Path:
        return write_gguf(module, path, architecture, METADATA.get(model), change)

    names: list[str] = []
    write(lambda tensors: names.extend(tensors))
    assert len(classes(names)) >= 12
    for name in classes(names):
        if how == "dropped" and name == "output.weight":
            continue  # in this format a missing head means a tied head
        word = ""

        def change(tensors: Tensors, name: str = name) -> None:
            nonlocal word
            weights, word = changed({key: torch.tensor(value) for key, value in tensors.items()}, name, how)
            tensors.clear()
            tensors.update({key: value.numpy() for key, value in weights.items()})

        said = refusal(write(change), cpu)
        assert word in said, (word, said)
        assert "tiny" in said
    loaded = fill(write(lambda _: None), cpu).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in module.state_dict().items())


def test_all_at_once_are_counted(modules: Callable[[str], Any], tmp_path: Path, cpu: Device) -> None:
    modules("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({f"x.{name}": tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    said = refusal(tmp_path, cpu)
    assert "missing: lm_head.weight, model.embed_tokens.weight" in said and "and 17 more; not used" in said


def test_more_layers_in_the_files_than_in_the_configuration(
    modules: Callable[[str], Any], tmp_path: Path, cpu: Device
) -> None:
    modules("llama").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 1}))
    assert "not used by the model: model.layers.1.input_layernorm.weight" in refusal(tmp_path, cpu)
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 3}))
    assert "missing: model.layers.2.input_layernorm.weight" in refusal(tmp_path, cpu)
    path = write_gguf(modules("llama"), tmp_path / "tiny.gguf", metadata={"block_count": 1})
    assert "not used by the model: blk.1.attn_k.weight" in refusal(path, cpu)


def test_a_wrong_shape_in_the_configuration_names_the_tensor(
    modules: Callable[[str], Any], tmp_path: Path, cpu: Device
) -> None:
    modules("llama").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"intermediate_size": 40}))
    assert "model.layers.0.mlp.down_proj.weight is [32, 48] and has to be [32, 40]" in refusal(tmp_path, cpu)


def test_experts_are_not_moved_up(modules: Callable[[str], Any], tmp_path: Path, cpu: Device) -> None:
    """transformers joins the experts in order: with number 1 named 3, expert 2 would replace expert 1."""
    modules("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    moved = {name.replace(".experts.1.", ".experts.3."): tensor for name, tensor in load_file(path).items()}
    save_file(moved, path, metadata={"format": "pt"})
    assert "model.layers.0.mlp.experts.3, and no model.layers.0.mlp.experts.1" in refusal(tmp_path, cpu)


@pytest.mark.parametrize(
    ("name", "tensor", "word"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale", torch.ones(1), "up_proj.weight_scale"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(32), "q_proj.bias"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(48, 32).to(torch.float8_e4m3fn), "is stored as F8_E4M3"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(48, 32, dtype=torch.int8), "is stored as I8"),
        ("model.layers.0.mlp.up_proj.qweight", torch.ones(6, 32, dtype=torch.int32), "up_proj.qweight"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", torch.ones(4, 32), "lora_A.weight"),
    ],
)
def test_packed_and_added_tensors_without_their_configuration(
    name: str, tensor: torch.Tensor, word: str, modules: Callable[[str], Any], tmp_path: Path, cpu: Device
) -> None:
    modules("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path, metadata={"format": "pt"})
    assert word in refusal(tmp_path, cpu)


def test_an_unknown_quantisation_is_refused_before_the_weights(
    modules: Callable[[str], Any], tmp_path: Path, cpu: Device
) -> None:
    modules("llama").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for method in ("squeezed", None):
        values["quantization_config"] = {"quant_method": method, "bits": 4}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(UnsupportedModel, match=f"quant_method is {method!r}.*does not serve"):
            read_config(find_source(tmp_path, "auto"))


def test_a_bias_in_a_gguf_file_is_not_passed_over(modules: Callable[[str], Any], tmp_path: Path, cpu: Device) -> None:
    def add(tensors: Tensors) -> None:
        tensors["blk.1.attn_q.bias"] = np.ones(32, np.float32)

    path = write_gguf(modules("llama"), tmp_path / "tiny.gguf", change=add)
    assert "not used by the model: blk.1.attn_q.bias" in refusal(path, cpu)


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "output_norm.weight", "token_embd.weight"])
def test_what_a_gguf_file_lacks_is_refused_before_a_tensor_is_read(
    name: str, modules: Callable[[str], Any], tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr("gguf.dequantize", lambda *given: read.append(given))

    def remove(tensors: Tensors) -> None:
        del tensors[name]

    path = write_gguf(modules("llama"), tmp_path / "tiny.gguf", change=remove)
    assert f"missing: {name}" in refusal(path, cpu)
    assert not read


def test_what_the_model_declares_ignorable_is_ignored(
    modules: Callable[[str], Any], tmp_path: Path, cpu: Device
) -> None:
    """Old checkpoints contain the rotary frequencies of each layer."""
    modules("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(path) | old, path, metadata={"format": "pt"})
    assert fingerprint(fill(tmp_path, cpu), "") == fingerprint(modules("llama"), "")


@pytest.mark.parametrize("tied", [True, False])
def test_one_tensor_for_embedding_and_head(
    tied: bool, modules: Callable[[str], Any], tmp_path: Path, cpu: Device
) -> None:
    """A checkpoint without a head is accepted only if the configuration ties the head to the embedding."""
    modules("llama").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": tied}))
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    save_file({name: whole[name] for name in whole if name != "lm_head.weight"}, path, metadata={"format": "pt"})
    if not tied:
        assert "missing: lm_head.weight" in refusal(tmp_path, cpu)
        return
    head = fill(tmp_path, cpu).lm_head.weight
    assert torch.equal(head, whole["model.embed_tokens.weight"])
    save_file(whole, path, metadata={"format": "pt"})
    assert torch.equal(fill(tmp_path, cpu).lm_head.weight, whole["lm_head.weight"]), "one of its own is used"


def test_every_bit_of_what_was_loaded_is_in_the_fingerprint(modules: Callable[[str], Any]) -> None:
    module = modules("llama")
    before = fingerprint(module, "float32")
    assert fingerprint(module, "bfloat16") != before == fingerprint(module, "float32")
    rng, seen = np.random.default_rng(0), {before}
    for name, tensor in module.named_parameters():
        bits = tensor.data.view(-1).view(torch.int32)
        for bit in (0, 31):
            place = int(rng.integers(len(bits)))
            kept = bits[place].clone()
            bits[place] = kept ^ (-(2**31) if bit else 1)
            assert fingerprint(module, "float32") not in seen, (name, place, bit)
            bits[place] = kept
        if len(bits) > 1:
            bits[[0, 1]] = bits[[1, 0]]
            assert (fingerprint(module, "float32") == before) == bool(bits[0] == bits[1]), name
            bits[[0, 1]] = bits[[1, 0]]
    module.config.rms_norm_eps *= 2
    assert fingerprint(module, "float32") != before
    module.config.rms_norm_eps /= 2
    assert fingerprint(module, "float32") == before


def test_a_device_sums_as_a_cpu_does() -> None:
    """Also with a partial last piece, a partial word, and no data."""
    for octets in (0, 1, 7, 4 * PIECE_WORDS, 4 * PIECE_WORDS * 300 + 10):
        tensor = torch.randint(0, 256, (octets,), dtype=torch.uint8, generator=torch.Generator().manual_seed(octets))
        words = np.zeros(-(-octets // (4 * PIECE_WORDS)) * PIECE_WORDS, "<u4")
        words.view(np.uint8)[:octets] = tensor.numpy()
        pieces = torch.from_numpy(words.view("<i4")).view(len(words) // PIECE_WORDS, PIECE_WORDS)
        assert np.array_equal(_sums(tensor), _on_device(pieces))


@pytest.mark.gpu
@on_a_gpu
def test_the_fingerprint_is_that_of_a_cpu(modules: Callable[[str], Any], tmp_path: Path, cpu: Device) -> None:
    modules("llama").save_pretrained(tmp_path)
    gpu = open_device("auto")
    assert gpu.owns_memory
    assert fingerprint(fill(tmp_path, gpu), "") == fingerprint(fill(tmp_path, cpu), "")


@pytest.mark.gpu
@on_a_gpu
def test_a_gguf_file_is_served_in_16_bits(modules: Callable[[str], Any], tmp_path: Path) -> None:
    path = write_gguf(modules("llama"), tmp_path / "tiny.gguf")
    gpu = open_device("auto")
    model = load_model(path, device=gpu, block_size=16)
    assert model.dtype == gpu.half_dtype != torch.float32
    assert {tensor.dtype for tensor in model.module.parameters()} == {gpu.half_dtype}


def test_no_memory_is_not_the_models_fault(
    modules: Callable[[str], Any], tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules("llama").save_pretrained(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", refuse)
    with pytest.raises(KvforgeError) as caught:
        fill(tmp_path, cpu)
    assert caught.value.code == "worker_error"
