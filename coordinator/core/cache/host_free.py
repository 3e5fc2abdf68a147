"""The free blocks of a host file, as runs of neighbours.

A worker moves neighbouring host blocks with one copy. So the blocks of a chain get neighbours: those behind its last
one, or else of the smallest run that has enough, or of the longest. A block that becomes free joins the runs on both
sides. In a full file, a chain takes the blocks of the entries that give theirs up for it.

A chain begins at a multiple of ALIGN, if there is one in the run. What is left behind the chain before it is for that
chain to grow, and copies of so many blocks do not cross the border of a page-locked piece.

All that is decided follows from which blocks are free, so that a snapshot has no more than these.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise

ALIGN = 8  # blocks
HEAP_SPARE = 64  # invalid items of a small heap


class FreeBlocks:
    """Free blocks. To add a block, or to find a run and take blocks from it, takes O(log n) for n runs.

    The size of a run is how many blocks it has from its first multiple of ALIGN on. The sizes are in a sorted list; of
    n free blocks, at most sqrt(2 * n) are different. The runs of a size are in a heap, the first one of the file on
    top, in which items that have become invalid stay until they are seen, or until half of the heap is invalid.

    Attributes:
        end_of: The block behind each run, by its first block.
    """

    def __init__(self, total: int, taken: Iterable[int] = ()) -> None:
        """Create the free blocks of [0, total): all but those that are taken."""
        self.end_of: dict[int, int] = {}
        self._count = 0
        self._added: list[int] = []  # they are in no run yet
        self._begin_of: dict[int, int] = {}
        self._sizes: list[int] = []
        self._heaps: dict[int, list[int]] = {}
        self._runs_of: dict[int, int] = {}  # size -> how many runs have it
        begin = 0
        for block in sorted(taken):
            self._put(begin, block)
            begin = block + 1
        self._put(begin, total)

    @classmethod
    def of(cls, blocks: Iterable[int], total: int) -> FreeBlocks:
        """Return free blocks by their numbers.

        Raises:
            ValueError: One is named twice, or is not in [0, total).
        """
        free = cls(0)
        begin = end = 0
        for block in sorted(blocks):
            if not end <= block < total:
                raise ValueError(f"free block {block} of {total}")
            if block > end:
                free._put(begin, end)
                begin = block
            end = block + 1
        free._put(begin, end)
        return free

    def __len__(self) -> int:
        return self._count + len(self._added)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the blocks, in order."""
        self.join()
        for begin in sorted(self.end_of):
            yield from range(begin, self.end_of[begin])

    def add(self, block: int) -> None:
        """Add a block that is not free."""
        self._added.append(block)

    def update(self, blocks: Iterable[int]) -> None:
        """Add blocks that are not free."""
        self._added.extend(blocks)

    def join(self) -> None:
        """Let blocks that were added join the runs beside them: once for blocks that follow each other."""
        if not self._added:
            return
        added = sorted(self._added)
        self._added.clear()
        first = 0
        for at, block in enumerate(added, 1):
            if at < len(added) and added[at] == block + 1:
                continue
            begin, end = added[first], block + 1
            first = at
            if (before := self._begin_of.get(begin)) is not None:
                self._cut(before)
                begin = before
            if (behind := self.end_of.get(end)) is not None:
                self._cut(end)
                end = behind
            self._put(begin, end)

    def without(self, blocks: Collection[int]) -> FreeBlocks:
        """Return the free blocks but these."""
        free = [block for block in self if block not in blocks]
        return FreeBlocks.of(free, free[-1] + 1 if free else 0)

    def take(self, count: int, behind: int = -1, room: int = 0) -> list[int]:
        """Take blocks.

        Args:
            count: How many; there are as many.
            behind: Begin behind this block if the next one is the first of a run that has enough; -1: anywhere.
            room: Neighbours that are wanted in another place, if they are more: the chain is going to grow.

        Blocks that were added since `join` come last, in the opposite order: those of a chain that was evicted from its
        end stay beside each other, whatever part of it a later chain takes.

        Returns:
            The blocks, those of a run in order.
        """
        assert count <= len(self), "more blocks than are free"
        if self._count < count:
            last = self._added[: count - self._count]
            del self._added[: len(last)]
            before = [block for begin, end in sorted(self.end_of.items()) for block in range(begin, end)]
            for begin in list(self.end_of):
                self._cut(begin)
            return before + last[::-1]
        self.join()
        taken: list[int] = []
        begin = behind + 1
        if behind < 0 or self.end_of.get(begin, begin) - begin < count:
            begin = self._place(max(count, room)) if count else 0
        while count:
            end = self.end_of[begin]
            self._cut(begin)
            middle = min(end, begin + count)
            self._put(middle, end)
            taken.extend(range(begin, middle))
            count -= middle - begin
            begin = self._place(max(count, room)) if count else 0
        return taken

    def _place(self, count: int) -> int:
        """Return the first block of a run for so many, which begins there: what is before it has become its own."""
        size = self._sizes[min(bisect_left(self._sizes, count), len(self._sizes) - 1)]
        heap, end_of = self._heaps[size], self.end_of
        while not (heap[0] in end_of and size_of(heap[0], end_of[heap[0]]) == size):
            heappop(heap)
        begin = heap[0]
        end = end_of[begin]
        if not size or end - size == begin:
            return begin
        self._cut(begin)
        self._put(begin, end - size)
        self._put(end - size, end)
        return end - size

    def _put(self, begin: int, end: int) -> None:
        """Add a run, unless it is empty."""
        if begin == end:
            return
        size = size_of(begin, end)
        self._count += end - begin
        self.end_of[begin], self._begin_of[end] = end, begin
        runs = self._runs_of.get(size, 0) + 1
        self._runs_of[size] = runs
        if runs == 1:
            insort(self._sizes, size)
        heap = self._heaps.setdefault(size, [])
        heappush(heap, begin)
        if len(heap) > 2 * runs + HEAP_SPARE:
            heap[:] = self._valid(size)
            heapify(heap)

    def _cut(self, begin: int) -> None:
        """Remove a run."""
        end = self.end_of.pop(begin)
        del self._begin_of[end]
        self._count -= end - begin
        size = size_of(begin, end)
        self._runs_of[size] -= 1
        if not self._runs_of[size]:
            del self._runs_of[size], self._heaps[size]
            del self._sizes[bisect_left(self._sizes, size)]

    def _valid(self, size: int) -> set[int]:
        """Return the first blocks of the runs in the heap of a size."""
        end_of = self.end_of
        return {begin for begin in self._heaps[size] if begin in end_of and size_of(begin, end_of[begin]) == size}

    def check_invariants(self) -> None:
        """Check that runs do not touch, and that each can be found by its size."""
        self.join()
        runs = sorted(self.end_of.items())
        assert all(end < begin for (_, end), (begin, _) in pairwise(runs)), "runs that touch"
        assert self._count == sum(end - begin for begin, end in runs), "the number of free blocks"
        assert self._begin_of == {end: begin for begin, end in runs}, "ends of runs"
        sizes = Counter(size_of(begin, end) for begin, end in runs)
        assert self._runs_of == sizes and self._sizes == sorted(sizes), "sizes of runs"
        for size, count in sizes.items():
            assert len(self._valid(size)) == count, "a run cannot be found"


def size_of(begin: int, end: int) -> int:
    """Return how many blocks of a run are behind its first multiple of ALIGN."""
    return max(0, end - -(-begin // ALIGN) * ALIGN)
