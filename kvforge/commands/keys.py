"""kvforge keys: makes the keys by which a coordinator and its clients and workers know each other over a network."""

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

WHOSE = ("server", "client", "worker", "api")
PORT = 5570  # any that is free will do
# What an owner may be allowed to do, and what it is where nothing is said.
RIGHTS = {"client": ("submit", "read", "admin"), "api": ("generate", "see", "admin")}
GIVEN = {"client": "submit,read", "api": "generate"}


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parser = parsing.add(
        subparsers,
        "keys",
        run,
        "Make a key file, and print the lines that the coordinator's configuration needs for it.",
    )
    parser.add_argument(
        "whose", choices=WHOSE, help="the coordinator's own, those of a client or worker, or a key of the HTTP gateway"
    )
    parser.add_argument("file", type=Path, help="the file to be made; it holds a secret and stays with its owner")
    parser.add_argument("--name", help="what the coordinator calls its owner [the file's name]")
    parser.add_argument(
        "--tenant", help="of a client or API key: for which tenant it acts; a client: * for any [its name]"
    )
    parser.add_argument(
        "--rights",
        help="of a client: of submit, read, admin [submit,read]; of an API key: of generate, see, admin [generate]",
    )


def run(options: argparse.Namespace) -> int:
    """Makes the file, and prints. Raises InvalidConfiguration naming an option, or where the file cannot be made."""
    whose: str = options.whose
    file: Path = options.file.expanduser().absolute()
    name: str = options.name or file.stem
    allowed = _allowed(options, whose, name)  # before there is a file
    if whose == "api":
        return _api(file, name, allowed)
    pair = keys.make()
    keys.write(file, pair, "the coordinator" if whose == "server" else f"{whose} {name}")
    if whose == "server":
        printing.say(f"{file} is made. Its public key, for --server-key of clients and server_key of workers:")
        printing.say(f"    '{pair.public}'")
        printing.say("Into the coordinator's configuration:")
        print(f'[tcp]\nlisten = "tcp://*:{PORT}"\nkey_file = {_text(file)}')
    else:
        printing.say(f"{file} is made. Into the coordinator's configuration:")
        print(f'[access.{whose}s.{_text(name)}]\nkey = "{pair.public}"{allowed}')
    return OK


def _api(file: Path, name: str, allowed: str) -> int:
    """A key of the gateway: random, of 256 bits, so that its plain digest says nothing about it."""
    secret = f"kvf-{secrets.token_urlsafe(32)}"
    keys.write_secret(file, f"{secret}\n")
    printing.say(f"{file} is made; what is in it is sent as `Authorization: Bearer ...`. Into gateway.toml:")
    print(f'[keys.{_text(name)}]\nhash = "sha256:{hashlib.sha256(secret.encode()).hexdigest()}"{allowed}')
    return OK


def _allowed(options: argparse.Namespace, whose: str, name: str) -> str:
    """The lines of what its owner may do; none for who has no rights of its own. Raises InvalidConfiguration."""
    known = RIGHTS.get(whose)
    if known is None:
        for option in ("tenant", "rights"):
            if getattr(options, option) is not None:
                raise InvalidConfiguration(f"--{option}", f"is for a client or an API key, not for a {whose}")
        return ""
    rights = [right.strip() for right in (GIVEN[whose] if options.rights is None else options.rights).split(",")]
    if wrong := [right for right in rights if right not in known]:
        raise InvalidConfiguration("--rights", f"holds {wrong[0]!r}; there are {', '.join(known)}")
    if whose == "api" and options.tenant == "*":
        raise InvalidConfiguration("--tenant", "is *; an API key acts for one tenant: name it")
    return f"\ntenant = {_text(options.tenant or name)}\nrights = [{', '.join(map(_text, rights))}]"


def _text(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)
