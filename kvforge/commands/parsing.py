"""What the subcommands share of their command lines: the global options, and the client that these name."""

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
    """Declare the options that may stand before or after the subcommand; of one that does not connect, the folder."""
    # They are declared twice. Only the outer ones set defaults: inner ones would undo what stood before the subcommand.
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
        "--key-file", metavar="FILE", default=default, help="for tcp://, our own keys [KVFORGE_KEY_FILE]"
    )
    group.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        default=default,
        help=f"seconds the coordinator may take to answer a command [{TIMEOUT_S:g}]",
    )
    group.add_argument(
        "--reconnect",
        type=perhaps_seconds,
        metavar="S",
        default=default,
        help=f"seconds to try again where the connection is lost; 0: not at all [{RECONNECT_S:g}]",
    )


def add(
    subparsers: Any, name: str, run: Run, summary: str, *, connects: bool = True, **settings: Any
) -> argparse.ArgumentParser:
    """Declare a subcommand.

    Args:
        summary: a sentence.
        connects: it asks a coordinator, so it takes the options that name one; else --runtime-dir alone.
        settings: of argparse, like `aliases`.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary, **settings)
    parser.set_defaults(run=run)
    global_options(parser, top=False, connects=connects)
    return parser


def open_client(options: argparse.Namespace, tokenizer: str | None = None) -> Client:
    """A client of the coordinator that the options name."""
    return Client(**connection(options), tokenizer=tokenizer)


def connection(options: argparse.Namespace) -> dict[str, Any]:
    """What a client of it is made with, blocking or not."""
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
    """How long to try again where the coordinator is gone; 0: not at all."""
    return RECONNECT_S if options.reconnect is None else float(options.reconnect)


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


def perhaps_seconds(text: str) -> float:
    """Type of an option: seconds, 0 too."""
    return float(text) and seconds(text)


perhaps_seconds.__name__ = "number of seconds (0 to a day)"


def size(text: str) -> int:
    """Type of an option: a number of bytes, like 4G or 512MiB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def token_ids(text: str, field: str) -> list[int]:
    """Token ids from `1,2,3`. Raises InvalidRequest naming `field`."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequest(field, f"{text!r} is not a list of token ids like 1,2,3") from None
