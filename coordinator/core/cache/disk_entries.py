"""The entries that a worker announces of its disk tier, as its messages bring them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import DISK_ENTRY_NUMBERS, DiskEntries

from .prefix_cache import Tokens
from .wipes import NO_TAG


class DiskEntry(NamedTuple):
    """A block of tokens behind a prefix, in a block of a disk.

    Attributes:
        block: The block.
        value: Its chained hash, unsigned 64 bit.
        parent: The chained hash of the block before it, or the salt.
        first: Whether it is the first block of its chain.
        tokens: Its tokens, [block_size] int32; of a part, its number as `host_parts` has it, and zeros.
        tag: The tag of its owner; NO_TAG if it is not known.
    """

    block: int
    value: int
    parent: int
    first: bool
    tokens: Tokens
    tag: int


def read_entries(message: DiskEntries, cursor: int, total: int, block_size: int) -> list[DiskEntry] | None:
    """Return the entries of a message.

    Args:
        message: The message.
        cursor: The entries that the worker has announced before.
        total: Blocks of the disk tier.
        block_size: Tokens of a block.

    Returns:
        The entries; None for a message that came before: it is sent twice around a restart of the coordinator.

    Raises:
        ProtocolError: The message is malformed, skips entries, or names a block twice or outside the tier.
    """
    if message.cursor < cursor:
        return None
    if message.cursor > cursor:
        raise ProtocolError(f"disk_entries: cursor {message.cursor}, expected {cursor}")
    count, rest = divmod(message.entries.size, DISK_ENTRY_NUMBERS)
    if rest or message.tokens.size != count * block_size or (not count and not message.last):
        sizes = f"{message.entries.size} numbers and {message.tokens.size} tokens"
        raise ProtocolError(f"disk_entries: {sizes} are not those of entries with {block_size} tokens")
    rows = message.entries.reshape(count, DISK_ENTRY_NUMBERS)
    blocks = rows[:, 0]
    if count and (blocks.min() < 0 or blocks.max() >= total or np.unique(blocks).size < count):
        raise ProtocolError(f"disk_entries: a block twice, or outside the tier's {total}")
    values = np.ascontiguousarray(rows[:, 1:5]).astype("<i4").view("<u8")
    tokens = message.tokens.reshape(count, block_size)
    owners = [NO_TAG] * count
    if message.owners.size:
        if message.owners.size != 2 * count:
            raise ProtocolError(f"disk_entries: {message.owners.size} numbers are not the owners of {count} entries")
        owners = np.ascontiguousarray(message.owners).astype("<i4").view("<u8").tolist()
    numbers = zip(rows.tolist(), values.tolist(), tokens, owners, strict=True)
    return [DiskEntry(row[0], value, parent, bool(row[5]), own, tag) for row, (value, parent), own, tag in numbers]
