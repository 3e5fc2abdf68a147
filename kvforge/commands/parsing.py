"""Shared parts of the subcommands: the global options, and the client that they name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvforge.client.blocking import Client
from kvforge.client.options import RECONNECT_S
from kvforge.protocol import transport
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.sizes import parse_size

TIMEOUT_S = 10.0
Run = Callable[[argparse.Namespace], int]


def global_options(parser: argparse.ArgumentParser, *, top: bool, connects: bool = True) -> None:
    """Declare the options that may stand before or after the subcommand.

    Args:
        parser: The parser.
        top: It is the outer parser.
        connects: The subcommand connects to a coordinator; otherwise only --runtime-dir is declared.
    """
    # Declared twice. Only the outer parser sets defaults: inner ones would override values before the subcommand.
    default: Any = None if top else argparse.SUPPRESS
    group = parser.add_argument_group("where" if top else "also")
    group.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="DIR",
        default=default,
        help="sockets and shared tables [KVFORGE_RUNTIME_DIR]",
    )
    if not connects:
        return
    group.add_argument(
        "--endpoint",
        metavar="URL",
        default=default,
        help="the coordinator, as ipc://PATH or tcp://HOST:PORT [KVFORGE_ENDPOINT]",
    )
    group.add_argument(
        "--server-key", metavar="KEY", default=default, help="for tcp://, its public key [KVFORGE_SERVER_KEY]"
    )
    group.add_argument(
        "--key-file", metavar="FILE", default=default, help="for tcp://, the client's keys [KVFORGE_KEY_FILE]"
    )
    group.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        default=default,
        help=f"seconds to wait for the answer to a command [{TIMEOUT_S:g}]",
    )
    group.add_argument(
        "--reconnect",
        type=perhaps_seconds,
        metavar="S",
        default=default,
        help=f"seconds to retry a lost connection; 0: not at all [{RECONNECT_S:g}]",
    )


def add(
    subparsers: Any, name: str, run: Run, summary: str, *, connects: bool = True, **settings: Any
) -> argparse.ArgumentParser:
    """Declare a subcommand.

    Args:
        subparsers: The subparsers of the outer parser.
        name: The subcommand's name.
        run: Its function.
        summary: A sentence.
        connects: It connects to a coordinator, so it takes the options that name one; otherwise --runtime-dir alone.
        settings: Settings of argparse, like `aliases`.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary, **settings)
    parser.set_defaults(run=run)
    global_options(parser, top=False, connects=connects)
    return parser


def open_client(options: argparse.Namespace, tokenizer: str | None = None) -> Client:
    """Return a client of the coordinator that the options name."""
    return Client(**connection(options), tokenizer=tokenizer)


def connection(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of that client, blocking or not."""
    endpoint = options.endpoint
    if endpoint is None and options.runtime_dir is not None:
        endpoint = transport.client_endpoint(options.runtime_dir)
    return {
        "endpoint": endpoint,
        "timeout_s": options.timeout or TIMEOUT_S,
        "reconnect_s": reconnect_s(options),
        "server_key": options.server_key,
        "key_file": options.key_file,
    }


def reconnect_s(options: argparse.Namespace) -> float:
    """Return how long to retry when the coordinator is gone, in seconds; 0: not at all."""
    return RECONNECT_S if options.reconnect is None else float(options.reconnect)


def runtime_dir(options: argparse.Namespace) -> Path:
    """Return the runtime folder that the options or the environment name, absolute."""
    chosen: Path = options.runtime_dir if options.runtime_dir is not None else transport.default_runtime_dir()
    return chosen.absolute()


def seconds(text: str) -> float:
    """Parse an option of seconds above 0."""
    value = float(text)
    if not 0 < value <= 86_400:
        raise ValueError
    return value


seconds.__name__ = "number of seconds (above 0, at most a day)"


def perhaps_seconds(text: str) -> float:
    """Parse an option of seconds, 0 included."""
    return float(text) and seconds(text)


perhaps_seconds.__name__ = "number of seconds (0 to a day)"


def size(text: str) -> int:
    """Parse an option of bytes, like 4G or 512MiB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def token_ids(text: str, field: str) -> list[int]:
    """Parse token ids like `1,2,3`.

    Raises:
        InvalidRequest: Names `field`.
    """
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequest(field, f"{text!r} is not a list of token ids like 1,2,3") from None
