"""Load a TOML file into a frozen configuration. An error names an unknown key and the nearest known one."""

from __future__ import annotations

import os
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from .deprecated_settings import Warn, log_warning, renamed
from .errors import InvalidConfiguration
from .sizes import parse_size
from .suggestions import nearest

T = TypeVar("T", bound=msgspec.Struct)
_BYTES = re.compile(r"(^|_)bytes(_|$)")


def load(path: Path, cls: type[T], warn: Warn = log_warning) -> T:
    """Read a TOML file into a configuration.

    Args:
        path: The file.
        cls: The class of the configuration.
        warn: Called with a text for each deprecated key.

    Raises:
        InvalidConfiguration: Names the file or the key.
    """
    return convert(read_toml(path), cls, warn)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        InvalidConfiguration: Names the file.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InvalidConfiguration(str(path), f"cannot be read: {problem}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfiguration(str(path), f"is not TOML: {error}") from None


def convert(values: object, cls: type[T], warn: Warn = log_warning) -> T:
    """Check plain values and convert them to a configuration.

    Args:
        values: The values as TOML gives them. Sizes in bytes may be texts like "4G".
        cls: The class of the configuration.
        warn: Called with a text for each deprecated key.

    Raises:
        InvalidConfiguration: Names the key.
    """
    try:
        return msgspec.convert(_sized(_renamed(values, cls, "", warn)), cls)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        where = path.rstrip("`").lstrip(".")
        if "unknown field `" in text:
            key = text.split("unknown field `", 1)[1].rstrip("`")
            problem = f"there is no such setting{_suggestion(cls, where, key)}"
            raise InvalidConfiguration(f"{where}.{key}".lstrip("."), problem) from None
        if "missing required field `" in text:
            key = text.split("missing required field `", 1)[1].rstrip("`")
            raise InvalidConfiguration(f"{where}.{key}".lstrip("."), "is required") from None
        raise InvalidConfiguration(where or "configuration", text) from None


def expand(path: str) -> Path:
    """Return a path from a configuration file as an absolute path, with ~ and $VARIABLES expanded."""
    return Path(os.path.expandvars(path)).expanduser().absolute()


def _renamed(values: object, cls: type[msgspec.Struct], section: str, warn: Warn) -> object:
    """Return the same values with the new names of deprecated keys, in all sections."""
    if not isinstance(values, dict):
        return values
    found = renamed(values, cls, section, warn)
    for field in msgspec.structs.fields(cls):
        inner, name = _struct_of(field.type), field.encode_name
        if inner is None or not isinstance(found.get(name), dict):
            continue
        path = f"{section}.{name}".lstrip(".")
        if get_origin(field.type) is dict:
            found[name] = {key: _renamed(value, inner, f"{path}.{key}", warn) for key, value in found[name].items()}
        else:
            found[name] = _renamed(found[name], inner, path, warn)
    return found


def _sized(values: object, path: str = "") -> object:
    """Return the same values with size texts converted to numbers of bytes."""
    if not isinstance(values, dict):
        return values
    found: dict[object, object] = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, str) and isinstance(key, str) and _BYTES.search(key):
            try:
                found[key] = parse_size(value)
            except ValueError as error:
                raise InvalidConfiguration(where, str(error)) from None
        else:
            found[key] = _sized(value, where)
    return found


def _suggestion(cls: type[msgspec.Struct], where: str, key: str) -> str:
    """Suggest the nearest setting: in the section of the key, or of the same name in another section."""
    section = _section(cls, where)
    if section is None:
        return ""
    names = [field.encode_name for field in msgspec.structs.fields(section)]
    places = {name.rpartition(".")[2]: name for name in _settings(cls)}
    if key in places:
        return f"; did you mean {places[key]}?"
    near = nearest(key, names) or places.get(nearest(key, places), "")
    return f"; did you mean {near}?" if near else ""


def _section(cls: type[msgspec.Struct], where: str) -> type[msgspec.Struct] | None:
    """Return the structure at a path like `limits` or `keys[...]`."""
    at: type[msgspec.Struct] | None = cls
    for part in filter(None, where.replace("[...]", "").split(".")):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(at)} if at is not None else {}
        at = _struct_of(fields.get(part))
    return at


def _settings(cls: type[msgspec.Struct], path: str = "") -> list[str]:
    """Return the names of all settings with their sections, like limits.queue_max."""
    found = []
    for field in msgspec.structs.fields(cls):
        inner = _struct_of(field.type)
        if inner is not None and get_origin(field.type) is not dict:
            found += _settings(inner, f"{path}{field.encode_name}.")
        else:
            found.append(f"{path}{field.encode_name}")
    return found


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the structure that a field holds: directly, in a union or as the values of a dictionary."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    origin = get_origin(kind)
    if origin is Annotated:
        return _struct_of(get_args(kind)[0])
    if origin is dict:
        return _struct_of(get_args(kind)[1])
    if origin in (typing.Union, types.UnionType):
        return next((found for one in get_args(kind) if (found := _struct_of(one)) is not None), None)
    return None
