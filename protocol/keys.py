"""The keys by which peers on a network know each other (CURVE): made, kept in files, read.

A key is 32 bytes, written as 40 characters of Z85 (https://rfc.zeromq.org/spec/32/). A key file is TOML with `public`
and `secret`; only its owner may read it.
"""

from __future__ import annotations

import os
import stat
import struct
import tomllib
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from .errors import InvalidConfiguration

KEY_BYTES, KEY_LENGTH = 32, 40
FILE_BYTES_MAX = 4096
HEAD = "# Keys of {}. Whoever can read the secret can pass for it: only its owner may read this file.\n"


class KeyPair(NamedTuple):
    """Both as text."""

    public: str
    secret: str


def make() -> KeyPair:
    """A new pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def write(path: Path, pair: KeyPair, whose: str) -> None:
    """Makes the file of a pair (0600). whose: words for its first line. Raises InvalidConfiguration if it exists."""
    write_secret(path, f'{HEAD.format(whose)}public = "{pair.public}"\nsecret = "{pair.secret}"\n')


def write_secret(path: Path, text: str) -> None:
    """Makes a file that is its owner's alone (0600). Raises InvalidConfiguration if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        problem = f"{path} exists: whoever knows its key would not know the new one; remove it if that is meant"
        raise InvalidConfiguration("key_file", problem) from None
    except OSError as error:
        raise InvalidConfiguration("key_file", f"{path} cannot be made: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def read(path: Path, field: str = "key_file") -> KeyPair:
    """The pair in a file. Raises InvalidConfiguration naming `field`, also where others could read the file."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidConfiguration(field, f"{path} cannot be read: {error.strerror}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise InvalidConfiguration(field, f"{path} belongs to another user (uid {status.st_uid}), who knows the secret")
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        problem = f"{path} has mode {mode:04o}, so others may know the secret: make a new one, or chmod 0600 it"
        raise InvalidConfiguration(field, problem)
    try:
        values = tomllib.loads(data.decode())
        secret = str(values["secret"])
        bytes_of(secret, field)
        public = zmq.curve_public(secret.encode()).decode()
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, InvalidConfiguration):
        raise InvalidConfiguration(field, f"{path} is no key file: `kvforge keys` makes one") from None
    if values.get("public", public) != public:
        raise InvalidConfiguration(field, f"the public key in {path} is not that of the secret beside it")
    return KeyPair(public, secret)


def bytes_of(key: str, field: str) -> bytes:
    """A key as 32 bytes. Raises InvalidConfiguration naming `field`."""
    try:
        found = z85.decode(key.encode("ascii")) if len(key) == KEY_LENGTH else b""
    except (KeyError, ValueError, struct.error):
        found = b""
    if len(found) != KEY_BYTES:
        raise InvalidConfiguration(field, f"{key!r} is no key: {KEY_LENGTH} characters, as `kvforge keys` prints them")
    return found


def text_of(key: bytes) -> str:
    """A key of 32 bytes as text."""
    return z85.encode(key).decode()
