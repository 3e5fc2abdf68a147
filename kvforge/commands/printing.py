"""How the subcommands print: tables and lines for people, one JSON document for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvforge.protocol.messages import MODEL_DEFAULTS, ModelInfo, WorkerHealth


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(msgspec.json.encode(plain(value)).decode())


def plain(value: Any) -> Any:
    """A message or result as dictionaries and lists, without what only the wire needs."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, msgspec.Struct):
        names = [name for name in value.__struct_fields__ if name != "rid"]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output: numbers to the right, words to the left."""
    cells = [[str(item) for item in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(head), *cells]) for column in range(len(head))]
    right = [bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(head))]
    for line in [list(head), *cells]:
        parts = [
            cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(line, widths, right, strict=True)
        ]
        print("  ".join(parts).rstrip())


def size(count: int) -> str:
    """A number of bytes for people."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def print_device_bytes(worker: WorkerHealth) -> None:
    """The line below a worker's own that says what its device's memory is for, once it is known."""
    if worker.device_bytes:
        parts = ", ".join(f"{purpose} {size(held)}" for purpose, held in worker.device_bytes.items())
        print(f"    device memory: {parts}")


def print_kernels(worker: WorkerHealth) -> None:
    """The lines below a worker's own that say which kernels serve, and why not others."""
    for what, kernel in worker.kernels.items():
        print(f"    {what}: {kernel}")


def print_model(model: ModelInfo) -> None:
    """The lines that say what the model is computed in, and what a request gets that names no sampling of its own."""
    if model.dtype:
        weights = f", weights in {model.weight_dtype}" if model.weight_dtype not in ("", model.dtype) else ""
        print(f"computed in {model.dtype}{weights}")
    chosen = [f"{name} {getattr(model.sampling, name):g}" for name in MODEL_DEFAULTS]
    print(f"sampling unless a request says otherwise: {', '.join(chosen)}")


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)
