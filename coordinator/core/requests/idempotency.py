"""Idempotency keys: a repeated command returns the requests that it created the first time.

An entry lives as long as any of its requests is known, running or finished. The request tables bound their number.
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
    """The entry of a key: its command, and how many of its `count` requests from `request_id` on are still known.

    Attributes:
        command: Digest of the command, which avoids keeping its prompt.
        left: Requests that are still known.
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
        """Return the entry of a repeated command; None if the key is new or empty.

        Raises:
            InvalidRequest: The key is too long or not printable.
            KeyReused: The key belongs to a different command.
        """
        if not message.key:
            return None
        if len(message.key) > KEY_LENGTH_MAX or not message.key.isprintable():
            raise InvalidRequest("key", f"must be at most {KEY_LENGTH_MAX} printable characters")
        entry = self._entries.get((tenant, message.key))
        if entry is not None and entry.command != _digest(message):
            raise KeyReused(message.key, entry.request_id)
        return entry

    def has(self, tenant: str, key: str) -> bool:
        """Return whether the key has requests, of whatever command."""
        return (tenant, key) in self._entries

    def add(self, tenant: str, message: Submit, request_id: int) -> IdempotencyKey:
        """Add the key of a command that created `message.count` requests from `request_id` on."""
        entry = IdempotencyKey(tenant, message.key, _digest(message), request_id, message.count, message.count)
        self._entries[tenant, message.key] = entry
        return entry

    def release(self, entry: IdempotencyKey) -> None:
        """Count one request of the entry as forgotten; with the last one, remove the key."""
        entry.left -= 1
        if not entry.left:
            del self._entries[entry.tenant, entry.key]

    def check_invariants(self, held: list[IdempotencyKey]) -> None:
        """Check that each entry is held by as many known requests as it counts."""
        counts = Counter(map(id, held))
        assert len(counts) == len(self._entries), "keys and known requests disagree"
        assert all(counts[id(entry)] == entry.left for entry in self._entries.values()), "a key's count is wrong"


def _digest(command: Submit) -> bytes:
    """Return 16 bytes that are equal for commands with equal parameters, whatever their ids.

    The structs are converted to tuples because msgspec omits a field only if its value is the very default object, so
    equal structs can have different encodings.
    """
    # The tenant is part of the key. A sequence to continue or to keep changes nothing of the answer's meaning.
    apart = ("rid", "prompt", "sampling", "tenant", "continues", "keep_ms", "pins", "ahead")
    fields = [getattr(command, name) for name in command.__struct_fields__ if name not in apart]
    fields += msgspec.structs.astuple(command.sampling)
    digest = hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=16)
    digest.update(np.ascontiguousarray(command.prompt).data)
    return digest.digest()
