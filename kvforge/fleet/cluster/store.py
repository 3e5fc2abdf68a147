"""The document of a fleet that outlives its controller, in the cluster's key-value store."""

from __future__ import annotations

import msgspec
from ray.experimental import internal_kv

PREFIX = b"kvforge-fleet/"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The document of a fleet.

    Attributes:
        text: fleet.toml.
        public: The gateways' public key.
        secret: The gateways' secret key.
        count: The decided number of replicas, None if the file sets it.
        ended: The fleet is being removed.
    """

    text: str
    public: str
    secret: str
    count: int | None = None
    ended: bool = False

    def __repr__(self) -> str:
        """Return a text without the secret."""
        return f"Spec(public={self.public!r}, count={self.count}, ended={self.ended})"


def get(fleet: str) -> Spec | None:
    """Return the document of a fleet, None if there is no such fleet."""
    data: bytes | None = internal_kv._internal_kv_get(PREFIX + fleet.encode())
    return msgspec.msgpack.decode(data, type=Spec) if data is not None else None


def put(fleet: str, spec: Spec) -> None:
    """Store the document of a fleet."""
    internal_kv._internal_kv_put(PREFIX + fleet.encode(), msgspec.msgpack.encode(spec), overwrite=True)


def remove(fleet: str) -> None:
    """Remove the document of a fleet."""
    internal_kv._internal_kv_del(PREFIX + fleet.encode())


def fleets() -> list[str]:
    """Return the names of all fleets."""
    return sorted(key.removeprefix(PREFIX).decode() for key in internal_kv._internal_kv_list(PREFIX))
