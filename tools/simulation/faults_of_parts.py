"""Faults to plant in host entries of window blocks and checkpoints, and in host files of ranks; see `faults`.

They need worlds with host files and such a model, so they are apart from the faults of all worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvforge.coordinator.core.cache import host_hits
from kvforge.coordinator.core.cache.disk_hits import DiskSearch
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.host_copies import HostCopies
from kvforge.coordinator.core.cache.host_hits import PrefixSearch
from kvforge.coordinator.core.cache.host_node import NO_HOST_BLOCK
from kvforge.coordinator.core.cache.host_parts import CHECKPOINT
from kvforge.coordinator.core.cache.host_tier import HostTier
from kvforge.coordinator.core.cache.residency import Residency
from kvforge.coordinator.core.workers import teams
from kvforge.coordinator.core.workers.teams import Team
from tools.simulation.faults import Patch

FAULTS_OF_PARTS: dict[str, Callable[[], list[Patch]]] = {}
OF_RANKS = {"host_file_of_the_first_rank_alone", "host_copies_of_the_first_rank_alone"}
ON_DISK = {"window_blocks_on_the_disk_of_the_block_before"}
OF_STATES = {"checkpoint_on_the_host_of_another_position", "checkpoint_on_the_host_of_any_position"}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_PARTS[make.__name__] = make
    return make


@fault
def host_hit_without_its_windows() -> list[Patch]:
    """A hit from the host takes all blocks with KV; where window blocks lack, it takes those of another block."""
    windows = PrefixSearch.windows

    def any_windows(self: PrefixSearch, number: int) -> Any:
        found = windows(self, number)
        others = (windows(self, other) for other in range(self.known) if found is None)
        return found or next((each for each in others if each is not None and each[1]), None)

    return [(PrefixSearch, "windows", any_windows)]


@fault
def host_hit_with_a_window_one_block_short() -> list[Patch]:
    """A hit from the host takes one window block fewer than is in sight."""
    find = host_hits.find_in_both

    def short(*arguments: Any, first_of: Callable[[Group, int], int]) -> Any:
        def later(group: Group, tokens: int) -> int:
            return min(first_of(group, tokens) + 1, tokens // group.pool.blocks.block_size)

        return find(*arguments, first_of=later)

    return [(host_hits, "find_in_both", short)]


def _behind_the_block_before(wanted: Callable[[int], bool]) -> list[Patch]:
    """Parts with these numbers are stored as those of the block before theirs."""
    write_parts = HostCopies.write_parts

    def shifted(self: HostCopies, node_id: int, ids: tuple[int, ...], number: int) -> None:
        parent = self.tier.nodes[node_id].parent
        usable = wanted(number) and parent > 0 and self.tier.nodes[parent].block != NO_HOST_BLOCK
        write_parts(self, parent if usable else node_id, ids, number)

    return [(HostCopies, "write_parts", shifted)]


@fault
def window_block_on_the_host_of_another_position() -> list[Patch]:
    """Window blocks become entries of the block before theirs."""
    return _behind_the_block_before(lambda number: number < CHECKPOINT)


@fault
def checkpoint_on_the_host_of_another_position() -> list[Patch]:
    """A checkpoint becomes an entry of the block before its own."""
    return _behind_the_block_before(lambda number: number >= CHECKPOINT)


@fault
def checkpoint_on_the_host_of_any_position() -> list[Patch]:
    """A hit from the host goes on from the longest checkpoint, whatever it is behind."""
    parts = HostTier.parts

    def of_any(self: HostTier, node_id: int, first: int, count: int) -> tuple[int, ...] | None:
        at = node_id
        while at > 0:
            found = parts(self, at, first, count)
            if found is not None or first < CHECKPOINT:
                return found
            at = self.nodes[at].parent
        return None

    return [(HostTier, "parts", of_any)]


@fault
def pages_of_a_window_swapped_on_the_host() -> list[Patch]:
    """The window blocks of a block come back from the host in another order."""
    parts = HostTier.parts

    def swapped(self: HostTier, node_id: int, first: int, count: int) -> tuple[int, ...] | None:
        found = parts(self, node_id, first, count)
        return None if found is None else found[::-1]

    return [(HostTier, "parts", swapped)]


@fault
def windows_from_the_host_count_at_once() -> list[Patch]:
    """A sequence has window blocks that are on their way to it before the step is acknowledged."""
    load = Residency._load

    def at_once(self: Residency, group: Group, slot: int, placement: Any, fresh: Any) -> None:
        load(self, group, slot, placement, fresh)
        if not placement.host:
            self._sequences.computed[slot] = self._sequences.scheduled[slot]

    return [(Residency, "_load", at_once)]


@fault
def window_blocks_on_the_disk_of_the_block_before() -> list[Patch]:
    """A part comes back from the disk to the place of the next block's."""
    part = DiskSearch._part_on_disk

    def before(self: DiskSearch, number: int, each: int) -> tuple[int, ...] | None:
        return part(self, max(0, number - 1), each)

    return [(DiskSearch, "_part_on_disk", before)]


@fault
def host_file_of_the_first_rank_alone() -> list[Patch]:
    """The books go on with whatever files the other ranks have."""
    return [(teams, "_joint_identity", lambda identities: identities[0])]


@fault
def host_copies_of_the_first_rank_alone() -> list[Patch]:
    """A step's copies count when the first rank has made them, and stay when the others are lost."""
    answer = Team.answer

    def believed(self: Team, rank: int, result: Any) -> bool:
        group = self.members[0].group if 0 in self.members else None
        if rank == 0 and group is not None and group.host is not None:
            for sent in group.host.sent:
                if sent.step == result.step_id:
                    for node_id in sent.writes:
                        node = group.host.tier.nodes[node_id]
                        if not node.written:
                            group.host.tier.filled(node_id)
        return answer(self, rank, result)

    return [(Team, "answer", believed), (HostTier, "written", lambda self, node_id: None), (HostCopies, "lost", _kept)]


def _kept(self: HostCopies) -> None:
    self.sent = type(self.sent)(type(sent)(sent.step, (), ()) for sent in self.sent)
    LOST(self)


LOST = HostCopies.lost
