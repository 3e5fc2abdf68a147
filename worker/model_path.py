"""Locate a worker's models without importing torch, so that file problems show before that slow import."""

from __future__ import annotations

from pathlib import Path

from kvforge.models.files import check_files, find_files
from kvforge.models.store import find
from kvforge.protocol.errors import InvalidConfiguration, ModelNotFound

from .config import WorkerConfig

MTP = "mtp"  # in place of a draft model: the multi-token prediction module of the model's own checkpoint


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
    return _find(config.model, config.load_format)


def find_draft_model(config: WorkerConfig) -> str:
    """Locate the configured draft model, as `find_model` does; "" if none is configured, MTP for the model's own heads.

    Raises:
        InvalidConfiguration: Names `draft_model`: there is no such model, or its files cannot be read.
        UnsupportedModel: A file is damaged or missing.
    """
    if config.draft_model in ("", MTP):
        return config.draft_model
    try:
        return _find(config.draft_model, config.load_format)
    except ModelNotFound as error:
        raise InvalidConfiguration("draft_model", str(error)) from error


def _find(model: str, load_format: str) -> str:
    path = Path(model).expanduser()
    if load_format == "dummy":
        return model
    if not path.exists():
        return str(find(model))
    if load_format in ("auto", "gguf", "safetensors"):  # load_model rejects an unknown format
        try:
            check_files(find_files(path, model, load_format))
        except OSError as error:
            raise ModelNotFound(model, f"cannot be read: {error}") from error
    return model
