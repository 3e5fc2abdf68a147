"""The messages between a gateway and its storage process: MessagePack behind four bytes of length."""

from __future__ import annotations

from typing import Any

import msgspec

from .operations import Operation

HEAD_BYTES = 4


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: the database.

    Attributes:
        url: `sqlite:PATH` or `postgresql://...`.
        tenant_bytes_max: The limit of a tenant in bytes.
    """

    url: str
    tenant_bytes_max: int


class Call(msgspec.Struct, frozen=True):
    """A call."""

    number: int
    operations: list[Operation]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The results of a call."""

    number: int
    results: list[Any]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The error of a call, for `protocol.errors.restore`."""

    number: int
    code: str
    message: str
    fields: dict[str, Any]


OPENED = msgspec.msgpack.Decoder(Opened)
ASKED = msgspec.msgpack.Decoder(Call)
ANSWER: msgspec.msgpack.Decoder[Done | Failed] = msgspec.msgpack.Decoder(Done | Failed)


def framed(message: msgspec.Struct) -> bytes:
    """Return a message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body
