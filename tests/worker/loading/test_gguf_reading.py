"""GGUF files are read as gguf reads them, apart from the entries of the tokenizer that no model needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvforge.worker.loading.gguf_reading import GROUP_VALUES, dequantise, gguf_read_once
from tests.worker.loading.gguf_files import random_octets

KINDS = ("Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K")
# Rows that are joined, that are not (odd, few, wide), and the experts of a layer.
SHAPES = ((96, 256), (33, 256), (1, 512), (64, GROUP_VALUES // 16), (3, 32, 256))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KINDS)
def test_converted_tensors_have_the_bits_of_gguf(name: str, shape: tuple[int, ...]) -> None:
    octets, kind = random_octets(name, shape, seed=1), gguf.GGMLQuantizationType[name]
    wanted = gguf.dequantize(octets, kind)
    got = dequantise(gguf.dequantize, octets, kind)
    assert got.shape == wanted.shape == shape
    assert got.dtype == wanted.dtype
    assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32))


def test_narrow_rows_are_converted_in_few_calls() -> None:
    calls: list[tuple[int, ...]] = []

    def convert(data: Any, kind: Any) -> Any:
        calls.append(data.shape)
        return gguf.dequantize(data, kind)

    octets, kind = random_octets("Q8_0", (4096, 64), seed=1), gguf.GGMLQuantizationType.Q8_0
    dequantise(convert, octets, kind)
    assert calls == [(32, 128 * octets.shape[1])]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_array("llama.attention.head_count_kv", [0, 0, 8])
    writer.add_array("llama.rope.scaling.factors", [0.5, 1.0, 2.25])
    writer.add_array("llama.flags", [True, False])
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 1, 1])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_bos_token_id(1)
    writer.add_tensor("output.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield path


def test_fields_are_those_of_gguf_apart_from_the_entries_of_the_tokenizer(file: Path) -> None:
    wanted = gguf.GGUFReader(file)
    with gguf_read_once():
        got = gguf.GGUFReader(file)
        assert gguf.GGUFReader(file) is got
    assert list(got.fields) == list(wanted.fields)
    for name, field in wanted.fields.items():
        assert got.fields[name].types == field.types, name
        if name in {"tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"}:
            assert not got.fields[name].data
        elif name == "tokenizer.ggml.tokens":
            assert len(got.fields[name].data) == 3, "the size of the vocabulary"
        else:
            assert got.fields[name].contents() == field.contents(), name
            parts = [[part.tolist() for part in each.fields[name].parts] for each in (got, wanted)]
            assert parts[0] == parts[1], name
    (tensor,) = got.tensors
    assert (tensor.name, tensor.data.tolist()) == ("output.weight", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


def test_gguf_is_as_before_afterwards() -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize
    with gguf_read_once():
        pass
    assert (gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize) == before
