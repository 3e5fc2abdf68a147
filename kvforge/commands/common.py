"""What the subcommands share: the global options, the client they open, and how they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvforge.client.blocking import Client
from kvforge.protocol import transport
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import MODEL_DEFAULTS, ModelInfo, WorkerHealth

TIMEOUT_S = 10.0
Run = Callable[[argparse.Namespace], int]


def global_options(parser: argparse.ArgumentParser, *, top: bool) -> None:
    """The options that may stand before or after the subcommand."""
    # Declared twice: only the outer one sets defaults, or the inner one would undo what stood before the subcommand.
    default: Any = None if top else argparse.SUPPRESS
    group = parser.add_argument_group("where" if top else "also")
    group.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="DIR",
        default=default,
        help="sockets and shared tables [KVFORGE_RUNTIME_DIR]",
    )
    group.add_argument(
        "--endpoint", metavar="URL", default=default, help="the coordinator, as ipc://PATH [KVFORGE_ENDPOINT]"
    )
    group.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        default=default,
        help=f"seconds the coordinator may take to answer a command [{TIMEOUT_S:g}]",
    )


def add(subparsers: Any, name: str, run: Run, summary: str, **settings: Any) -> argparse.ArgumentParser:
    """Declares a subcommand. `summary` is a sentence."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary, **settings)
    parser.set_defaults(run=run)
    global_options(parser, top=False)
    return parser


def open_client(options: argparse.Namespace, tokenizer: str | None = None) -> Client:
    """A client of the coordinator that the options name."""
    endpoint = options.endpoint
    if endpoint is None and options.runtime_dir is not None:
        endpoint = transport.client_endpoint(options.runtime_dir)
    return Client(endpoint, timeout_s=options.timeout or TIMEOUT_S, tokenizer=tokenizer)


def runtime_dir(options: argparse.Namespace) -> Path:
    """The runtime folder that the options or the environment name, absolute."""
    chosen: Path = options.runtime_dir if options.runtime_dir is not None else transport.default_runtime_dir()
    return chosen.absolute()


def seconds(text: str) -> float:
    """Type of an option: seconds above 0."""
    value = float(text)
    if not 0 < value <= 86_400:
        raise ValueError
    return value


seconds.__name__ = "number of seconds (above 0, at most a day)"


def token_ids(text: str, field: str) -> list[int]:
    """Token ids from `1,2,3`. Raises InvalidRequest naming `field`."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequest(field, f"{text!r} is not a list of token ids like 1,2,3") from None


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


def print_sampling(model: ModelInfo) -> None:
    """The line that says what a request gets that names no sampling of its own."""
    chosen = [f"{name} {getattr(model.sampling, name):g}" for name in MODEL_DEFAULTS]
    print(f"sampling unless a request says otherwise: {', '.join(chosen)}")


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)
