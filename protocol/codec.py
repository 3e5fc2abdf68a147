"""MessagePack bytes <-> messages. Whatever a peer sends, the outcome is a message or a typed error.

Bytes are unpacked by msgpack with its size limits on; types, ranges and tags are checked by msgspec; arrays are
binary frames that are neither copied nor interpreted here. Nothing is ever evaluated or unpickled.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np

from .errors import InvalidRequest, ProtocolError
from .messages import NO_FLOAT32, NO_INT32, NO_INT64, Message, tag_of

BODY_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 64 << 20
FRAMES_MAX = 16
ITEMS_MAX = 1 << 16
DEPTH_MAX = 12
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1

M = TypeVar("M", bound=Message)


class InvalidMessage(InvalidRequest):
    """A command with a valid tag and rid has a wrong field: the reply can say so to that very command."""

    def __init__(self, field: str, problem: str, rid: int) -> None:
        super().__init__(field, problem)
        self.rid = rid


def encode(message: Message) -> list[bytes | memoryview]:
    """The message as ZeroMQ frames: the body, then one frame per array field."""
    cls = type(message)
    frames_of = cls.FRAMES
    body = {"t": _TAGS[cls]}
    for name in _FIELDS[cls]:
        body[name] = _plain(getattr(message, name))
    frames: list[bytes | memoryview] = [msgpack.packb(body)]
    for name, dtype in frames_of:
        array = getattr(message, name)
        frames.append(np.ascontiguousarray(array, dtype=dtype).data.cast("B") if array.size else b"")
    return frames


class Decoder:
    """Decodes one direction of one connection kind: only the messages of `union` are accepted."""

    def __init__(self, union: types.UnionType, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._classes: dict[str, type[Message]] = {tag_of(cls): cls for cls in typing.get_args(union)}
        self._body_bytes_max = body_bytes_max

    def decode(self, frames: Sequence[bytes | memoryview]) -> Message:
        """The message in `frames`. Raises ProtocolError, or InvalidMessage when the reply can name the command."""
        if not frames or len(frames) > FRAMES_MAX:
            raise ProtocolError(f"a message has 1 to {FRAMES_MAX} frames, this one has {len(frames)}")
        body = self._body(frames[0])
        tag = body.pop("t", None)
        cls = self._classes.get(tag) if isinstance(tag, str) else None
        if cls is None:
            raise ProtocolError(f"unknown message tag {_shorten(tag)}; known here: {', '.join(sorted(self._classes))}")
        declared = cls.FRAMES
        if len(frames) - 1 > len(declared):
            raise ProtocolError(f"{tag}: {len(declared)} array frames expected, got {len(frames) - 1}")
        for (name, dtype), frame in zip(declared, frames[1:], strict=False):
            body[name] = _array(tag, name, dtype, frame)
        try:
            message: Message = _CONVERT[cls](body)
        except (msgspec.ValidationError, OverflowError, RecursionError) as error:
            rid = body.get("rid")
            field, problem = _locate(str(error))
            if isinstance(rid, int) and not isinstance(rid, bool) and 0 <= rid < 1 << 63:
                raise InvalidMessage(field, problem, rid) from None
            raise ProtocolError(f"{tag}: {field}: {problem}") from None
        return message

    def _body(self, frame: bytes | memoryview) -> dict[str, Any]:
        if len(frame) > self._body_bytes_max:
            raise ProtocolError(f"a message body is at most {self._body_bytes_max} bytes, this one has {len(frame)}")
        try:
            body = msgpack.unpackb(
                frame,
                strict_map_key=True,
                raw=False,
                max_str_len=self._body_bytes_max,
                max_bin_len=self._body_bytes_max,
                max_array_len=ITEMS_MAX,
                max_map_len=ITEMS_MAX,
                max_ext_len=0,
            )
        except Exception as error:  # noqa: BLE001 - msgpack raises many kinds for hostile bytes; all mean the same
            raise ProtocolError(f"not a MessagePack body: {type(error).__name__}") from None
        if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
            raise ProtocolError("a message body is a map with text keys")
        if not _shallow(body, DEPTH_MAX):
            raise ProtocolError(f"a message nests at most {DEPTH_MAX} levels")
        return body


def _array(tag: str, name: str, dtype: str, frame: bytes | memoryview) -> Any:
    size = len(frame)
    if not size:
        return _EMPTY[dtype]
    if size > FRAME_BYTES_MAX:
        raise ProtocolError(f"{tag}.{name}: an array frame is at most {FRAME_BYTES_MAX} bytes, this one has {size}")
    if size % int(dtype[2:]):
        raise ProtocolError(f"{tag}.{name}: {size} bytes are not a whole number of {dtype} items")
    return np.frombuffer(frame, dtype=dtype)


def _plain(value: Any) -> Any:
    return value if type(value) in _SCALARS else msgspec.to_builtins(value)


def _shallow(body: dict[str, Any], depth: int) -> bool:
    """Whether `body` nests at most `depth` levels. Most messages hold scalars only and cost one pass."""
    level: list[Any] = [body]
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            inner = value.values() if type(value) is dict else value
            below += [item for item in inner if type(item) in _CONTAINERS]
        if not below:
            return True
        level = below
    return False


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _locate(problem: str) -> tuple[str, str]:
    """Splits msgspec's "Expected `int`, got `str` - at `$.sampling.seed`" into its field and its problem."""
    text, _, path = problem.partition(" - at `$")
    if "unknown field `" in text:
        field = text.split("unknown field `", 1)[1].rstrip("`")
        return f"{path.rstrip('`').lstrip('.')}.{field}".lstrip("."), "there is no such field"
    if "missing required field `" in text:
        field = text.split("missing required field `", 1)[1].rstrip("`")
        return f"{path.rstrip('`').lstrip('.')}.{field}".lstrip("."), "is missing"
    return path.rstrip("`").lstrip(".") or "message", text


def _converter(cls: type[M]) -> Any:
    tag = _TAGS[cls]

    def convert(body: dict[str, Any]) -> Message:
        body["t"] = tag
        return msgspec.convert(body, cls)

    return convert


def _all_messages(cls: type[Message]) -> list[type[Message]]:
    found: list[type[Message]] = []
    for child in cls.__subclasses__():
        found += [child, *_all_messages(child)]
    return found


_TAGS: dict[type[Message], str] = {cls: tag_of(cls) for cls in _all_messages(Message)}
_FIELDS: dict[type[Message], tuple[str, ...]] = {
    cls: tuple(name for name in cls.__struct_fields__ if name not in {frame for frame, _ in cls.FRAMES})
    for cls in _TAGS
}
_EMPTY = {"<i4": NO_INT32, "<i8": NO_INT64, "<f4": NO_FLOAT32}
_SCALARS = frozenset((str, int, float, bool, type(None)))
_CONTAINERS = frozenset((dict, list, tuple))
_CONVERT: dict[type[Message], Any] = {cls: _converter(cls) for cls in _TAGS}
assert len(set(_TAGS.values())) == len(_TAGS), "two messages share a tag"
