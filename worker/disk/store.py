"""The interface of a store of KV blocks below the host tier: put, get, drop, by slot and identity.

`segments.Segments` is the one that exists, on a local disk. A store elsewhere (another host's memory, an object store)
would stand in its place in the copying process (`copying`); docs/disk-tier.md says what it needs. The coordinator owns
the slots, so a store decides neither what it keeps nor what it gives up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .records import Entry, Record


class DiskFull(Exception):
    """There is no space for more blocks."""


class NotFound(Exception):
    """A slot does not hold the expected entry: its record is another one, or none."""


class Damaged(Exception):
    """A block has other bytes than were written."""


@dataclass(frozen=True)
class Recovered:
    """What an earlier life left.

    Attributes:
        records: Whole records by slot.
        dropped: Slots with a damaged or half-written record.
    """

    records: dict[int, Record]
    dropped: int


class BlockStore(Protocol):
    """Blocks in slots [0, total), each with the entry that says what it is. Calls may take long.

    Several processes, forked from the one that opened the store, read and drop; one writes and wipes. Each makes one
    call at a time, and no two are at work on one slot.

    A store must not return a block as another one. It may lose any block at any time: that is a miss.
    """

    @property
    def usable(self) -> int:
        """Slots that can be written without more space."""

    def recover(self) -> Recovered:
        """Return the entries of earlier lives.

        Raises:
            OSError: The store failed.
        """

    def write(self, slot: int, entry: Entry, checksum: int, block: npt.NDArray[np.uint8]) -> None:
        """Put a block into a slot; what was there is lost.

        Args:
            slot: The slot.
            entry: What the block is: its chained hash, which covers its tokens, those before it and the salt.
            checksum: Of its bytes.
            block: [block_bytes] uint8, contiguous.

        Raises:
            DiskFull: There is no space: the tier stays as large as `usable`.
            OSError: The store failed. The slot may have any content, which is a miss.
        """

    def read(self, slot: int, value: int, block: npt.NDArray[np.uint8]) -> int:
        """Get the block of a slot.

        Args:
            slot: The slot.
            value: The chained hash that its entry must have.
            block: [block_bytes] uint8, contiguous, to be filled. It may have any content after an error.

        Returns:
            The checksum of its bytes.

        Raises:
            NotFound: The slot has another entry, or none.
            Damaged: The block has other bytes than were written.
            OSError: The store failed.
        """

    def drop(self, slot: int) -> None:
        """Drop the entry of a slot, if there is one.

        Raises:
            OSError: The store failed.
        """

    def wipe(self, slot: int) -> None:
        """Drop the entry of a slot, and overwrite what the slot holds, so that it cannot be read again.

        Raises:
            OSError: The store failed. The slot may have any content.
        """

    def close(self) -> None:
        """Write what is not written yet, and close the store.

        Raises:
            OSError: The store failed.
        """
