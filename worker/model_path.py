"""Where a worker's model is. Imports no torch: what is wrong with the files is told before that takes seconds."""

from __future__ import annotations

from pathlib import Path

from kvforge.models.files import check_files, find_files
from kvforge.models.store import find
from kvforge.protocol.errors import ModelNotFound

from .config import WorkerConfig


def find_model(config: WorkerConfig) -> str:
    """A path, the name of a shape (for dummy weights), or a name that `kvforge pull` has fetched before.

    Every header is read. Errors: ModelNotFound, UnsupportedModel (damaged, or no whole model).
    """
    path = Path(config.model).expanduser()
    if config.load_format == "dummy":
        return config.model
    if not path.exists():
        return str(find(config.model))
    if config.load_format in ("auto", "gguf", "safetensors"):  # another one is told where it is looked at
        try:
            check_files(find_files(path, config.model, config.load_format))
        except OSError as error:
            raise ModelNotFound(config.model, f"cannot be read: {error}") from error
    return config.model
