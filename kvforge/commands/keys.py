"""`kvforge keys`: create the keys that identify a coordinator, its clients and workers on a network."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from kvforge.protocol import keys
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.exits import OK

from . import parsing, printing

KINDS = ("server", "client", "worker", "api")
PORT = 5570  # any free port
# The rights of an owner: all, and the default ones.
RIGHTS = {"client": ("submit", "read", "admin"), "api": ("generate", "see", "admin")}
GIVEN = {"client": "submit,read", "api": "generate"}


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(
        subparsers,
        "keys",
        run,
        "Create a key file, and print its lines for the coordinator's configuration.",
    )
    parser.add_argument(
        "kind", choices=KINDS, help="keys of the coordinator, of a client or worker, or an API key of the HTTP gateway"
    )
    parser.add_argument("file", type=Path, help="the file to create; it holds a secret and stays with its owner")
    parser.add_argument("--name", help="the owner's name in the configuration [the file's name]")
    parser.add_argument("--tenant", help="tenant of a client or API key; * for a client of all tenants [its name]")
    parser.add_argument(
        "--rights",
        help="client: submit, read, admin [submit,read]; API key: generate, see, admin [generate]",
    )


def run(options: argparse.Namespace) -> int:
    """Create the file, and print the lines for the configuration.

    Raises:
        InvalidConfiguration: Names an option, or the file cannot be created.
    """
    kind: str = options.kind
    file: Path = options.file.expanduser().absolute()
    name: str = options.name or file.stem
    allowed = _allowed(options, kind, name)  # before the file is created
    if kind == "api":
        return _api(file, name, allowed)
    pair = keys.make()
    keys.write(file, pair, "the coordinator" if kind == "server" else f"{kind} {name}")
    if kind == "server":
        printing.print_note(f"created {file}. Its public key, for --server-key of clients and server_key of workers:")
        printing.print_note(f"    '{pair.public}'")
        printing.print_note("Add to the coordinator's configuration:")
        print(f'[tcp]\nlisten = "tcp://*:{PORT}"\nkey_file = {_text(file)}')
    else:
        printing.print_note(f"created {file}. Add to the coordinator's configuration:")
        print(f'[access.{kind}s.{_text(name)}]\nkey = "{pair.public}"{allowed}')
    return OK


def _api(file: Path, name: str, allowed: str) -> int:
    """Create an API key of the gateway: 256 random bits, so that its plain digest reveals nothing."""
    secret = f"kvf-{secrets.token_urlsafe(32)}"
    keys.write_secret(file, f"{secret}\n")
    printing.print_note(f"created {file}; send its content as `Authorization: Bearer ...`. Add to gateway.toml:")
    print(f'[keys.{_text(name)}]\nhash = "sha256:{hashlib.sha256(secret.encode()).hexdigest()}"{allowed}')
    return OK


def _allowed(options: argparse.Namespace, kind: str, name: str) -> str:
    """Return the lines with the owner's rights; none for an owner without rights. Raises InvalidConfiguration."""
    known = RIGHTS.get(kind)
    if known is None:
        for option in ("tenant", "rights"):
            if getattr(options, option) is not None:
                raise InvalidConfiguration(f"--{option}", f"applies to a client or an API key, not to a {kind}")
        return ""
    rights = [right.strip() for right in (GIVEN[kind] if options.rights is None else options.rights).split(",")]
    if wrong := [right for right in rights if right not in known]:
        raise InvalidConfiguration("--rights", f"holds {wrong[0]!r}; expected {', '.join(known)}")
    if kind == "api" and options.tenant == "*":
        raise InvalidConfiguration("--tenant", "is *; an API key acts for one tenant: name that tenant")
    return f"\ntenant = {_text(options.tenant or name)}\nrights = [{', '.join(map(_text, rights))}]"


def _text(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)
