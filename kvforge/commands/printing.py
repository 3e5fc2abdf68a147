"""Output of the subcommands: tables and lines for people, one JSON document for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvforge.protocol.messages import MODEL_DEFAULTS, ModelInfo, WorkerHealth


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(msgspec.json.encode(plain(value)).decode())


def plain(value: Any) -> Any:
    """Return a message or result as dictionaries and lists, without fields that only the wire needs."""
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
    """Print a table on standard output, with numbers aligned to the right and words to the left."""
    cells = [[str(item) for item in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(head), *cells]) for column in range(len(head))]
    right = [bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(head))]
    for line in [list(head), *cells]:
        parts = [
            cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(line, widths, right, strict=True)
        ]
        print("  ".join(parts).rstrip())


def size(count: int) -> str:
    """Return a number of bytes for people."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def print_device_bytes(worker: WorkerHealth) -> None:
    """Print a worker's device memory by purpose, once it is known."""
    if worker.device_bytes:
        parts = ", ".join(f"{purpose} {size(held)}" for purpose, held in worker.device_bytes.items())
        print(f"    device memory: {parts}")


def print_drafts(worker: WorkerHealth) -> None:
    """Print how many tokens a worker drafts, and how many were right, if it drafts any."""
    if not worker.drafts:
        return
    found = "none verified yet"
    if worker.drafted_total:
        percent = 100 * worker.accepted_total / worker.drafted_total
        found = f"{worker.accepted_total} of {worker.drafted_total} accepted ({percent:.0f} %)"
    print(f"    drafts: at most {worker.drafts} for a request in a step; {found}")


def print_host_tier(worker: WorkerHealth) -> None:
    """Print the use of a worker's host file, if it has one."""
    if worker.host_blocks:
        moved = f"{worker.host_saved_total} saved, {worker.host_loaded_total} loaded, {worker.host_missed_total} missed"
        if worker.host_swapped_total:
            saved_s = worker.host_swap_saved_us_total / 1e6
            moved += f"; {worker.host_swapped_total} requests swapped in, {saved_s:.1f} s saved"
        if worker.host_returns_total:
            used = f"{worker.host_returns_used_total} used"
            moved += f"; {worker.host_returns_total} sequences back before a request, {used}"
        print(f"    host tier: {worker.host_cached} of {worker.host_blocks} blocks cached; {moved}")


def print_disk_tier(worker: WorkerHealth) -> None:
    """Print the use of a worker's disk tier, if it has one."""
    disk = worker.disk
    if disk is None:
        return
    missed = disk.missed_tags_total + disk.missed_checksums_total
    moved = f"{disk.saved_total} saved, {disk.loaded_total} loaded, {missed} missed, {disk.failed_total} failed"
    print(f"    disk tier{' (off)' if disk.off else ''}: {disk.cached} of {disk.blocks} blocks cached; {moved}")


def print_kernels(worker: WorkerHealth) -> None:
    """Print the kernels that a worker uses, and why others are not used."""
    for what, kernel in worker.kernels.items():
        print(f"    {what}: {kernel}")


def print_model(model: ModelInfo) -> None:
    """Print the model's dtypes and the sampling defaults of a request."""
    if model.dtype:
        weights = f", weights in {model.weight_dtype}" if model.weight_dtype not in ("", model.dtype) else ""
        layout = f", the cache holds {model.kv_layout}" if model.kv_layout not in ("", "K and V") else ""
        states = f", recurrent states in {model.state_dtype}" if model.state_dtype else ""
        print(f"computed in {model.dtype}{weights}{layout}{states}")
    chosen = [f"{name} {getattr(model.sampling, name):g}" for name in MODEL_DEFAULTS]
    print(f"sampling defaults: {', '.join(chosen)}")


def print_note(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)
