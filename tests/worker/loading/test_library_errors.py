"""Odd values in files, and any error of foreign code, lead to a refusal with a reason, never to another error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.protocol.errors import KvforgeError, UnsupportedModel
from kvforge.protocol.exits import UNAVAILABLE, status_of
from kvforge.worker.device.device import Device
from kvforge.worker.loading.library_errors import sentence
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from tests.pairs import every_pair
from tests.worker.conftest import TINY

from .random_models import save

loading = sys.modules["kvforge.worker.loading.load"]
building = sys.modules["kvforge.worker.loading.build"]  # the package has a function of that name
SMALL = {**TINY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights and config.json, which no test changes."""
    return save(tmp_path_factory.mktemp("written") / "saved", "llama", SMALL)


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    """Return a copy of `written`."""
    return Path(shutil.copytree(written, tmp_path / "saved"))


def change(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | values))


@pytest.mark.parametrize(
    ("where", "odd"),
    every_pair(
        ["generation_config.json", "config.json"],
        [[2, None], [[2]], {"a": 2}, ["</s>"], "</s>", 2.5, True, [0] * 1000],
    ),
)
def test_an_odd_end_of_sequence_is_named(where: str, odd: Any, saved: Path, cpu: Device) -> None:
    change(saved / where, eos_token_id=odd)
    with pytest.raises(UnsupportedModel, match=f"eos_token_id in {where}"):
        load_model(saved, dtype="float32", device=cpu, block_size=4)


def test_ids_that_no_token_has_are_left_out(saved: Path, cpu: Device) -> None:
    change(saved / "generation_config.json", eos_token_id=[2, -1, 2, 10**20, 5])
    assert load_model(saved, dtype="float32", device=cpu, block_size=4).info.eos_tokens == (2, 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": "two"},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**9},
        {"hidden_size": None},
        {"hidden_size": 10**15},
        {"num_attention_heads": 0},
        {"vocab_size": 1.5},
        {"vocab_size": 0},
        {"max_position_embeddings": "long"},
        {"max_position_embeddings": [1]},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "unheard", "rope_theta": 1.0}},
        {"rope_scaling": 7},
        {"hidden_act": "unheard"},
        {"hidden_act": ["silu"]},
        {"architectures": 5},
        {"architectures": [None]},
        {"dtype": "float7"},
        {"dtype": {"a": 1}},
        {"model_type": ["llama"]},
        {"text_config": {"model_type": "llama"}},
        {"text_config": 5},
        {"rms_norm_eps": "small"},
        {"pad_token_id": 10**9},
        {"quantization_config": 5},
        {"layer_types": [1, 2]},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_no_value_of_a_configuration_raises_anything_else(values: dict[str, Any], saved: Path, cpu: Device) -> None:
    change(saved / "config.json", **values)
    try:
        model = load_model(saved, dtype="auto", device=cpu, block_size=4)
    except KvforgeError as error:
        assert status_of(error) in (UNAVAILABLE, 2), error
        assert str(error).rstrip()[-1] not in ":,"
    else:
        assert model.vocab_size == SMALL["vocab_size"]


@pytest.mark.parametrize("text", ["", "[]", "null", "{", DEEP, '{"eos_token_id": 1e999}'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_no_text_of_a_file_raises_anything_else(name: str, text: str, saved: Path, cpu: Device) -> None:
    (saved / name).write_text(text)
    try:
        model = load_model(saved, dtype="float32", device=cpu, block_size=4)
    except KvforgeError as error:
        assert status_of(error) in (UNAVAILABLE, 2), error
    else:
        assert name == "generation_config.json"
        assert model.vocab_size == SMALL["vocab_size"]


@pytest.mark.parametrize("value", [{"a": 1}, [1], "hot", None, True, 10**400, -5])
def test_no_sampling_default_raises_anything(value: Any, saved: Path, cpu: Device) -> None:
    change(saved / "generation_config.json", **dict.fromkeys(("top_k", "top_p", "min_p", "repetition_penalty"), value))
    try:
        model = load_model(saved, dtype="float32", device=cpu, block_size=4)
    except UnsupportedModel as error:
        assert "saved" in str(error)
    else:
        assert 0 < model.info.sampling.top_p <= 1


RAISED = [
    SystemExit(7),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    AssertionError(),
    TypeError("unsupported"),
    OSError("cannot open"),
    KeyError("rope_theta"),
    StopIteration(),
    ValueError("first line:\n  second line"),
]


@pytest.mark.parametrize(
    ("at", "raised"),
    every_pair(["model_class", "rehearse", "text_part", "verify", "fingerprint"], RAISED),
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_whatever_foreign_code_raises_is_a_refusal(
    at: str, raised: BaseException, saved: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(building if at in vars(building) else loading, at, fail)
    with pytest.raises(KvforgeError) as caught:
        load_model(saved, dtype="float32", device=cpu, block_size=4)
    assert status_of(caught.value) in (UNAVAILABLE, 2) or isinstance(raised, MemoryError)
    for line in str(raised).splitlines():
        assert line.strip() in str(caught.value)


def test_interrupting_is_no_refusal(saved: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvforge.worker.loading.load.verify", stop)
    with pytest.raises(KeyboardInterrupt):
        load_model(saved, dtype="float32", device=cpu, block_size=4)


def test_a_sentence_is_whole() -> None:
    assert sentence(ValueError("Validation error for field 'x':\n    TypeError: not that")) == (
        "Validation error for field 'x': TypeError: not that"
    )
    assert sentence(KeyError("rope_theta")) == "KeyError: 'rope_theta'"
    assert sentence(AssertionError()) == "AssertionError"
    assert len(sentence(ValueError("word " * 10_000))) <= 800


def test_missing_tensors_are_found_before_any_is_read(
    saved: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    monkeypatch.setattr("transformers.modeling_utils.safe_open", None)  # opens the files of weights
    with pytest.raises(UnsupportedModel, match=r"missing: model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model(saved, dtype="float32", device=cpu, block_size=4)


def test_more_than_all_memory_is_refused(saved: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(cpu), "total_bytes", lambda _self: 1000)
    with pytest.raises(UnsupportedModel, match=r"its weights take \d+ bytes.*has 1000 bytes of memory"):
        load_model(saved, dtype="float32", device=cpu, block_size=4)


HYBRIDS = {
    "granitemoehybrid": {
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "qwen3_next": {"layer_types": ["full_attention"] * 2, "num_experts": 4, "head_dim": 16, "num_experts_per_tok": 2},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_of_attention_alone_is_served(
    kind: str,
    tiny: Callable[..., LoadedModel],
    eager_logits: Callable[..., torch.Tensor],
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    model = tiny(kind, **HYBRIDS[kind])
    wanted = eager_logits(model, list(range(3, 30)))
    (got,) = paged_logits(model, [list(range(3, 30))], [[11], [1], [15]])
    assert float((got - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
