"""Encode messages as MessagePack and decode them. Any bytes that a peer sends become a message or a typed error.

A message is one or two ZeroMQ frames: its body, and its arrays one after the other. The field `n` of the body holds the
number of items of each array, in the order of FRAMES; arrays missing at the end are empty. All arrays share one frame
because ZeroMQ's cost is per frame and not per byte (3 to 20 us each, measured).

msgpack unpacks the bytes with its size limits on. msgspec checks types, ranges and tags. Arrays are views of the frame,
neither copied nor interpreted here. Nothing is ever evaluated or unpickled.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any

import msgpack
import msgspec
import numpy as np

from .errors import InvalidRequest, ProtocolError
from .messages import NO_FLOAT32, NO_INT32, NO_INT64, Message, Step, tag_of

BODY_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 64 << 20
FRAMES_MAX = 2
ITEMS_MAX = 1 << 16
RID_BODY_BYTES_MAX = 1 << 16
DEPTH_MAX = 12
# Packs nested structs too, and plain values in a quarter of msgpack's time.
_pack = msgspec.msgpack.Encoder().encode


class InvalidMessage(InvalidRequest):
    """A command with a valid tag and rid has an invalid field, so that the reply can name the command."""

    def __init__(self, field: str, problem: str, rid: int) -> None:
        super().__init__(field, problem)
        self.rid = rid


def encode(message: Message) -> list[bytes | memoryview]:
    """Encode a message as ZeroMQ frames.

    Returns:
        The body, then one frame with all arrays where the message has any.
    """
    cls = type(message)
    if not cls.FRAMES:
        return [_pack(message)]
    body: dict[str, Any] = {"t": _TAGS[cls]}
    for name in _FIELDS[cls]:
        body[name] = getattr(message, name)
    sizes, parts, sent = [], [], 0
    for name, dtype in _ARRAYS[cls]:
        array = getattr(message, name)
        size = array.size
        sizes.append(size)
        if size:
            sent = len(sizes)
            # Usually the very same object; comparing two dtypes takes longer.
            same = array.dtype is dtype or array.dtype == dtype
            parts.append(array if same else array.astype(dtype))
    if not parts:
        return [_pack(body)]
    body["n"] = sizes[:sent]  # an older peer does not know the last arrays
    try:
        return [_pack(body), b"".join(parts)]
    except TypeError:  # an array is not contiguous
        return [_pack(body), b"".join([part.tobytes() for part in parts])]


def is_step(frames: Sequence[bytes | memoryview]) -> bool:
    """Return whether frames made by `encode` are a Step, without decoding them."""
    return bool(frames[0][1 : 1 + len(_STEP_MARK)] == _STEP_MARK)


def rid_of(frames: Sequence[bytes | memoryview]) -> int:
    """Return the rid of a command without decoding it, for the reply that refuses it; 0 if none is found."""
    if not frames or len(frames[0]) > RID_BODY_BYTES_MAX:
        return 0
    try:
        body = msgpack.unpackb(frames[0], strict_map_key=True, max_array_len=ITEMS_MAX, max_map_len=ITEMS_MAX)
    except Exception:  # noqa: BLE001 - msgpack raises many kinds for hostile bytes; all mean the same
        return 0
    rid = body.get("rid") if isinstance(body, dict) else None
    return rid if isinstance(rid, int) and not isinstance(rid, bool) and 0 <= rid < 1 << 63 else 0


class Decoder:
    """Decodes one direction of one connection kind: accepts only the messages of `union`."""

    def __init__(self, union: types.UnionType, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._classes: dict[str, type[Message]] = {tag_of(cls): cls for cls in typing.get_args(union)}
        self._body_bytes_max = body_bytes_max

    def decode(self, frames: Sequence[bytes | memoryview]) -> Message:
        """Decode the message in `frames`.

        Raises:
            ProtocolError: The frames are not a message of this direction.
            InvalidMessage: A field is invalid, and the reply can name the command.
        """
        if not frames or len(frames) > FRAMES_MAX:
            raise ProtocolError(f"a message has 1 to {FRAMES_MAX} frames, this one has {len(frames)}")
        body = self._body(frames[0])
        tag = body.get("t")
        cls = self._classes.get(tag) if isinstance(tag, str) else None
        if cls is None:
            raise ProtocolError(f"unknown message tag {_shorten(tag)}; known here: {', '.join(sorted(self._classes))}")
        sizes = body.pop("n", ())
        # Most messages hold scalars and empty lists only.
        inner = [value for value in body.values() if type(value) in _CONTAINERS and value]
        if inner and not _shallow(inner, DEPTH_MAX - 1):
            raise ProtocolError(f"a message nests at most {DEPTH_MAX} levels")
        if len(frames) > 1 or sizes:
            _arrays(cls, body, sizes, frames[1] if len(frames) > 1 else b"")
        try:
            message: Message = msgspec.convert(body, cls)
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
        if not isinstance(body, dict) or not _TEXT.issuperset(map(type, body)):
            raise ProtocolError("a message body is a map with text keys")
        return body


def _arrays(cls: type[Message], body: dict[str, Any], sizes: Any, frame: bytes | memoryview) -> None:
    """Cut the second frame into the message's arrays and add them to its fields. Raises ProtocolError."""
    tag, declared, given = _TAGS[cls], _ARRAYS[cls], len(frame)
    if not isinstance(sizes, list) or len(sizes) > len(declared):
        raise ProtocolError(f"{tag}: n lists the sizes of at most {len(declared)} arrays")
    if given > FRAME_BYTES_MAX:
        raise ProtocolError(f"{tag}: arrays are at most {FRAME_BYTES_MAX} bytes together, these are {given}")
    start = 0
    for (name, dtype), size in zip(declared, sizes, strict=False):
        if type(size) is not int or not 0 <= size <= FRAME_BYTES_MAX:
            raise ProtocolError(f"{tag}: n holds sizes of arrays, 0 to {FRAME_BYTES_MAX}")
        end = start + size * dtype.itemsize
        if end > given:
            break
        body[name] = np.frombuffer(frame, dtype, size, start) if size else _EMPTY[dtype]
        start = end
    else:
        if start == given:
            return
    raise ProtocolError(f"{tag}: the sizes in n do not match the {given} bytes of arrays received")


def _shallow(level: list[Any], depth: int) -> bool:
    """Return whether each of these containers nests at most `depth` levels; an empty container has none."""
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            inner = value.values() if type(value) is dict else value
            below += [item for item in inner if type(item) in _CONTAINERS and item]
        if not below:
            return True
        level = below
    return False


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _locate(problem: str) -> tuple[str, str]:
    """Split msgspec's "Expected `int`, got `str` - at `$.sampling.seed`" into its field and its problem."""
    text, _, path = problem.partition(" - at `$")
    if "unknown field `" in text:
        field = text.split("unknown field `", 1)[1].rstrip("`")
        return f"{path.rstrip('`').lstrip('.')}.{field}".lstrip("."), "there is no such field"
    if "missing required field `" in text:
        field = text.split("missing required field `", 1)[1].rstrip("`")
        return f"{path.rstrip('`').lstrip('.')}.{field}".lstrip("."), "is missing"
    return path.rstrip("`").lstrip(".") or "message", text


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
_ARRAYS: dict[type[Message], tuple[tuple[str, np.dtype[Any]], ...]] = {
    cls: tuple((name, np.dtype(dtype)) for name, dtype in cls.FRAMES) for cls in _TAGS
}
_EMPTY = {np.dtype(dtype): none for dtype, none in (("<i4", NO_INT32), ("<i8", NO_INT64), ("<f4", NO_FLOAT32))}
_CONTAINERS = frozenset((dict, list, tuple))
_TEXT = frozenset((str,))
_STEP_MARK: bytes = msgpack.packb("t") + msgpack.packb(tag_of(Step))  # the first entry of a body, after the map's size
assert len(set(_TAGS.values())) == len(_TAGS), "two messages share a tag"
# Wide items first, so that every array in the frame starts at a multiple of its item's size.
assert all(list(cls.FRAMES) == sorted(cls.FRAMES, key=lambda frame: -int(frame[1][2:])) for cls in _TAGS), "alignment"
assert not any("n" in fields or "t" in fields for fields in _FIELDS.values()), (
    "a field uses a name reserved for the codec"
)
