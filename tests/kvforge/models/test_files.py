"""Model files of `kvforge pull`, `kvforge up` and a worker: every incomplete file is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import save_file

from kvforge.models.files import find_files, stored_tensors
from kvforge.models.gguf_header import TENSOR_TYPES, read_header, read_metadata
from kvforge.models.store import find, pull
from kvforge.protocol.errors import KvforgeError, ModelNotFound, UnsupportedModel

TENSORS = {name: np.arange(96, dtype=np.float32).reshape(3, 32) + i for i, name in enumerate(("one", "two", "three"))}


def write_gguf(path: Path, add: Callable[[gguf.GGUFWriter], object] = lambda _: None, tensors: bool = True) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b"])
    add(writer)
    for name, tensor in TENSORS.items() if tensors else ():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path, files: dict[str, tuple[str, ...]], index: dict[str, str] | None = None) -> Path:
    """Write a folder with a config.json and safetensors files. files: the TENSORS in each."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


SHARDS = {"model-00001-of-00002.safetensors": ("one", "two"), "model-00002-of-00002.safetensors": ("three",)}
INDEX = {name: file for file, names in SHARDS.items() for name in names}


def refused(path: Path, *words: str, error: type[KvforgeError] = UnsupportedModel) -> None:
    """Check the refusal by `pull` and by `find`, which `kvforge up` and a worker call."""
    for ask in (pull, find):
        with pytest.raises(error) as caught:
            ask(str(path))
        for word in words:
            assert word in str(caught.value)


def test_whole_models_are_found_where_they_are(tmp_path: Path) -> None:
    alone = write_gguf(tmp_path / "a.gguf")
    folder = write_folder(tmp_path / "folder", {"model.safetensors": tuple(TENSORS)})
    shards = write_folder(tmp_path / "shards", SHARDS, INDEX)
    for path in (alone, folder, shards):
        assert pull(str(path)) == find(str(path)) == path
    assert pull(str(tmp_path)) == find(str(tmp_path), weights=False) == alone, "a folder with one GGUF file"
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in Mistral's own format")
    assert [file.name for file in find_files(folder).files] == ["config.json", "model.safetensors"]
    assert {name: tensor.shape for name, tensor in stored_tensors(find_files(shards)).items()} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }


def test_the_header_says_where_each_tensor_lies(tmp_path: Path) -> None:
    """Compared with the bytes, and with the table of types in gguf."""
    path = write_gguf(tmp_path / "a.gguf")
    content = path.read_bytes()
    header = read_header(path)
    assert [tensor.name for tensor in header.tensors] == list(TENSORS)
    for tensor in header.tensors:
        found = np.frombuffer(content[tensor.start : tensor.start + tensor.size], np.float32).reshape(tensor.shape)
        assert np.array_equal(found, TENSORS[tensor.name])
    for kind, (name, values, size) in TENSOR_TYPES.items():
        assert (gguf.GGMLQuantizationType(kind).name, GGML_QUANT_SIZES[kind]) == (name, (values, size))
    assert set(TENSOR_TYPES) >= {int(kind) for kind in GGML_QUANT_SIZES}


def test_the_header_has_of_a_vocabulary_its_size_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", lambda w: w.add_token_merges(["a b", "\u00e9"]))
    metadata, header = read_metadata(path), read_header(path)
    assert metadata["tokenizer.ggml.tokens"] == ["a", "b"] and metadata["tokenizer.ggml.merges"] == ["a b", "\u00e9"]
    assert header.metadata == metadata | {"tokenizer.ggml.tokens": ["", ""], "tokenizer.ggml.merges": ["", ""]}
    assert [tensor.name for tensor in header.tensors] == list(TENSORS), "all that comes behind it is where it was"


def test_a_gguf_file_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    content = path.read_bytes()
    end = max(tensor.start + tensor.size for tensor in read_header(path).tensors)
    for length in [*range(4, end, 7), len(content) // 2, end - 1]:
        path.write_bytes(content[:length])
        refused(path, str(path), "damaged")
    path.write_bytes(content[: end - 1])
    refused(path, "the tensor three ends at byte")


def test_random_bytes_are_no_model(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(100_000)
    path = tmp_path / "noise.gguf"
    path.write_bytes(noise)
    refused(path, "neither a GGUF file", error=ModelNotFound)
    path.write_bytes(b"GGUF" + noise)
    refused(path, "damaged")
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + noise)
    refused(path, "damaged")
    folder = write_folder(tmp_path / "folder", {"model.safetensors": ("one",)})
    (folder / "model.safetensors").write_bytes(noise)
    refused(folder, "model.safetensors", "damaged")


def test_every_byte_of_a_gguf_tensor_table_counts(tmp_path: Path) -> None:
    """After a change of any byte the file is refused, or the table is different but consistent."""
    path = write_gguf(tmp_path / "a.gguf")
    content = path.read_bytes()
    whole = read_header(path)
    first = content.index(b"one") - 8
    for at in range(first, whole.tensors[0].start, 3):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        try:
            other = read_header(path)
        except UnsupportedModel:
            continue
        assert other.tensors != whole.tensors or at >= content.index(b"three") + len("three") + 4 + 16 + 12


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda w: w.add_type("adapter"), "holds a LoRA adapter, not a model"),
        (lambda w: w.add_string("adapter.type", "lora"), "holds a LoRA adapter, not a model"),
        (lambda w: w.add_type("mmproj"), "holds a vision projector, not a model"),
        (lambda w: w.add_array("general.type", ["a"]), "general.type"),
        (lambda w: w.add_string("split.count", "two"), "its split.count is 'two'"),
        (lambda w: (w.add_uint16("split.no", 0), w.add_uint16("split.count", 2)), "is part 1 of 2 of a split one"),
    ],
)
def test_what_is_no_whole_model_is_refused_at_once(
    tmp_path: Path, add: Callable[[gguf.GGUFWriter], object], words: str
) -> None:
    refused(write_gguf(tmp_path / "a.gguf", add), "a.gguf", words)


def test_a_gguf_file_without_tensors_is_refused(tmp_path: Path) -> None:
    refused(write_gguf(tmp_path / "vocabulary.gguf", tensors=False), "holds no tensors")


def test_two_halves_of_a_split_file_say_how_to_join_them(tmp_path: Path) -> None:
    for part in (0, 1):
        write_gguf(tmp_path / f"a-{part}.gguf", lambda w: w.add_uint16("split.count", 2))
    refused(tmp_path, "2 *.gguf", "llama-gguf-split --merge", error=ModelNotFound)


def test_a_safetensors_file_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", {"model.safetensors": tuple(TENSORS)})
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in [*range(0, len(content), 31), len(content) - 1]:
        path.write_bytes(content[:length])
        refused(folder, "model.safetensors", "damaged")
    path.write_bytes(content[:-1])
    refused(folder, "ends at byte 1152 of 1151 bytes of data")
    path.write_bytes(content + b"x")
    refused(folder, "end at byte 1152 of 1153 bytes of data")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [3, 31], "data_offsets": [0, 384]}, "which do not fit [3, 31] F32"),
        ({"dtype": "F32", "shape": [3, -32], "data_offsets": [0, 384]}, "invalid shape or offsets"),
        ({"dtype": "F32", "shape": [3, 32], "data_offsets": [8, 384]}, "begins at byte 8"),
        ({"dtype": "F32", "shape": [3, 32], "data_offsets": [0, "x"]}, "damaged"),
        ({"dtype": "F32", "shape": [3, 32]}, "damaged"),
        (17, "damaged"),
    ],
)
def test_an_entry_that_lies_is_damage(tmp_path: Path, entry: object, words: str) -> None:
    folder = write_folder(tmp_path / "folder", {})
    header = json.dumps({"one": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(384)
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, words)


def test_folders_that_do_not_fit_together_are_refused_by_file_and_tensor(tmp_path: Path) -> None:
    shards = write_folder(tmp_path / "a", {"model-00001-of-00002.safetensors": ("one", "two")}, INDEX)
    refused(shards, "model-00002-of-00002.safetensors, which the folder lacks")
    lacking = write_folder(tmp_path / "b", SHARDS | {"model-00002-of-00002.safetensors": ()}, INDEX)
    refused(lacking, "names the tensor three, which model-00002-of-00002.safetensors lacks")
    twice = write_folder(tmp_path / "c", SHARDS | {"model-00002-of-00002.safetensors": ("two", "three")}, INDEX)
    refused(twice, "the tensor two is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors")
    both = write_folder(tmp_path / "d", SHARDS | {"model.safetensors": tuple(TENSORS)}, INDEX)
    refused(both, "holds both model.safetensors and model.safetensors.index.json")
    strange = write_folder(tmp_path / "e", {"model.safetensors": ("one",), "lora.safetensors": ("two",)})
    refused(strange, "lora.safetensors, which no file names")
    nameless = write_folder(tmp_path / "f", {"weights.safetensors": tuple(TENSORS)})
    refused(nameless, "neither model.safetensors nor", error=ModelNotFound)
    write_folder(tmp_path / "g", SHARDS, {})
    refused(tmp_path / "g", "no weight_map")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"\x00" * 10, b'"' * 5])
def test_a_damaged_config_says_so(tmp_path: Path, content: bytes) -> None:
    folder = write_folder(tmp_path / "folder", {"model.safetensors": tuple(TENSORS)})
    (folder / "config.json").write_bytes(content)
    refused(folder, "config.json", "it is damaged")


def test_other_weights_are_not_loaded_behind_our_back(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", {"model.safetensors": tuple(TENSORS)})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_weights": "x.safetensors"}))
    refused(folder, "transformers_weights")


def test_adapters_are_refused_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", {"adapter_model.safetensors": ("one",)})
    refused(folder, "holds only an adapter", "adapter_model.safetensors", "merge it")
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "holds only an adapter", "adapter_config.json", "merge it")
    write_folder(folder, {"model.safetensors": tuple(TENSORS)})
    refused(folder, "holds an adapter beside the weights")


def test_up_says_it_once_before_a_process_is_started(tmp_path: Path) -> None:
    """In the folder where a coordinator's folder would be created first."""
    path = write_gguf(tmp_path / "half.gguf")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    command = [sys.executable, "-m", "kvforge", "--runtime-dir", str(tmp_path / "run"), "up", "--model", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0
    assert ran.stderr.count("damaged") == 1 and "half.gguf" in ran.stderr, ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "run").exists()


def test_a_worker_says_it_before_it_imports_torch(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "half.gguf")
    path.write_bytes(path.read_bytes()[:-200])
    config = tmp_path / "worker.toml"
    config.write_text(f'name = "w"\nmodel = "{path}"\nruntime_dir = "{tmp_path}"\n')
    # Importing the loop, and torch with it, fails.
    program = "import sys; sys.modules['kvforge.worker.step.loop'] = None; "
    program += "from kvforge.worker.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "--config", str(config)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr.count("damaged") == 1 and "half.gguf" in ran.stderr
