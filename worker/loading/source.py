"""The source of a model: its format and files.

There are three formats: a GGUF file (see `gguf_levels`), a Hugging Face folder with safetensors, and
"dummy" (random weights for a configuration). Code in a model folder is never run and pickled weights are never read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvforge.models.files import ModelFiles, check_files, find_files, gguf_model
from kvforge.models.gguf_header import GgufHeader
from kvforge.models.naming import name_of
from kvforge.protocol.errors import InvalidConfiguration, ModelNotFound

LOAD_FORMATS = ("auto", "gguf", "safetensors", "dummy")
# Configurations of known shapes for dummy weights: MODEL_CONFIGS / "NAME.json".
FIRST_LAYER = "model.layers.0."
Tensor = TypeVar("Tensor")
MODEL_CONFIGS = Path(__file__).parents[1] / "model_configs"


@dataclass(frozen=True)
class CheckpointPart:
    """A part of a checkpoint that is loaded as a model of one layer.

    Attributes:
        layer: The beginning of the names of its layer's tensors.
        others: Its other tensors: names in the files, and in the model.
        left_out: Tensors that begin like the layer's and do not belong to it.
        renamed: Parts of the names of its layer's tensors, in the files and in the model.
    """

    layer: str
    others: Mapping[str, str]
    left_out: frozenset[str]
    renamed: Mapping[str, str] = field(default_factory=dict)

    def name(self, stored: str) -> str | None:
        """Return the name of a stored tensor in the model; None for one of another part."""
        if stored in self.others:
            return self.others[stored]
        if stored in self.left_out or not stored.startswith(self.layer):
            return None
        name = stored.removeprefix(self.layer)
        for part, own in self.renamed.items():
            name = name.replace(part, own)
        return FIRST_LAYER + name

    def stored_name(self, name: str) -> str:
        """Return the stored name of a tensor of the model."""
        found = next((stored for stored, own in self.others.items() if own == name), None)
        if found is not None:
            return found
        for part, own in self.renamed.items():
            name = name.replace(own, part)
        return name.replace(FIRST_LAYER, self.layer, 1)


@dataclass(frozen=True)
class Source:
    """The files of a model.

    Attributes:
        format: gguf, safetensors or dummy.
        path: The path of the model.
        folder: The folder of its files.
        files: All files that are read, config.json first.
        part: The part that is loaded; None: the whole model.
    """

    format: str
    path: Path
    folder: Path
    files: tuple[Path, ...]
    part: CheckpointPart | None = None

    def of_part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the part by their names in the model, given all by their stored names."""
        if self.part is None:
            return dict(tensors)
        return {own: tensor for name, tensor in tensors.items() if (own := self.part.name(name)) is not None}

    def stored_name(self, name: str) -> str:
        """Return the name in the files of a tensor of the model."""
        return name if self.part is None else self.part.stored_name(name)

    @property
    def name(self) -> str:
        """The model's name: see `kvforge.models.naming`; a known shape has its own name."""
        if self.format == "dummy":
            return self.path.stem if self.folder == MODEL_CONFIGS else self.folder.name
        return name_of(self.path if self.format == "gguf" else self.folder)

    @property
    def model_files(self) -> ModelFiles:
        """The files with weights."""
        return ModelFiles(self.format, self.path, self.files)

    @functools.cached_property
    def gguf_header(self) -> GgufHeader:
        """The header of a GGUF file.

        Raises:
            UnsupportedModel: The file is damaged.
            OSError: The file cannot be read.
        """
        return gguf_model(self.path)

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords for transformers' `from_pretrained` to find the model without network and foreign code."""
        keywords: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        return keywords | ({"gguf_file": self.path.name} if self.format == "gguf" else {})


def find_source(source: str | Path, load_format: str) -> Source:
    """Find a model's files, and read every header, so that damaged or incomplete files are rejected before the load.

    Args:
        source: A path; with dummy weights also the name of a file in MODEL_CONFIGS ("llama-3.1-8b").
        load_format: One of LOAD_FORMATS.

    Returns:
        The files.

    Raises:
        ModelNotFound: There is no such model, or its files cannot be read.
        UnsupportedModel: A file is damaged or missing.
        InvalidConfiguration: The format is unknown (`load_format`).
    """
    path = Path(source).expanduser()
    if load_format not in LOAD_FORMATS:
        raise InvalidConfiguration("load_format", f"{load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy" and str(source) in known_configs():
        path = MODEL_CONFIGS / f"{source}.json"
    if not path.exists():
        raise ModelNotFound(str(source), _not_there(load_format))
    path = path.absolute()
    if load_format == "dummy":
        config = path / "config.json" if path.is_dir() else path
        if not config.is_file() or config.suffix != ".json":
            raise ModelNotFound(str(source), "dummy weights need a config.json, or a folder with one")
        return Source("dummy", path, config.parent, (config,))
    try:
        found = find_files(path, str(source), load_format)
        check_files(found)
    except OSError as error:
        raise ModelNotFound(str(source), f"cannot be read: {error}") from error
    return Source(found.format, found.path, found.path.parent if found.format == "gguf" else found.path, found.files)


def known_configs() -> tuple[str, ...]:
    """Return the names that `find_source` accepts for dummy weights, sorted."""
    return tuple(sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))


def _not_there(load_format: str) -> str:
    names = f", and no known shape of that name ({', '.join(known_configs())})" if load_format == "dummy" else ""
    return "there is no such file or folder" + names
