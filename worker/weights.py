"""Finding a model, building it with transformers, filling in its weights.

Three formats: a GGUF file (dequantised by transformers on load), a Hugging Face folder with safetensors, and "dummy"
(random weights for a configuration alone). Code in a model folder is never run and pickled weights are never read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from transformers.utils import logging as transformers_logging

from protocol.errors import InvalidConfiguration, KvforgeError, ModelNotFound, UnsupportedModel

from .device import Device

Progress = Callable[[str, float], None]

LOAD_FORMATS = ("auto", "gguf", "safetensors", "dummy")
MODEL_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Configurations of known shapes, for dummy weights: MODEL_CONFIGS / "NAME.json".
MODEL_CONFIGS = Path(__file__).parent / "model_configs"
DIGEST_PIECES = 64
DIGEST_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Source:
    """Where a model comes from. format: gguf, safetensors or dummy. files: what its fingerprint covers, in order."""

    format: str
    path: Path
    folder: Path
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        named_by_file = self.path.suffix == ".gguf" or self.folder == MODEL_CONFIGS
        return self.path.stem if named_by_file and self.path.is_file() else self.folder.name

    @property
    def keywords(self) -> dict[str, Any]:
        """What transformers' `from_pretrained` needs to find it, without network and without foreign code."""
        keywords: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        return keywords | ({"gguf_file": self.path.name} if self.format == "gguf" else {})

    def fingerprint(self, architecture: str, dtype: str, seed: int) -> str:
        """Hex SHA-256 of what determines the tokens: architecture, dtype, and sampled contents of the files.

        Of each file: its size and up to 64 pieces of 64 KiB at even distances, first and last included. Hashing every
        byte of a large model would take minutes at every start.
        """
        digest = hashlib.sha256(f"{architecture} {dtype} {seed if self.format == 'dummy' else ''}".encode())
        for path in self.files:
            size = path.stat().st_size
            digest.update(f" {path.name} {size} ".encode())
            last = max(size - DIGEST_PIECE_BYTES, 0)
            with path.open("rb") as file:
                for offset in sorted({last * i // (DIGEST_PIECES - 1) for i in range(DIGEST_PIECES)}):
                    file.seek(offset)
                    digest.update(file.read(DIGEST_PIECE_BYTES))
        return digest.hexdigest()


def find_source(source: str | Path, load_format: str) -> Source:
    """Says what `source` is; with dummy weights it may be the name of a file in MODEL_CONFIGS ("llama-3.1-8b").

    Errors: ModelNotFound, InvalidConfiguration (`load_format`).
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
    if path.is_file():
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if not is_gguf or load_format == "safetensors":
            raise ModelNotFound(str(source), "a model is a GGUF file, or a folder with config.json and *.safetensors")
        return Source("gguf", path, path.parent, (path,))
    return _find_in_folder(source, path, load_format)


def known_configs() -> tuple[str, ...]:
    """The names that `find_source` takes for dummy weights, in order."""
    return tuple(sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))


def _not_there(load_format: str) -> str:
    names = f", and no known shape of that name ({', '.join(known_configs())})" if load_format == "dummy" else ""
    return "there is no such file or folder" + names


def _find_in_folder(source: str | Path, path: Path, load_format: str) -> Source:
    weights = tuple(sorted(path.glob("*.safetensors")))
    config = path / "config.json"
    if load_format != "gguf" and weights and config.is_file():
        return Source("safetensors", path, path, (config, *weights))
    gguf = sorted(path.glob("*.gguf"))
    if load_format != "safetensors" and len(gguf) == 1:
        return find_source(gguf[0], "gguf")
    problem = f"the folder holds {len(gguf)} GGUF files, {len(weights)} safetensors files and "
    raise ModelNotFound(str(source), problem + ("a config.json" if config.is_file() else "no config.json"))


def read_config(source: Source) -> Any:
    """The transformers configuration. Errors: UnsupportedModel, ModelNotFound (unreadable)."""
    try:
        if source.format == "dummy":
            values = json.loads(source.files[0].read_text(encoding="utf-8"))
            if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
                raise ModelNotFound(str(source.path), "its config.json names no model_type")
            if values["model_type"] not in transformers.CONFIG_MAPPING:
                raise UnsupportedModel(values["model_type"], "transformers does not know this model type")
            config = transformers.AutoConfig.for_model(**values)
        else:
            config = transformers.AutoConfig.from_pretrained(source.folder, **source.keywords)
    except KvforgeError:
        raise
    except (OSError, EOFError) as error:
        raise ModelNotFound(str(source.path), f"cannot be read: {_sentence(error)}") from error
    except Exception as error:  # an unknown architecture or a wrong field: transformers has many errors for these
        raise UnsupportedModel(source.name, _sentence(error)) from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(config.model_type, "it is an encoder-decoder; only decoders can be served")
    if getattr(config.get_text_config(decoder=True), "add_cross_attention", False):
        raise UnsupportedModel(config.model_type, "it has cross-attention layers")
    return config


def build(source: Source, config: Any, dtype: torch.dtype, device: Device, progress: Progress, seed: int) -> Any:
    """The transformers model with its weights, in eval mode, on `device`, with eager attention.

    progress is called with 0 to 1. Errors: UnsupportedModel, ModelNotFound (weights missing or unreadable),
    WorkerError or GpuError (no memory).
    """
    try:
        with _bars_to(progress), device.errors(f"loading {source.name}"):
            if source.format == "dummy":
                # Made where they stay: a host would take minutes for what a GPU does in a second.
                with device.random_state(), device.torch_device:
                    torch.manual_seed(seed)
                    model = transformers.AutoModelForCausalLM.from_config(
                        config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
                    )
            else:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    source.folder,
                    config=config,
                    dtype=dtype,
                    attn_implementation="eager",
                    use_safetensors=True if source.format == "safetensors" else None,
                    **source.keywords,
                )
            model = model.to(device.torch_device).eval()
    except OSError as error:
        raise ModelNotFound(str(source.path), f"its weights cannot be read: {_sentence(error)}") from error
    except KvforgeError:
        raise
    except Exception as error:  # not a decoder, or sizes that do not fit: transformers has many errors for these
        raise UnsupportedModel(config.model_type, _sentence(error)) from error
    model.requires_grad_(False)
    return model


def _sentence(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Bar:
    """Stands in for a tqdm bar: reports how far it is instead of drawing it."""

    def __init__(self, progress: Progress, iterable: Any = None, *, total: int | None = None, **_: Any) -> None:
        self._progress = progress
        self._iterable = iterable
        self._total = total if total is not None else (len(iterable) if hasattr(iterable, "__len__") else 0)
        self._done = 0
        self._reported = -1

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update(1)

    def update(self, count: int = 1) -> None:
        self._done += count
        twentieth = 20 * self._done // max(self._total, 1)
        if twentieth != self._reported and self._total > 0:
            self._reported = twentieth
            self._progress("loading weights", min(self._done / self._total, 1.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_args, **_keywords: None  # close, set_description, ...: nothing to draw


@contextlib.contextmanager
def _bars_to(progress: Progress) -> Iterator[None]:
    """transformers draws progress bars on stderr while loading; these go to `progress` instead."""
    weights_share = 0.5  # GGUF files are read (first half), then assigned (second half)
    phases: list[int] = []

    def bar(_factory: object, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Bar:
        base = min(weights_share * len(phases), weights_share)
        phases.append(1)
        return _Bar(lambda phase, done: progress(phase, base + (1 - weights_share) * done), *arguments, **keywords)

    gguf = _gguf_module()
    drawn = getattr(gguf, "tqdm", None)
    previous = transformers_logging.set_tqdm_hook(bar)
    try:
        if drawn is not None:
            gguf.tqdm = lambda *arguments, **keywords: bar(None, arguments, keywords)
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
        if drawn is not None:
            gguf.tqdm = drawn


@contextlib.contextmanager
def gguf_read_once() -> Iterator[None]:
    """Around `read_config` and `build`: transformers does for a GGUF file again and again what is needed once.

    It reads the file for the configuration, and once more for the weights. It makes the table of the tensors' names
    anew for every module of a model, and the more layers, the longer that takes.
    """
    try:
        import gguf
    except ImportError:  # only GGUF files need it
        yield
        return

    class Reader(gguf.GGUFReader):
        data: Any

        def _build_fields(self, *arguments: Any) -> Any:
            # A vocabulary is cut out piece by piece, and every piece of a memmap is one again, which takes longer.
            self.data = np.asarray(self.data)
            return super()._build_fields(*arguments)

    made = {"GGUFReader": functools.cache(Reader), "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map)}
    kept = {name: getattr(gguf, name) for name in made}
    vars(gguf).update(made)
    try:
        yield
    finally:
        vars(gguf).update(kept)


def _gguf_module() -> Any:
    from transformers import modeling_gguf_pytorch_utils

    return inspect.getmodule(modeling_gguf_pytorch_utils.load_gguf_checkpoint)
