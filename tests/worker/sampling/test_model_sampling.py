"""A request without sampling parameters uses the defaults of the model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvforge.protocol.messages import SamplingParams
from kvforge.worker.loading import Source, model_sampling
from kvforge.worker.loading.sampling_defaults import DEFAULT_SAMPLING

QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "eos_token_id": 2}


def folder(path: Path, text: str | None) -> Source:
    if text is not None:
        (path / "generation_config.json").write_text(text)
    return Source("safetensors", path, path, ())


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (QWEN, SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)),
        ({"temperature": 1.0, "top_p": None}, SamplingParams(temperature=1.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SamplingParams(temperature=0.0, top_p=0.9)),
        ({"min_p": 0.1}, SamplingParams(min_p=0.1)),
        ({"eos_token_id": 2}, DEFAULT_SAMPLING),
        ({"temperature": "hot", "top_k": -1, "top_p": 7}, DEFAULT_SAMPLING),
        ({"temperature": -1, "top_k": 5}, SamplingParams(top_k=5)),
    ],
)
def test_what_a_folder_says(tmp_path: Path, said: dict[str, Any], expected: SamplingParams) -> None:
    assert model_sampling(folder(tmp_path, json.dumps(said))) == expected


@pytest.mark.parametrize("text", [None, "{", "[]", '"x"', "\x00"])
def test_a_folder_that_says_nothing_readable(tmp_path: Path, text: str | None) -> None:
    assert model_sampling(folder(tmp_path, text)) == DEFAULT_SAMPLING


def test_a_wrong_value_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_sampling(folder(tmp_path, '{"top_k": -1}'))
    assert "sampling.top_k: is -1" in caplog.text


def test_what_a_gguf_file_says(tmp_path: Path) -> None:
    def source(**values: float) -> Source:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, value in values.items():
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"general.sampling.{name}", value)
        writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))  # a model needs a tensor
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Source("gguf", path, tmp_path, (path,))

    chosen = model_sampling(source(temp=0.5, top_k=40, min_p=0.25, penalty_repeat=1.5, mirostat=0))
    assert chosen == SamplingParams(temperature=0.5, top_k=40, min_p=0.25, repetition_penalty=1.5)
    assert model_sampling(source()) == DEFAULT_SAMPLING
