"""Sources: GGUF, safetensors folders, dummy weights; mistakes of users."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvforge.worker.loading.load as load_module
from kvforge.protocol.errors import InvalidConfiguration, ModelNotFound, UnsupportedModel, WorkerError
from kvforge.worker.attention import ReferenceAttention
from kvforge.worker.device.device import Device
from kvforge.worker.loading import find_source, model_dtype, read_config
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from tests.worker.loading.gguf_files import write_gguf

pytestmark = pytest.mark.usefixtures("quick_loads")


def load(source: Path, device: Device, **keywords: object) -> LoadedModel:
    settings: dict[str, object] = {"dtype": "float32", "device": device, "block_size": 4}
    return load_model(source, **(settings | keywords))  # type: ignore[arg-type]


def same_weights(left: LoadedModel, right: LoadedModel) -> bool:
    pairs = zip(left.module.state_dict().items(), right.module.state_dict().items(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def test_dummy_weights_follow_the_seed(tiny: Callable[..., LoadedModel]) -> None:
    first, second, other = tiny("llama", seed=1), tiny("llama", seed=1), tiny("llama", seed=2)
    assert same_weights(first, second)
    assert not same_weights(first, other)
    assert first.info.fingerprint == second.info.fingerprint != other.info.fingerprint


def test_dummy_leaves_the_global_generator_alone(tiny: Callable[..., LoadedModel]) -> None:
    before = torch.random.get_rng_state()
    tiny("llama")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_info(tiny: Callable[..., LoadedModel]) -> None:
    info = tiny("llama", eos_token_id=[2, 7]).info
    assert (info.name, info.architecture) == ("llama", "LlamaForCausalLM")
    assert (info.vocab_size, info.context_tokens_max, info.eos_tokens) == (97, 128, (2, 7))
    assert len(info.fingerprint) == 64
    assert Path(info.source).is_absolute()


def test_config_file_alone_is_a_dummy_source(write_config: Callable[..., Path], cpu: Device) -> None:
    model = load(write_config("llama") / "config.json", cpu, load_format="dummy")
    assert model.info.name == "llama"


@pytest.fixture
def saved(tiny: Callable[..., LoadedModel], tmp_path: Path) -> tuple[LoadedModel, Path]:
    """Return a tiny model and the folder with its safetensors."""
    model = tiny("llama")
    folder = tmp_path / "saved"
    model.module.save_pretrained(folder)
    return model, folder


def test_safetensors_folder(saved: tuple[LoadedModel, Path], cpu: Device) -> None:
    model, folder = saved
    loaded = load(folder, cpu)
    assert same_weights(model, loaded)
    assert loaded.info.name == "saved"
    assert loaded.info.fingerprint == load(folder, cpu, load_format="safetensors").info.fingerprint
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert load(folder, cpu).info.fingerprint != loaded.info.fingerprint


def test_dtype(saved: tuple[LoadedModel, Path], cpu: Device) -> None:
    folder = saved[1]
    half = load(folder, cpu, dtype="bfloat16")
    assert (half.dtype, half.geometry.kv_dtype) == (torch.bfloat16, "bfloat16")
    assert load(folder, cpu, dtype="auto").dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_without_a_dtype_in_the_configuration_that_of_the_weights_is_taken(
    saved: tuple[LoadedModel, Path], kind: torch.dtype
) -> None:
    folder = saved[1]
    values = json.loads((folder / "config.json").read_text())
    del values["dtype"]
    (folder / "config.json").write_text(json.dumps(values))
    weights = {name: tensor.to(kind) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].float()  # often stored as float32
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    source = find_source(folder, "auto")
    config = read_config(source)
    wanted = torch.float32 if kind == torch.float64 else kind
    assert model_dtype("auto", config, source, Cpu(True)) == wanted  # type: ignore[arg-type]
    slow = torch.float32 if kind == torch.bfloat16 else wanted
    assert model_dtype("auto", config, source, Cpu(False)) == slow  # type: ignore[arg-type]
    assert model_dtype("bfloat16", config, source, Cpu(False)) == torch.bfloat16  # type: ignore[arg-type]


class Cpu:
    """Of a device, what decides the dtype."""

    owns_memory = False

    def __init__(self, multiplies_bfloat16: bool) -> None:
        self.multiplies_bfloat16 = multiplies_bfloat16


class Gpu:
    """Of a device, what decides the dtype."""

    owns_memory = True

    def __init__(self, half_dtype: torch.dtype) -> None:
        self.half_dtype = half_dtype


@pytest.mark.parametrize(
    ("kind", "on_new", "on_old"),
    [
        ("F32", torch.bfloat16, torch.float16),
        ("F16", torch.float16, torch.float16),
        ("BF16", torch.bfloat16, torch.float16),
        ("Q8_0", torch.bfloat16, torch.float16),
    ],
)
def test_a_gguf_file_becomes_16_bits_on_a_gpu(
    tiny: Callable[..., LoadedModel], tmp_path: Path, kind: str, on_new: torch.dtype, on_old: torch.dtype
) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tiny("llama").module, tmp_path / "tiny.gguf", stored=stored)
    source = find_source(path, "auto")
    config = read_config(source)
    assert model_dtype("auto", config, source, Gpu(torch.bfloat16)) == on_new  # type: ignore[arg-type]
    assert model_dtype("auto", config, source, Gpu(torch.float16)) == on_old  # type: ignore[arg-type]
    for fast in (True, False):
        on_cpu = torch.bfloat16 if fast and kind == "BF16" else torch.float32
        assert model_dtype("auto", config, source, Cpu(fast)) == on_cpu  # type: ignore[arg-type]
    assert model_dtype("float32", config, source, Gpu(torch.bfloat16)) == torch.float32  # type: ignore[arg-type]


def test_kv_dtype(saved: tuple[LoadedModel, Path], cpu: Device) -> None:
    folder = saved[1]
    mixed = load(folder, cpu, kv_dtype="float16")
    assert mixed.geometry.bytes_per_block * 2 == saved[0].geometry.bytes_per_block
    assert load(folder, cpu, kv_dtype="int8").geometry.bytes_per_block == 2 * 2 * 2 * (16 + 4) * 4


def test_the_names_of_a_gguf_files_tensors_are_mapped_once(
    tiny: Callable[..., LoadedModel], tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.F32.gguf"
    write_gguf(tiny("llama").module, path)
    made: list[int] = []
    make = gguf.get_tensor_name_map

    def counted(architecture: gguf.MODEL_ARCH, layers: int) -> gguf.TensorNameMap:
        made.append(layers)
        return make(architecture, layers)

    monkeypatch.setattr(gguf, "get_tensor_name_map", counted)
    load(path, cpu)
    assert made == [2]
    assert gguf.get_tensor_name_map is counted


def test_gguf_file(tiny: Callable[..., LoadedModel], tmp_path: Path, cpu: Device) -> None:
    model = tiny("llama")
    path = tmp_path / "tiny.F32.gguf"
    write_gguf(model.module, path)
    for source in (path, tmp_path):
        loaded = load(source, cpu)
        assert same_weights(model, loaded)
        assert (loaded.info.name, loaded.info.eos_tokens) == ("tiny.F32", (2,))


def test_progress_rises_to_one(saved: tuple[LoadedModel, Path], cpu: Device, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, float]] = []
    load(saved[1], cpu, progress=lambda phase, fraction: seen.append((phase, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len({phase for phase, _ in seen}) >= 4
    assert capfd.readouterr() == ("", "")


def test_what_is_not_there(tmp_path: Path, cpu: Device, write_config: Callable[..., Path]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    for source in (tmp_path / "absent", tmp_path / "empty", tmp_path / "model.gguf", write_config("llama")):
        with pytest.raises(ModelNotFound) as caught:
            load(source, cpu)
        assert str(source) in str(caught.value)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load(tmp_path / "empty", cpu, load_format="dummy")


def test_damaged_files(saved: tuple[LoadedModel, Path], cpu: Device, tmp_path: Path) -> None:
    weights = saved[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors cannot be served: it is damaged"):
        load(saved[1], cpu)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(UnsupportedModel, match=r"cut\.gguf cannot be served: it is damaged"):
        load(tmp_path / "cut.gguf", cpu)


def test_pickled_weights_and_foreign_code_are_never_loaded(saved: tuple[LoadedModel, Path], cpu: Device) -> None:
    folder = saved[1]
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('foreign code ran')")
    with pytest.raises(UnsupportedModel):
        load(folder, cpu)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound):
        load(folder, cpu)


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"kv_dtype": "int4"}, "kv_dtype"),
        ({"block_size": 0}, "block_size"),
        ({"load_format": "pickle"}, "load_format"),
    ],
)
def test_settings_are_refused_by_name(
    keywords: dict[str, object], field: str, write_config: Callable[..., Path], cpu: Device
) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        load(write_config("llama"), cpu, **({"load_format": "dummy"} | keywords))
    assert caught.value.field == field


class WrongAttention:
    """The reference with a wrong write: every stored key is slightly too large."""

    def __init__(self) -> None:
        self._right = ReferenceAttention()

    def __getattr__(self, name: str) -> object:
        return getattr(self._right, name)

    def write(self, key: torch.Tensor, *arguments: Any) -> None:
        self._right.write(key * 1.01, *arguments)


def test_kernels_are_tried_before_anything_is_served(
    write_config: Callable[..., Path], cpu: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a wrong kernel the worker does not start, and its error names the kernel and the remedy."""
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(load_module, "choose_attention", lambda *_: WrongAttention())
    with pytest.raises(WorkerError, match=r"the write kernel is wrong for 4 query heads.*attention = 'reference'"):
        load(write_config("llama"), cpu, load_format="dummy")
    assert not (tmp_path / "selftest").exists(), "a failure was remembered"


def test_the_attention_that_is_asked_for_is_used_or_refused_by_name(
    write_config: Callable[..., Path], cpu: Device
) -> None:
    folder = write_config("llama")
    model = load(folder, cpu, load_format="dummy", attention="reference")
    assert isinstance(model.context.attention, ReferenceAttention)
    with pytest.raises(InvalidConfiguration, match=r"^attention: 'fast' is not one of auto, triton, reference"):
        load(folder, cpu, load_format="dummy", attention="fast")
