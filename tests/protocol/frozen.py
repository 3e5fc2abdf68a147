"""A frozen version of the protocol: its fields, its bytes, and a peer limited to it.

`tests/data/protocol_v1/` contains the messages between coordinator, clients and workers of version 1, as of commit
b830fcd, before any addition:

- `fields.json`: every message and struct with the names, types and defaults of its fields, and all error codes;
- `messages.json`: for each message two examples, with all fields and with the required ones only: bytes and meaning.

Neither file is ever written again; a version 2 gets its own folder: `python -m tests.protocol.frozen 2`.
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from kvforge.protocol import messages as m
from kvforge.protocol.codec import encode
from kvforge.protocol.errors import BY_CODE, Field

FOLDER = Path(__file__).parents[1] / "data"
UNIONS: dict[str, types.UnionType] = {
    "client to coordinator": m.CLIENT_MESSAGES,
    "coordinator to client": m.CLIENT_REPLIES,
    "worker to coordinator": m.WORKER_MESSAGES,
    "coordinator to worker": m.WORKER_REPLIES,
}
ARRAYS = ("Int32Array", "Int64Array", "Float32Array")
FROZEN_NAMES = {
    "Rendezvous": "Meeting",
    "SamplingParams": "Sampling",
}  # classes renamed since version 1; no name of a class is on the wire
JsonMap = dict[str, Any]


@dataclass(frozen=True)
class Version:
    """A frozen version: `fields` of each struct by its name, `examples` of each message, `errors`: all codes."""

    structs: Mapping[str, JsonMap]
    examples: Sequence[JsonMap]
    errors: Sequence[str]

    @classmethod
    def read(cls, number: int) -> Version:
        """Read the version of this number."""
        folder = FOLDER / f"protocol_v{number}"
        fields = json.loads((folder / "fields.json").read_text(encoding="utf-8"))
        examples = json.loads((folder / "messages.json").read_text(encoding="utf-8"))
        return cls(fields["structs"], examples, fields["errors"])

    def meaning(self, value: Any) -> Any:
        """Return the JSON content of a message or a part, limited to this version's fields."""
        if isinstance(value, msgspec.Struct):
            known = self.structs[frozen_name(type(value))]["fields"]
            return {name: self.meaning(getattr(value, name)) for name in known}
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, tuple | list):
            return [self.meaning(item) for item in value]
        if isinstance(value, dict):
            return {key: self.meaning(item) for key, item in value.items()}
        return value


class Peer:
    """Reads messages as a peer of a frozen version does, without any later additions."""

    def __init__(self, version: Version) -> None:
        self._structs: dict[str, Any] = {}
        self._version = version
        for name in version.structs:
            self._struct(name)

    def read(self, name: str, frames: Sequence[bytes | memoryview]) -> msgspec.Struct:
        """Decode the message `name`. Raises ValueError (also msgspec.ValidationError) if that peer would refuse it."""
        frozen = self._version.structs[name]
        body = msgpack.unpackb(frames[0])
        sizes = body.pop("n", [])
        if body["t"] != frozen["tag"] or len(sizes) > len(frozen["arrays"]):
            raise ValueError(f"{name}: tag {body['t']}, arrays {sizes}")
        start, arrays = 0, frames[1] if len(frames) > 1 else b""
        for (array, dtype), size in zip(frozen["arrays"], sizes, strict=False):
            body[array] = np.frombuffer(arrays, dtype, size, start)
            start += size * np.dtype(dtype).itemsize
        if start != len(arrays):
            raise ValueError(f"{name}: {len(arrays)} bytes of arrays for {sizes}")
        message: msgspec.Struct = msgspec.convert(body, self._structs[name])
        return message

    def _struct(self, name: str) -> Any:
        if name not in self._structs:
            frozen = self._version.structs[name]
            names: dict[str, Any] = {"Field": Field, **dict.fromkeys(ARRAYS, np.ndarray)}
            names |= {other: self._struct(other) for other in _mentioned(frozen, self._version.structs)}
            words = {field: spec["type"] for field, spec in frozen["fields"].items()}
            hints = typing.get_type_hints(type("Words", (), {"__annotations__": words}), localns=names)
            fields: list[Any] = []
            for field, spec in frozen["fields"].items():
                default = [(_default(hints[field], spec["default"]))] if "default" in spec else []
                fields.append((field, hints[field], *default))
            self._structs[name] = msgspec.defstruct(
                name,
                fields,
                frozen=True,
                kw_only=True,
                tag=frozen["tag"] or None,
                tag_field="t" if frozen["tag"] else None,
                forbid_unknown_fields=frozen["forbids_unknown"],
            )
        return self._structs[name]


def frozen_name(cls: type[Any]) -> str:
    """Return the name of a struct in the frozen files."""
    return FROZEN_NAMES.get(cls.__name__, cls.__name__)


def structs() -> dict[str, Any]:
    """Return every struct of today's messages by its name in the frozen files, including nested ones."""
    found: dict[str, Any] = {}
    for union in UNIONS.values():
        found |= {frozen_name(cls): cls for cls in typing.get_args(union)}
    inner = {frozen_name(cls): cls for cls in vars(m).values() if _is_struct(cls) and cls is not m.Message}
    return found | inner


def described(cls: Any) -> JsonMap:
    """Return a struct's fields in order as JSON. No `default`: the field is required."""
    fields: dict[str, JsonMap] = {}
    for field in msgspec.structs.fields(cls):
        fields[field.name] = {"type": _frozen_type(cls.__annotations__[field.name])}
        if not field.required:
            given = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            fields[field.name]["default"] = [] if isinstance(given, np.ndarray) else _json(given)
    config = cls.__struct_config__
    return {
        "tag": config.tag or "",
        "arrays": [list(array) for array in getattr(cls, "FRAMES", ())],
        "forbids_unknown": config.forbid_unknown_fields,
        "fields": fields,
    }


def example(cls: Any, *, whole: bool, leave: Mapping[str, frozenset[str]] | None = None) -> Any:
    """Return an example with every field or the required ones only; all values are different, and none is a default.

    leave: fields that keep their default, by the name of the struct.
    """
    hints = typing.get_type_hints(cls)
    left = (leave or {}).get(frozen_name(cls), frozenset())
    dtypes = dict(getattr(cls, "FRAMES", ()))
    values = {}
    for place, field in enumerate(msgspec.structs.fields(cls)):
        if field.required or (whole and field.name not in left):
            if field.name in dtypes:
                values[field.name] = np.arange(place + 1, place + 4).astype(dtypes[field.name])
            elif isinstance(field.default, bool):
                values[field.name] = not field.default
            else:
                values[field.name] = _value(hints[field.name], field.name, place, leave)
    return cls(**values)


def _value(kind: Any, name: str, place: int, leave: Mapping[str, frozenset[str]] | None) -> Any:
    """Return a value of this type for the field at this position."""
    if _is_struct(kind):
        return example(kind, whole=True, leave=leave)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        items = arguments[:1] * 2 if arguments[-1] is Ellipsis else arguments
        return tuple(_value(item, name, place + more, leave) for more, item in enumerate(items))
    if typing.get_origin(kind) is dict:
        return {f"{name} {more}": _value(arguments[1], name, place + more, leave) for more in (1, 2)}
    if arguments:  # a union: the first member, which is never None here
        return _value(arguments[0], name, place, leave)
    plain = {int: 100 + place, float: place + 0.5, str: f"{name} é", bool: True}
    return plain[kind]


def _frozen_type(annotation: str) -> str:
    """Return an annotation with the names of the frozen files."""
    return re.sub(r"\w+", lambda word: FROZEN_NAMES.get(word[0], word[0]), annotation)


def _json(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def _default(kind: Any, plain: Any) -> Any:
    """Return a default as JSON for a field of this type."""
    if kind is np.ndarray:
        return np.zeros(0)
    value = msgspec.convert(plain, kind)
    return msgspec.field(default_factory=type(value)) if value in ({}, []) else value


def _mentioned(frozen: JsonMap, known: Mapping[str, JsonMap]) -> list[str]:
    """Return the structs in a struct's fields."""
    words = " ".join(spec["type"] for spec in frozen["fields"].values())
    for sign in "[],|.":
        words = words.replace(sign, " ")
    return [word for word in dict.fromkeys(words.split()) if word in known]


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def main() -> None:
    """Freeze the current protocol. Never use this for a version that is already in use."""
    folder = FOLDER / f"protocol_v{int(sys.argv[1])}"
    folder.mkdir()
    now = Version({name: described(cls) for name, cls in structs().items()}, (), sorted(BY_CODE))
    examples = []
    for direction, union in UNIONS.items():
        for cls in typing.get_args(union):
            for whole in (True, False):
                message = example(cls, whole=whole)
                said = {"from": direction, "message": frozen_name(cls), "whole": whole}
                frames = [bytes(frame).hex() for frame in encode(message)]
                examples.append({**said, "frames": frames, "meaning": now.meaning(message)})
    fields = {"structs": now.structs, "errors": now.errors}
    (folder / "fields.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in examples)
    (folder / "messages.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
