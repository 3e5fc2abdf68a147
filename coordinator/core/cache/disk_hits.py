"""What a request brings from the disk to the host tier, for models with blocks of several kinds.

A hit there needs window blocks in sight of its end and a checkpoint just there (`host_hits`). So the longest hit that
the pool, the host tier and the disk have together is found first. It is read if that takes less time than computing
as many tokens, and a few blocks are read to measure the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .disk_copies import DiskCopies, DiskLoad
from .groups import Group
from .hashing import Hashes
from .host_hits import NOTHING, Found, PrefixSearch
from .host_parts import CHECKPOINT
from .placement import Placement
from .prefix_cache import Tokens, root_key


def load_from_disk(
    placement: Placement,
    prefix: tuple[int, Tokens, Hashes],
    end: int,
    owner: int,
    *,
    first_of: Callable[[Group, int], int],
) -> tuple[int, ...]:
    """Order the copies of what a prefix needs from the disk, if that gives a longer hit than planned.

    Args:
        placement: What is planned without the disk. Its host entries keep their blocks.
        prefix: The salt, the tokens in the form in which they are indexed, and the hashes of their full blocks.
        end: The most blocks of a hit.
        owner: The tenant that is charged for the blocks of the host tier; 0 for none.
        first_of: As in `find_in_both`.

    Returns:
        The loads to wait for; () if the disk has nothing that is worth reading.
    """
    group = placement.group
    disk = group.disk
    assert disk is not None and group.host is not None
    if not disk.takes_reads or not disk.tier.announced:
        return ()
    search = DiskSearch(group, disk, prefix, end)
    size = group.pool.blocks.block_size
    longest = search.longest(placement.cached_tokens(size) // size, size, first_of)
    if longest is None:
        return ()
    worth = disk.worth(search.on_disk(*longest), longest[1] * size - placement.cached_tokens(size))
    if not worth:
        return ()
    held = search.on_host(*longest)
    group.host.hold(held)  # what is ordered must not take their blocks
    loads = search.order(*longest, owner, worth)
    group.host.unhold(held)
    return loads


class DiskSearch(PrefixSearch):
    """What a pool, its host tier and its disk tier have of a prefix together."""

    def __init__(self, group: Group, disk: DiskCopies, prefix: tuple[int, Tokens, Hashes], end: int) -> None:
        super().__init__(group, *prefix, end)
        self._disk, (self._salt, self._tokens, self._hashes) = disk, prefix
        self._below = disk.tier.chain(root_key(self._salt), self._tokens, self._hashes, end)
        self.match()
        while self.known < end and (self._on_host(self.known) or self._on_disk(self.known)):
            self.known += 1

    def _on_host(self, number: int) -> bool:
        return number < len(self._chain) and self._tier.is_hit(self._chain[number])

    def _on_disk(self, number: int) -> bool:
        return number < len(self._below) and self._disk.tier.is_hit(self._below[number])

    def _part_on_host(self, number: int, part: int) -> bool:
        return number < len(self._chain) and self._tier.parts(self._chain[number], part, 1) is not None

    def _part_on_disk(self, number: int, part: int) -> tuple[int, ...] | None:
        return self._disk.tier.parts(self._below[number], part, 1) if number < len(self._below) else None

    def _find(self, number: int, parts: dict[int, tuple[int, ...]], first: int, count: int) -> Found | None:
        if number < len(self._keys) and self._keys[number] in parts:
            return parts[self._keys[number]], NOTHING
        there = (
            self._part_on_host(number, part) or self._part_on_disk(number, part) is not None
            for part in range(first, first + count)
        )
        return (NOTHING, NOTHING) if all(there) else None

    def on_host(self, first: int, count: int) -> tuple[int, ...]:
        """Return the entries of the host tier that a hit of `count` blocks needs; `first` is as in `order`."""
        tier = self._tier
        found = [self._chain[number] for number in range(len(self._keys), count) if self._on_host(number)]
        for number, part in self._parts_of(first, count):
            if number < len(self._chain):
                found.extend(tier.parts(self._chain[number], part, 1) or ())
        return tuple(found)

    def on_disk(self, first: int, count: int) -> tuple[int, ...]:
        """Return the entries of the disk tier that a hit needs and the host tier lacks, as `on_host`."""
        lacked = (number for number in range(len(self._keys), count) if not self._on_host(number))
        found = [self._below[number] for number in lacked if self._on_disk(number)]
        for number, part in self._parts_of(first, count):
            if not self._part_on_host(number, part):
                found.extend(self._part_on_disk(number, part) or ())
        return tuple(found)

    def _parts_of(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the parts that a hit needs and the pool lacks: the number of the block, and that of the part."""
        group = self._group
        kinds = [(number, group.pool.parts.windows, 0, group.window_pages) for number in range(first, count)]
        kinds.append((count - 1, group.pool.parts.checkpoints, CHECKPOINT, group.state_blocks))
        for number, held, part, pages in kinds:
            if not self._in_pool(number, held):
                yield from ((number, each) for each in range(part, part + pages))

    def order(self, first: int, count: int, owner: int, most: int) -> tuple[int, ...]:
        """Order what the pool and the host tier lack for a hit of `count` blocks.

        Args:
            first: The first block whose window blocks are in sight.
            count: The blocks.
            owner: As in `load_from_disk`.
            most: The most blocks to order.

        Returns:
            The loads to wait for.
        """
        group, tier, load = self._group, self._tier, self._disk.begin_load(most)
        size, parent = group.pool.blocks.block_size, root_key(self._salt)
        for number in range(count):
            own = self._tokens[number * size : (number + 1) * size].tobytes()
            node_id = tier.add(parent, int(self._hashes[number]), own)
            if node_id is None:
                break
            parent = node_id
            lacks = number >= len(self._keys) and not tier.is_hit(node_id)
            if lacks and not (self._on_disk(number) and load.request(node_id, self._below[number], owner)):
                break
            pages = 0 if number < first or self._in_pool(number, group.pool.parts.windows) else group.window_pages
            if not self._order_parts(load, number, node_id, range(pages), owner):
                break
            if number == count - 1 and not self._in_pool(number, group.pool.parts.checkpoints):
                self._order_parts(load, number, node_id, range(CHECKPOINT, CHECKPOINT + group.state_blocks), owner)
        tier.prune(parent)
        return self._disk.end_load(load)

    def _order_parts(self, load: DiskLoad, number: int, node_id: int, parts: range, owner: int) -> bool:
        """Order parts of an entry that are on the disk alone. Return False if the host tier has no place for one."""
        tier, complete = self._tier, True
        tier.put_behind(node_id)  # it stays, whatever goes
        for part in parts:
            if tier.parts(node_id, part, 1) is not None:
                continue
            found, node = self._part_on_disk(number, part), tier.add_part(node_id, part)
            complete = found is not None and node is not None and load.request(node, found[0], owner)
            if not complete:
                if node is not None:
                    tier.prune(node)
                break
        tier.remove_behind(node_id)
        return complete

    def _in_pool(self, number: int, parts: dict[int, tuple[int, ...]]) -> bool:
        return number < len(self._keys) and self._keys[number] in parts
