"""The name of a served model, independent of how it is served and how its files were found."""

from __future__ import annotations

from pathlib import Path

from .store import KNOWN_MODELS

# A folder of huggingface_hub's cache: models--ORG--REPO/snapshots/COMMIT.
HUB_PREFIX, HUB_SNAPSHOTS = "models--", "snapshots"


def name_of(path: Path) -> str:
    """Return the name of the model at a path.

    Args:
        path: A GGUF file, or a Hugging Face folder.

    Returns:
        A known model's own name, a Hugging Face name, or else the name of the file (without its ending) or of the
        folder.
    """
    known = next((name for name, model in KNOWN_MODELS.items() if model.file_name == path.name), "")
    if known:
        return known
    for folder, inside in zip(path.parts, path.parts[1:], strict=False):
        if folder.startswith(HUB_PREFIX) and inside == HUB_SNAPSHOTS:
            name = folder.removeprefix(HUB_PREFIX).replace("--", "/", 1)
            return f"{name}:{path.stem}" if path.suffix == ".gguf" else name
    return path.stem if path.suffix == ".gguf" and not path.is_dir() else path.name
