"""The one document of a fleet that outlives its controller, in the cluster's key-value store."""

from __future__ import annotations

import msgspec
from ray.experimental import internal_kv

PREFIX = b"kvforge-fleet/"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """text: fleet.toml. public, secret: the gateways' keys. count: replicas, where another number was decided than the
    file says. ended: the fleet is to be no more."""

    text: str
    public: str
    secret: str
    count: int | None = None
    ended: bool = False

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Spec(public={self.public!r}, count={self.count}, ended={self.ended})"


def get(fleet: str) -> Spec | None:
    """None: there is no such fleet."""
    said: bytes | None = internal_kv._internal_kv_get(PREFIX + fleet.encode())
    return msgspec.msgpack.decode(said, type=Spec) if said is not None else None


def put(fleet: str, spec: Spec) -> None:
    """From now on it is this."""
    internal_kv._internal_kv_put(PREFIX + fleet.encode(), msgspec.msgpack.encode(spec), overwrite=True)


def remove(fleet: str) -> None:
    """There is no such fleet any more."""
    internal_kv._internal_kv_del(PREFIX + fleet.encode())


def fleets() -> list[str]:
    """The names of all."""
    return sorted(key.removeprefix(PREFIX).decode() for key in internal_kv._internal_kv_list(PREFIX))
