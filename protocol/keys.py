"""CURVE key pairs that identify peers on a network: creating, storing and reading them.

A key is 32 bytes, written as 40 characters of Z85 (https://rfc.zeromq.org/spec/32/). A key file is TOML with `public`
and `secret`; only its owner may read it. On Windows that is not checked: its files have access lists instead of an
owner and a mode.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from .errors import InvalidConfiguration

KEY_BYTES, KEY_LENGTH = 32, 40
FILE_BYTES_MAX = 4096
HEAD = "# Keys of {}. The secret grants its access: keep this file readable by its owner only.\n"


class KeyPair(NamedTuple):
    """A public and a secret key as text."""

    public: str
    secret: str


def make() -> KeyPair:
    """Create a key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def write(path: Path, pair: KeyPair, owner: str) -> None:
    """Create the file of a key pair (0600).

    Args:
        path: The file.
        pair: The key pair.
        owner: The owner, for the first line of the file.

    Raises:
        InvalidConfiguration: The file exists or cannot be created.
    """
    write_secret(path, f'{HEAD.format(owner)}public = "{pair.public}"\nsecret = "{pair.secret}"\n')


def write_secret(path: Path, text: str) -> None:
    """Create a file that only its owner can read (0600).

    Raises:
        InvalidConfiguration: The file exists or cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        problem = f"{path} exists: peers that know its key would not know a new one; remove it to replace the key"
        raise InvalidConfiguration("key_file", problem) from None
    except OSError as error:
        raise InvalidConfiguration("key_file", f"{path} cannot be made: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def read(path: Path, field: str = "key_file") -> KeyPair:
    """Read the key pair in a file.

    Args:
        path: The file.
        field: The setting or argument that names it.

    Raises:
        InvalidConfiguration: The file is not a key file, or other users can read it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidConfiguration(field, f"{path} cannot be read: {error.strerror}") from None
    if sys.platform != "win32":
        _check_secret(path, status, field)
    try:
        values = tomllib.loads(data.decode())
        secret = str(values["secret"])
        bytes_of(secret, field)
        public = zmq.curve_public(secret.encode()).decode()
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, InvalidConfiguration):
        raise InvalidConfiguration(field, f"{path} is not a key file: create one with `kvforge keys`") from None
    if values.get("public", public) != public:
        raise InvalidConfiguration(field, f"the public key in {path} does not match its secret")
    return KeyPair(public, secret)


def _check_secret(path: Path, status: os.stat_result, field: str) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise InvalidConfiguration(field, f"{path} belongs to another user (uid {status.st_uid}), who knows the secret")
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        problem = f"{path} has mode {mode:04o}, so others may know the secret: make a new one, or chmod 0600 it"
        raise InvalidConfiguration(field, problem)


def bytes_of(key: str, field: str) -> bytes:
    """Return a key as 32 bytes.

    Raises:
        InvalidConfiguration: The text is not a key. Names `field`.
    """
    try:
        found = z85.decode(key.encode("ascii")) if len(key) == KEY_LENGTH else b""
    except (KeyError, ValueError, struct.error):
        found = b""
    if len(found) != KEY_BYTES:
        raise InvalidConfiguration(
            field, f"invalid key {key!r}: expected {KEY_LENGTH} characters as printed by `kvforge keys`"
        )
    return found


def text_of(key: bytes) -> str:
    """Return a key of 32 bytes as text."""
    return z85.encode(key).decode()
