"""Simulated host files: they outlive the worker processes that write them.

A file keeps a tag beside each block, stored once the copy of the block is complete. A process that dies in the middle
of a step leaves any part of its copies, one of them half-written, without a tag. A process that hangs may go on copying
after the coordinator has given it up, until its successor has locked the file. A file may also be another one in the
next life: after a restart of the host, or because another model is served.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from tools.simulation.states import StatePage

Cells = tuple[tuple[int, ...], tuple[int, ...], StatePage | None]  # tokens, positions, a part of a recurrent state
NO_CELLS: Cells = ((), (), None)
NO_TAG = (0, 0)
COPY_NUMBERS = 4
OTHER_FILE_SHARE = 0.15


class HostFile:
    """The file of one worker, through all its lives.

    Attributes:
        identity: Changes when the file is another one.
        flipped: Blocks with other bytes than were written, which their checksums reveal.
    """

    def __init__(self, name: str, blocks: int, block_size: int) -> None:
        self._name, self.blocks, self._block_size = name, blocks, block_size
        self._number = 0
        self._content: dict[int, tuple[tuple[int, int], Cells]] = {}
        self.flipped: set[int] = set()

    @property
    def identity(self) -> str:
        """Return the identity that a worker announces."""
        return f"{self._name}/{self._number}"

    def write(self, block: int, tag: tuple[int, int], cells: Cells) -> None:
        """Copy a block to the file."""
        assert 0 <= block < self.blocks, f"host block {block} is not one of {self.blocks}"
        self._content[block] = (tag, cells)
        self.flipped.discard(block)

    def wipe(self, block: int) -> None:
        """Overwrite a block with zeros."""
        self._content.pop(block, None)
        self.flipped.discard(block)

    def filled(self) -> set[int]:
        """Return the blocks with bytes of entries."""
        return {block for block, (_, (tokens, *_)) in self._content.items() if tokens}

    def flip(self, random: Random, share: float) -> None:
        """Change the content of a block with this probability, as a flipped bit does."""
        if share and self._content and random.random() < share:
            self.flipped.add(random.choice(sorted(self._content)))

    def read(self, block: int, tag: tuple[int, int]) -> Cells | None:
        """Return a block with this tag, or None."""
        found, cells = self._content.get(block, (NO_TAG, NO_CELLS))
        return cells if found == tag else None

    def leave(self, copies: Iterable[list[int]], random: Random) -> None:
        """Let a process that is being killed leave copies half-written, without their tags."""
        for _, block, *_ in copies:
            if random.random() < 0.5:
                garbage = (random.randrange(1 << 16),) * self._block_size
                self.write(block, NO_TAG, (garbage, (-1,) * self._block_size, None))

    def reborn(self, random: Random) -> None:
        """Begin the next life: now and then with another file."""
        if random.random() < OTHER_FILE_SHARE:
            self._number += 1
            self._content.clear()
            self.flipped.clear()


def copies_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return the copies in `Step.host_writes` or `Step.host_reads`: block, host block, and the halves of the tag."""
    flat = list(numbers)
    return [flat[at : at + COPY_NUMBERS] for at in range(0, len(flat), COPY_NUMBERS)]
