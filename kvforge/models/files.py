"""Finds the files of a model and checks that they are complete. Headers are read, no weights.

A model is one GGUF file, or a Hugging Face folder with config.json and safetensors weights. Ambiguous cases are
refused: an adapter (alone, or beside weights that it would change), one part of a split file, and weights that no file
names. The worker uses the same checks, so that it accepts what `kvforge pull` accepts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.protocol.errors import ModelNotFound, UnsupportedModel

from . import gguf_header, safetensors_header
from .gguf_header import GgufHeader
from .safetensors_header import StoredTensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Mistral's own copy of the weights, under names that transformers does not read.
OTHER_FORMATS = "consolidated*.safetensors"
GENERAL_TYPES = {"adapter": "a LoRA adapter", "mmproj": "a vision projector", "imatrix": "an importance matrix"}


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        format: gguf or safetensors.
        path: The GGUF file or the folder.
        files: All files that are read, config.json first.
    """

    format: str
    path: Path
    files: tuple[Path, ...]

    @property
    def weights(self) -> tuple[Path, ...]:
        """Return the files with weights."""
        return tuple(file for file in self.files if file.name != CONFIG)


def find_files(path: Path, name: str = "", load_format: str = "auto") -> ModelFiles:
    """Return the files of the model at `path`.

    Args:
        path: A file or a folder.
        name: The model's name in errors.
        load_format: auto, gguf or safetensors.

    Raises:
        ModelNotFound: There is no model.
        UnsupportedModel: The model cannot be served as it is.
        OSError: It cannot be read.
    """
    name = name or str(path)
    if path.is_file():
        if load_format == "safetensors" or not is_gguf(path):
            raise ModelNotFound(name, f"{path} is neither a GGUF file nor a Hugging Face folder")
        return ModelFiles("gguf", path, (path,))
    present = sorted(path.glob("*.safetensors"))
    adapters = [each for each in ADAPTER_FILES if (path / each).is_file()]
    gguf = sorted(file for file in path.glob("*.gguf") if is_gguf(file))
    if adapters:
        alone = not gguf and all(file.name in ADAPTER_FILES for file in present)
        what = "holds only an adapter" if alone else "holds an adapter beside the weights"
        raise UnsupportedModel(name, f"the folder {what} ({adapters[0]}): merge it into the model, or move it away")
    if load_format != "gguf" and present and (path / CONFIG).is_file():
        return ModelFiles("safetensors", path, (path / CONFIG, *_named_weights(path, present, name)))
    if load_format != "safetensors" and len(gguf) == 1:
        return ModelFiles("gguf", gguf[0], (gguf[0],))
    raise ModelNotFound(name, _nothing_in(path, present, gguf))


def check_files(found: ModelFiles) -> None:
    """Read every header.

    Raises:
        UnsupportedModel: A file is damaged or incomplete.
        OSError: A file cannot be read.
    """
    if found.format == "gguf":
        gguf_model(found.path)
    else:
        read_config(found.path)
        stored_tensors(found)


def is_gguf(path: Path) -> bool:
    """Return whether a file starts like a GGUF file.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def gguf_model(path: Path) -> GgufHeader:
    """Return the header of a GGUF file that holds a complete model.

    Raises:
        UnsupportedModel: It does not.
        OSError: The file cannot be read.
    """
    header = gguf_header.read_header(path)
    metadata = header.metadata
    kind = str(metadata.get("general.type", "model"))
    if kind != "model" or "adapter.type" in metadata:
        what = GENERAL_TYPES.get("adapter" if "adapter.type" in metadata else kind, f"general.type {kind!r}")
        raise UnsupportedModel(str(path), f"the GGUF file holds {what}, not a model")
    parts, before = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if not isinstance(parts, int) or not isinstance(before, int):
        raise UnsupportedModel(str(path), f"it is damaged: its split.count is {parts!r} and its split.no {before!r}")
    if parts > 1:
        join = "join the parts first (llama-gguf-split --merge)"
        raise UnsupportedModel(str(path), f"the GGUF file is part {before + 1} of {parts} of a split one: {join}")
    if not header.tensors:
        raise UnsupportedModel(str(path), "the GGUF file holds no tensors")
    if not isinstance(metadata.get("general.architecture"), str):
        raise UnsupportedModel(str(path), "the GGUF file names no general.architecture")
    return header


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json.

    Raises:
        UnsupportedModel: It is damaged.
        OSError: It cannot be read.
    """
    config = _read_json(folder / CONFIG)
    if "transformers_weights" in config:
        raise UnsupportedModel(str(folder), f"its {CONFIG} names other files of weights (transformers_weights)")
    return config


def stored_tensors(found: ModelFiles) -> dict[str, StoredTensor]:
    """Return the tensors of all safetensors files by name.

    Raises:
        UnsupportedModel: Names the file and the tensor at fault.
        OSError: A file cannot be read.
    """
    tensors: dict[str, StoredTensor] = {}
    places: dict[str, str] = {}
    for file in found.weights:
        for tensor in safetensors_header.read_header(file):
            if tensor.name in tensors:
                problem = f"the tensor {tensor.name} is in {places[tensor.name]} and in {file.name}"
                raise UnsupportedModel(str(found.path), problem)
            tensors[tensor.name] = tensor
            places[tensor.name] = file.name
    index = found.path / INDEX
    if len(found.weights) == 1 and found.weights[0].name == WEIGHTS:
        return tensors
    for name, file_name in _weight_map(index).items():
        if places.get(name) != file_name:
            raise UnsupportedModel(str(found.path), f"{INDEX} names the tensor {name}, which {file_name} lacks")
    return tensors


def _named_weights(folder: Path, present: list[Path], name: str) -> tuple[Path, ...]:
    """Return the files that transformers loads, and refuse other weights."""
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise UnsupportedModel(name, f"the folder holds both {WEIGHTS} and {INDEX}: move one set of weights away")
    if single.is_file():
        named = [single]
    elif index.is_file():
        named = sorted({folder / Path(file).name for file in _weight_map(index).values()})
    else:
        raise ModelNotFound(name, f"the folder {folder} holds neither {WEIGHTS} nor {INDEX}")
    if absent := [file.name for file in named if file not in present]:
        raise UnsupportedModel(name, f"{INDEX} names {absent[0]}, which the folder lacks")
    others = [file.name for file in present if file not in named and not file.match(OTHER_FORMATS)]
    if others:
        raise UnsupportedModel(name, f"the folder holds {others[0]}, which no file names: move it away")
    return tuple(named)


def _weight_map(index: Path) -> dict[str, str]:
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise UnsupportedModel(str(index), "it is damaged: it has no weight_map from tensors to files")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(str(path), f"it is damaged: {error}") from error
    if not isinstance(values, dict):
        raise UnsupportedModel(str(path), "it is damaged: it is not a JSON object")
    return values


def _nothing_in(path: Path, present: list[Path], gguf: list[Path]) -> str:
    config = "a config.json" if (path / CONFIG).is_file() else "no config.json"
    held = f"the folder {path} holds {config}, {len(present)} *.safetensors and {len(gguf)} *.gguf"
    if len(gguf) > 1:
        hint = "join the parts of a split file first (llama-gguf-split --merge), or give the path of one file"
        return f"{held}: {hint}"
    return f"{held}; a model is one GGUF file, or config.json with *.safetensors"
