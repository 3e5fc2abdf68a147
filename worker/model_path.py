"""Locate a worker's model without importing torch, so that file problems show before that slow import."""

from __future__ import annotations

from pathlib import Path

from kvforge.models.files import check_files, find_files
from kvforge.models.store import find
from kvforge.protocol.errors import ModelNotFound

from .config import WorkerConfig


def find_model(config: WorkerConfig) -> str:
    """Locate the configured model and read every file header.

    Args:
        config: The worker's configuration.

    Returns:
        A path, the name of a known shape (for dummy weights), or the folder that `kvforge pull` fetched.

    Raises:
        ModelNotFound: There is no such model, or its files cannot be read.
        UnsupportedModel: A file is damaged or missing.
    """
    path = Path(config.model).expanduser()
    if config.load_format == "dummy":
        return config.model
    if not path.exists():
        return str(find(config.model))
    if config.load_format in ("auto", "gguf", "safetensors"):  # load_model rejects an unknown format
        try:
            check_files(find_files(path, config.model, config.load_format))
        except OSError as error:
            raise ModelNotFound(config.model, f"cannot be read: {error}") from error
    return config.model
