"""Faults to plant in the host tier: copies that are believed too early, of other content, or lost; see `faults`.

They need worlds with host files, so they are apart from the faults of all worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.host_copies import HostCopies
from kvforge.coordinator.core.cache.host_node import NO_HOST_BLOCK
from kvforge.coordinator.core.cache.host_tier import HostTier
from kvforge.coordinator.core.cache.host_tiers import HostTiers
from kvforge.coordinator.core.cache.host_writeback import HostWriteback
from kvforge.coordinator.core.cache.host_yield import HostYield
from kvforge.coordinator.core.cache.residency import Residency
from tools.simulation.faults import Patch

FAULTS_OF_HOSTS: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_HOSTS[make.__name__] = make
    return make


@fault
def host_copy_believed_when_it_is_sent() -> list[Patch]:
    """An entry can be hit once the step that writes it is sent, and stays when the worker is lost."""
    flush, lost, written = HostCopies.flush, HostCopies.lost, HostTier.written

    def believed(self: HostCopies, step: int) -> Any:
        writes = list(self.writes.values())
        found = flush(self, step)
        for node_id in writes:
            written(self.tier, node_id)
        return found

    def again(self: HostTier, node_id: int) -> None:
        pass

    def kept(self: HostCopies) -> None:
        self.sent = type(self.sent)(type(sent)(sent.step, (), ()) for sent in self.sent)
        lost(self)

    return [(HostCopies, "flush", believed), (HostTier, "written", again), (HostCopies, "lost", kept)]


@fault
def half_written_blocks_stay_entries() -> list[Patch]:
    """Entries of copies that were in flight when the worker was lost can be hit."""
    lost = HostCopies.lost

    def kept(self: HostCopies) -> None:
        for sent in self.sent:
            for node_id in sent.writes:
                self.tier.written(node_id)
            for node_id in sent.reads:
                self.tier.release(node_id)
        self.sent.clear()
        lost(self)

    return [(HostCopies, "lost", kept)]


@fault
def entries_of_another_file_hit() -> list[Patch]:
    """The books of a file go on with whatever file the next worker of that name has."""
    attach = HostTiers.attach

    def alike(self: HostTiers, identity: str, total: int, epoch: int, new: bool = False) -> HostTier:
        return attach(self, identity.partition("/")[0], total, epoch, new)

    return [(HostTiers, "attach", alike)]


@fault
def host_blocks_written_while_they_are_read() -> list[Patch]:
    """An entry that a copy reads gives its block to another one."""
    hold, release = HostTier.hold, HostTier.release

    def held(self: HostTier, node_id: int) -> None:
        hold(self, node_id)
        self._lru.add_oldest(node_id, self.nodes[node_id].owner)

    def released(self: HostTier, node_id: int) -> None:
        node = self.nodes.get(node_id)
        if node is not None and node.block != NO_HOST_BLOCK and node.readers:
            release(self, node_id)

    return [(HostTier, "hold", held), (HostTier, "release", released)]


@fault
def host_copies_left_out_of_repeated_steps() -> list[Patch]:
    """A step that repeats a batch does not carry the blocks that its rows grew into."""
    flush = Group.flush_host_copies

    def without(self: Group, step: int) -> Any:
        if step != self.last_step or self.host is None:
            return flush(self, step)
        self.order_writeback()
        for node_id in self.host.writes.values():
            self.host.tier.written(node_id)
        self.host.writes.clear()
        return flush(self, step)

    return [(Group, "flush_host_copies", without)]


@fault
def kv_from_the_host_counts_at_once() -> list[Patch]:
    """Blocks that a step fills from the host are indexed before it is acknowledged."""
    load = Residency._load

    def at_once(self: Residency, group: Group, slot: int, placement: Any, fresh: Any) -> None:
        load(self, group, slot, placement, fresh)
        self._sequences.computed[slot] = self._sequences.scheduled[slot]

    return [(Residency, "_load", at_once)]


@fault
def host_blocks_in_another_order() -> list[Patch]:
    """The host blocks of a prefix are copied to its device blocks in reverse order."""
    load = HostCopies.load

    def reversed_load(self: HostCopies, slot: int, nodes: Any, targets: list[int], end: int) -> None:
        load(self, slot, nodes, targets[::-1], end)

    return [(HostCopies, "load", reversed_load)]


@fault
def host_entries_of_any_prefix_hit() -> list[Patch]:
    """A host entry is a hit by the tokens of its block, whatever is before it."""
    match = HostTier.match

    def by_block(self: HostTier, root: int, tokens: Any, hashes: Any, first: int, end: int) -> tuple[int, ...]:
        found = list(match(self, root, tokens, hashes, first, end))
        written = {node.tokens: node_id for node_id, node in self.nodes.items() if node.written}
        size = next((len(content) // 4 for content in written), 0)
        for number in range(first + len(found), end if size else 0):
            node_id = written.get(tokens[number * size : (number + 1) * size].tobytes())
            if node_id is None:
                break
            found.append(node_id)
        return tuple(found)

    return [(HostTier, "match", by_block)]


@fault
def readers_of_host_blocks_forgotten() -> list[Patch]:
    """A read that is cancelled keeps its entry held for ever."""

    def cancel(self: HostCopies, block: int) -> None:
        self.reads.pop(block, None)

    return [(HostCopies, "cancel", cancel)]


@fault
def blocks_with_flipped_bits_count() -> list[Patch]:
    """A sequence goes on with blocks that were not found on the host."""
    missed = HostCopies.missed

    def ignored(self: HostCopies, step: int, found: Any) -> list[int]:
        loads = dict(self.loads)
        missed(self, step, found)
        self.loads = loads
        return []

    return [(HostCopies, "missed", ignored)]


@fault
def damaged_host_entries_stay_hits() -> list[Patch]:
    """A read that did not find the content leaves the entry, and each request that hits it begins again for ever."""
    missed = HostCopies.missed

    def kept(self: HostCopies, step: int, found: Any) -> list[int]:
        slots = missed(self, step, found)
        for node in self.tier.nodes.values():
            node.damaged = False
        return slots

    return [(HostCopies, "missed", kept)]


@fault
def load_survives_the_sequence() -> list[Patch]:
    """A sequence that gave its blocks up still gets the KV that was on its way to it."""

    def forget(self: HostCopies, slot: int) -> None:
        pass

    return [(HostCopies, "forget", forget)]


@fault
def block_before_it_written_back_instead() -> list[Patch]:
    """An entry that is written back gets the content of the block before it."""
    missing = HostWriteback._missing

    def shifted(self: HostWriteback, last: int, key: int) -> list[tuple[int, int]]:
        found = {}
        for source, node_id in missing(self, last, key):
            before = self._copies.index.parent_of(source)
            found[before & 0xFFFFFFFF if before >= 0 else source] = node_id
        return list(found.items())

    return [(HostWriteback, "_missing", shifted)]


@fault
def copies_in_flight_survive_a_wipe() -> list[Patch]:
    """An entry of a wiped tenant is a hit once its copy is acknowledged, and its bytes stay."""
    wipe = HostTier.wipe

    def settled(self: HostTier, tag: int) -> int:
        mine = [node for node in self.nodes.values() if node.tag == tag and not node.written]
        found = wipe(self, tag)
        for node in mine:
            node.wiped = False
        return found

    return [(HostTier, "wipe", settled)]


@fault
def wiped_host_blocks_are_free_at_once() -> list[Patch]:
    """The blocks of a wiped tenant are free without being overwritten."""
    wipe = HostTier.wipe

    def freed(self: HostTier, tag: int) -> int:
        found = wipe(self, tag)
        self._free.update(self.to_wipe)
        self.to_wipe.clear()
        return found

    return [(HostTier, "wipe", freed)]


@fault
def host_blocks_beyond_a_ceiling() -> list[Patch]:
    """A tenant takes any free block of a host file, whatever its quota is."""

    def any_free(self: HostTier, owner: int, given: int) -> bool:
        return len(self._free) > given

    return [(HostTier, "_may_take_free", any_free)]


@fault
def yield_of_host_copies_never_counted() -> list[Patch]:
    """Blocks that were used once never count as wanted again, so that their copies end for ever."""

    def wanted(self: HostYield, tenant: int) -> None:
        pass

    return [(HostYield, "wanted", wanted)]


@fault
def skipped_blocks_are_not_recognised() -> list[Patch]:
    """A block that was evicted without a copy and is computed again counts as used once, again and again."""

    def computed_again(self: HostYield, values: list[int]) -> list[int]:
        return []

    return [(HostYield, "computed_again", computed_again)]
