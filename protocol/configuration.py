"""From a TOML file to a frozen configuration: an unknown key is an error that names the key."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from .errors import InvalidConfiguration

T = TypeVar("T", bound=msgspec.Struct)


def load(path: Path, cls: type[T]) -> T:
    """Reads `path` into `cls`. Raises InvalidConfiguration naming the file or the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InvalidConfiguration(str(path), f"cannot be read: {problem}") from None
    try:
        return convert(tomllib.loads(text), cls)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfiguration(str(path), f"is not TOML: {error}") from None


def convert(values: object, cls: type[T]) -> T:
    """Checks plain values into `cls`. Raises InvalidConfiguration naming the key."""
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        where = path.rstrip("`").lstrip(".")
        if "unknown field `" in text:
            key = text.split("unknown field `", 1)[1].rstrip("`")
            raise InvalidConfiguration(f"{where}.{key}".lstrip("."), "there is no such setting") from None
        if "missing required field `" in text:
            key = text.split("missing required field `", 1)[1].rstrip("`")
            raise InvalidConfiguration(f"{where}.{key}".lstrip("."), "is required") from None
        raise InvalidConfiguration(where or "configuration", text) from None


def expand(path: str) -> Path:
    """A path from a configuration file, with ~ and $VARIABLES expanded, made absolute."""
    return Path(os.path.expandvars(path)).expanduser().absolute()
