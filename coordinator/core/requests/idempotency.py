"""Idempotency keys: which requests a command made, so that the same command again makes no others.

An entry lives as long as its requests are known, running or ended: as many as the tables of requests hold.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec
import numpy as np

from kvforge.protocol.errors import InvalidRequest, KeyReused
from kvforge.protocol.messages import Submit

KEY_LENGTH_MAX = 128


class IdempotencyKey(msgspec.Struct, eq=False):
    """What a key stands for: the command, and how many of its `count` requests from `request_id` on are known.

    command: a digest of all that the command asks for. The command itself would keep its prompt.
    """

    tenant: str
    key: str
    command: bytes
    request_id: int
    count: int
    left: int


class IdempotencyKeys:
    """Entries by tenant and key."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], IdempotencyKey] = {}

    def find(self, tenant: str, message: Submit) -> IdempotencyKey | None:
        """The entry of the same command; None where the key is new, or empty.

        Raises InvalidRequest for an impossible key and KeyReused where it stands for another command.
        """
        if not message.key:
            return None
        if len(message.key) > KEY_LENGTH_MAX or not message.key.isprintable():
            raise InvalidRequest("key", f"at most {KEY_LENGTH_MAX} printable characters")
        entry = self._entries.get((tenant, message.key))
        if entry is not None and entry.command != _digest(message):
            raise KeyReused(message.key, entry.request_id)
        return entry

    def knows(self, tenant: str, key: str) -> bool:
        """Whether the key stands for requests, whatever they ask for."""
        return (tenant, key) in self._entries

    def add(self, tenant: str, message: Submit, request_id: int) -> IdempotencyKey:
        """The key now stands for `message.count` requests from `request_id` on."""
        entry = IdempotencyKey(tenant, message.key, _digest(message), request_id, message.count, message.count)
        self._entries[tenant, message.key] = entry
        return entry

    def release(self, entry: IdempotencyKey) -> None:
        """One of its requests is forgotten; with the last one, so is the key."""
        entry.left -= 1
        if not entry.left:
            del self._entries[entry.tenant, entry.key]

    def check_invariants(self, held: list[IdempotencyKey]) -> None:
        """Each entry is held by as many known requests as it counts."""
        counts = Counter(map(id, held))
        assert len(counts) == len(self._entries), "a key outlives its requests, or they outlive it"
        assert all(counts[id(entry)] == entry.left for entry in self._entries.values()), "a key's count of requests"


def _digest(command: Submit) -> bytes:
    """Two commands have the same where they ask for the same, whatever their numbers: 16 bytes.

    Of tuples: of a struct msgspec leaves out what is the very object that its default is, and writes an equal one.
    """
    apart = ("rid", "prompt", "sampling", "tenant")  # the tenant is a part of the key
    fields = [getattr(command, name) for name in command.__struct_fields__ if name not in apart]
    fields += msgspec.structs.astuple(command.sampling)
    digest = hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=16)
    digest.update(np.ascontiguousarray(command.prompt).data)
    return digest.digest()
