"""`kvforge pull MODEL`: make a model available on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.models.store import pull

from . import parsing
from .progress import Progress


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(subparsers, "pull", run, "Fetch a model into the cache folder, or check a local one.")
    parser.add_argument(
        "model",
        help="smollm2-135m, a path, or a Hugging Face name: org/name, org/name:FILE.gguf, org/name@REVISION",
    )


def run(options: argparse.Namespace) -> int:
    """Print the model's path."""
    progress = Progress()
    try:
        path = pull(options.model, progress=lambda phase, fraction: progress.step(options.model, phase, fraction))
    finally:
        progress.close()
    print(path)
    return 0
