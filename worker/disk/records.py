"""The record of a slot: what the block in it is, and how its bytes are checked.

A record takes whole sectors of 512 bytes. Little-endian:

| bytes | content |
|---|---|
| 8 | magic, which is zero where the slot is empty |
| 24, 16 | nonce and tag of the rest, zero without a key |
| ... | identity, slot, number of the write and a bit for `first`, chain value, parent's value, owner |
| ... | checksum, nonce and tag of the block, and its tokens |
| 16 | BLAKE2b of all before |

A record that is damaged, half-written, of another slot or of another identity is no record. A block that is
half-written has another checksum than its record says.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from .sealing import NO_NONCE, NO_TAG, NONCE_BYTES, TAG_BYTES, Sealer, Unsealed

MAGIC = b"kvfDisk2"
SECTOR = 512
SUM_BYTES = 16
_OUTER = struct.Struct(f"<8s{NONCE_BYTES}s{TAG_BYTES}s")
_INNER = struct.Struct(f"<16sQQQQQQ{NONCE_BYTES}s{TAG_BYTES}s")


@dataclass(frozen=True)
class Entry:
    """A block of tokens behind a prefix, as the coordinator names it.

    Attributes:
        value: The chained hash of the block and those before it, unsigned 64 bit.
        parent: That of the block before it, or the salt of the chain. A salt has 62 bits.
        first: The block is the first one of its chain, and `parent` is the salt.
        tokens: Its tokens in the form in which they are indexed, int32, little-endian.
        owner: The tag of the tenant that it belongs to; 0 for none.
    """

    value: int
    parent: int
    first: bool
    tokens: bytes
    owner: int = 0


@dataclass(frozen=True)
class Record:
    """The record of a slot.

    Attributes:
        number: Counts the writes of a folder: a higher one is later.
        entry: What the block is.
        checksum: Of the block's plain bytes (`kvforge.worker.checksums`).
        nonce: Of the block.
        tag: Of the block.
    """

    number: int
    entry: Entry
    checksum: int
    nonce: bytes = NO_NONCE
    tag: bytes = NO_TAG


def record_bytes(block_tokens: int) -> int:
    """Return the bytes of a record."""
    return -(-(_OUTER.size + _INNER.size + 4 * block_tokens + SUM_BYTES) // SECTOR) * SECTOR


def pack(record: Record, identity: bytes, slot: int, sealer: Sealer, size: int) -> bytes:
    """Return a record as bytes.

    Args:
        record: The record.
        identity: 16 bytes.
        slot: Its slot.
        sealer: Seals it.
        size: As `record_bytes` returns it.
    """
    entry = record.entry
    number = record.number << 1 | entry.first
    fields = (number, entry.value, entry.parent, entry.owner, record.checksum)
    inner = _INNER.pack(identity, slot, *fields, record.nonce, record.tag) + entry.tokens
    inner += bytes(size - _OUTER.size - SUM_BYTES - len(inner))
    nonce, tag, sealed = sealer.seal(inner, place(identity, slot))
    body = _OUTER.pack(MAGIC, nonce, tag) + bytes(sealed)
    return body + hashlib.blake2b(body, digest_size=SUM_BYTES).digest()


def unpack(packed: bytes, identity: bytes, slot: int, sealer: Sealer, block_tokens: int) -> Record | None:
    """Return the record in these bytes; None if they are no record of this slot and identity."""
    body, digest = packed[:-SUM_BYTES], packed[-SUM_BYTES:]
    if body[:8] != MAGIC or hashlib.blake2b(body, digest_size=SUM_BYTES).digest() != digest:
        return None
    _, nonce, tag = _OUTER.unpack_from(body)
    try:
        inner = sealer.unseal(nonce, tag, body[_OUTER.size :], place(identity, slot))
    except Unsealed:
        return None
    known, at, number, value, parent, owner, checksum, nonce, tag = _INNER.unpack_from(inner)
    if (known, at) != (identity, slot):
        return None
    tokens = bytes(inner[_INNER.size : _INNER.size + 4 * block_tokens])
    return Record(number >> 1, Entry(value, parent, bool(number & 1), tokens, owner), checksum, nonce, tag)


def is_empty(packed: bytes) -> bool:
    """Return whether no record was written here, or it was removed."""
    return packed[:8] == bytes(8)


def place(identity: bytes, slot: int) -> bytes:
    """Return what is authenticated with a record or block beside its bytes."""
    return identity + slot.to_bytes(8, "little")
