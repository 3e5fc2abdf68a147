"""The books of the host tier: KV blocks in a file of the host, which outlives the worker that wrote them.

A worker maps a file of blocks and announces its identity with the pool. The coordinator owns these blocks as it owns
those of the device. `HostTier` has the books of one file:

    free + cached + referenced + quarantined = total

- *cached*: the block holds the KV of an entry, and a worker has acknowledged the copy. Only these can be hit.
- *referenced*: a copy into or out of the block is pending or in flight.
- *quarantined*: a worker was lost while a step that writes the block was in flight. A hung process may still write it.
  The worker locks the file for its whole life, so the next process that announces the file ends the quarantine. Also a
  block with bytes that are being overwritten, because the tenant of its entry was wiped.

An entry is a node of a trie: the tokens of a block behind a parent node. The root is the salt. Nodes are apart from the
keys of the prefix index, because a key changes when its device block is freed. A node without a block keeps the
place of an ancestor that is not in the tier. The file's identity covers all else that the content depends on: model,
layout, dtype and device. Window blocks and checkpoints are nodes behind that of a KV block; see `host_parts`.
"""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from .hashing import Hashes
from .host_free import FreeBlocks
from .host_lru import HostLru
from .host_node import NO_HOST_BLOCK, HostNode, Tokens
from .host_parts import part_tokens, part_value
from .host_yield import HostYield
from .tenants import Shares
from .wipes import NO_TAG, Wipes


class HostTier:
    """The blocks of one file: [0, total).

    Attributes:
        identity: The identity of the file and of what determines its content.
        total: Number of blocks.
        usage: Blocks that each tenant is charged for; none of those that no tenant is charged for.
        epoch: The registration of the worker that has the file mapped; 0 for none.
        saved_total: Copies into the file that were acknowledged, in blocks.
        loaded_total: Copies to the device that were acknowledged, in blocks.
        evicted_total: Entries that gave their block to another.
        unsaved_total: Evicted device blocks that found no place here.
        swapped_total: Preempted requests that came back with blocks from here.
        swapped_blocks_total: Blocks that they read.
        swap_saved_us_total: What computing these would have taken by the measured costs, less their copies.
        returns_total: Sequences that came back from here before their next request.
        returns_used_total: Those for which that request came.
        returns_wasted_total: Those that lost their blocks again before.
        unswapped_total: Those that computed the tokens again, because that takes less time or nothing was measured.
        missed_tags_total: Reads that found another entry's tag, or none, in blocks.
        missed_checksums_total: Reads of other bytes than were saved, in blocks.
        to_wipe: Blocks to overwrite with zeros, oldest first.
        wiping: Blocks for which that is ordered.
        stale: Free blocks that may have bytes of an earlier entry.
        breaks: How often an entry went although others were behind it: damaged, lost or wiped ones do.
        yields: Which evicted blocks are copied here.
    """

    def __init__(
        self,
        identity: str,
        total: int,
        nodes_max: int,
        shares: Shares | None = None,
        wipes: Wipes | None = None,
        window: int = 0,
    ) -> None:
        self.identity, self.total, self._nodes_max, self._wipes = identity, total, nodes_max, wipes
        self._shares = shares
        self.usage: dict[int, int] = {}
        self.epoch = 0
        self.nodes: dict[int, HostNode] = {}
        self._last_node = 0
        self._by_value: dict[int, int] = {}
        self._free = FreeBlocks(total)
        self._lru = HostLru()
        self._quarantine: list[int] = []
        self.to_wipe: list[int] = []
        self.wiping: set[int] = set()
        self.stale: set[int] = set()
        self.breaks = 0
        self.yields = HostYield(window, total)
        self.saved_total = self.loaded_total = self.evicted_total = self.unsaved_total = 0
        self.swapped_total = self.unswapped_total = 0
        self.swapped_blocks_total = self.swap_saved_us_total = 0
        self.missed_tags_total = self.missed_checksums_total = 0
        self.returns_total = self.returns_used_total = self.returns_wasted_total = 0

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that can be hit, and that no copy uses."""
        return len(self._lru)

    @property
    def quarantined(self) -> int:
        """Blocks that a lost worker may still write, or that are being wiped."""
        return len(self._quarantine) + len(self.to_wipe) + len(self.wiping)

    @property
    def referenced(self) -> int:
        """Blocks that a copy uses."""
        return self.total - self.free - self.cached - self.quarantined

    # ------------------------------------------------------------------------------------------------------- lookup

    def match(self, root: int, tokens: Tokens, hashes: Hashes, first: int, end: int) -> tuple[int, ...]:
        """Return the nodes of the longest run of written blocks [first, ...) of a prefix.

        Args:
            root: The root key of the prefix's salt.
            tokens: Tokens in the form in which they are indexed, [n] int32.
            hashes: The chained hashes of their full blocks, [m] uint64.
            first: The first block to look for. Those before it need nodes, but no blocks here.
            end: Where to stop.
        """
        if first >= end:
            return ()
        return tuple(takewhile(self.is_hit, self.chain(root, tokens, hashes, end)[first:]))

    def chain(self, root: int, tokens: Tokens, hashes: Hashes, end: int) -> list[int]:
        """Return the nodes of a prefix as far as there are any, with or without blocks; see `match`."""
        found: list[int] = []
        if not self.nodes:
            return found
        parent, known, nodes = root, self._by_value, self.nodes
        for number, value in enumerate(hashes[:end].tolist()):
            node_id = known.get(value)
            if node_id is None:
                break
            node = nodes[node_id]
            size = len(node.tokens) // 4
            own = tokens[number * size : (number + 1) * size]
            if node.parent != parent or node.tokens != own.tobytes():
                break
            found.append(node_id)
            parent = node_id
        return found

    def is_hit(self, node_id: int) -> bool:
        """Return whether a node's block has its content, as far as is known."""
        node = self.nodes[node_id]
        return node.written and not node.damaged

    def parts(self, node_id: int, first: int, count: int) -> tuple[int, ...] | None:
        """Return the nodes of parts [first, first + count) of an entry if all are hits, else None; see `host_parts`."""
        found: list[int] = []
        for number in range(first, first + count):
            part = self._by_value.get(part_value(self.nodes[node_id].value, number))
            if part is None or not self.is_hit(part):
                return None
            node = self.nodes[part]
            if node.parent != node_id or node.tokens != part_tokens(number):
                return None
            found.append(part)
        return tuple(found)

    def has_hash(self, value: int) -> bool:
        """Return whether a node has this chained hash."""
        return value in self._by_value

    def find(self, value: int, tokens: bytes) -> int | None:
        """Return the node with this chained hash if it has these tokens."""
        node_id = self._by_value.get(value)
        return node_id if node_id is not None and self.nodes[node_id].tokens == tokens else None

    # ------------------------------------------------------------------------------------------------------- entries

    def add_part(self, node_id: int, number: int) -> int | None:
        """Return the node of a part of an entry, as `add` does."""
        return self.add(node_id, part_value(self.nodes[node_id].value, number), part_tokens(number))

    def add(self, parent: int, value: int, tokens: bytes) -> int | None:
        """Return the node of a block behind a parent, which is made if it is new.

        Returns:
            The node; None if another content has the same hash, or if there are too many nodes.
        """
        node_id = self._by_value.get(value)
        if node_id is not None:
            node = self.nodes[node_id]
            return node_id if node.parent == parent and node.tokens == tokens else None
        if len(self.nodes) >= self._nodes_max:
            return None
        self._last_node += 1
        self.nodes[self._last_node] = HostNode(parent, value, tokens)
        self._by_value[value] = self._last_node
        if parent > 0:
            self.put_behind(parent)
        return self._last_node

    def put_behind(self, node_id: int) -> None:
        """Count something behind a node, which then does not give its block up."""
        node = self.nodes[node_id]
        node.children += 1
        if node.children == 1:
            self._lru.set_leaf(node_id, node.owner, False)

    def remove_behind(self, node_id: int) -> None:
        """Count something less behind a node."""
        node = self.nodes[node_id]
        node.children -= 1
        if not node.children:
            self._lru.set_leaf(node_id, node.owner, True)

    def prune(self, node_id: int) -> None:
        """Remove a node that has neither a block nor children, and the ancestors that then have neither."""
        while node_id > 0:
            node = self.nodes[node_id]
            if node.block != NO_HOST_BLOCK or node.children:
                return
            del self.nodes[node_id], self._by_value[node.value]
            node_id = node.parent
            if node_id > 0:
                self.remove_behind(node_id)

    def give_block(self, node_id: int, owner: int = 0, behind: int = NO_HOST_BLOCK, room: int = 0) -> bool:
        """Give one node a block; see `give_blocks`. Return False if no block may be taken."""
        return self.give_blocks([node_id], [owner], behind, room) == 1

    def give_blocks(
        self,
        node_ids: list[int],
        owners: list[int],
        behind: int = NO_HOST_BLOCK,
        room: int = 0,
        backwards: bool = False,
    ) -> int:
        """Give nodes without blocks one each to write: free ones, or those of the least recently used leaves.

        A tenant at its ceiling takes the blocks of entries of its own. Entries of others stay within their floors. The
        entries before a node are no leaves, so that none of them is taken.

        Args:
            node_ids: The nodes, [n], which get neighbours as far as there are any.
            owners: The tenants that are charged for their blocks, [n]; 0 for none.
            behind: The block of the entry before them: the next ones are best.
            room: Neighbours that are wanted in another place, if they are more.
            backwards: The last node is the first of its chain.

        Returns:
            How many of the nodes, from the first, have a block now. For the others no block may be taken: all are in
            use by copies, needed by others, or of tenants within their quotas.
        """
        nodes = [self.nodes[node_id] for node_id in node_ids]
        if not nodes:
            return 0
        ends = nodes[0], nodes[-1]
        for node in ends:
            node.children += 1  # an entry that gives its block may be its only child, and must not take it along
        self._free.join()
        given = self._charge_each(owners)
        for node in ends:
            node.children -= 1
        skipped, stale, wipes = self.yields.skipped, self.stale, self._wipes
        blocks = self._free.take(given, behind, room)
        for node, owner, block in zip(nodes, owners, reversed(blocks) if backwards else blocks, strict=False):
            assert node.block == NO_HOST_BLOCK
            node.block, node.owner, node.written = block, owner, False
            skipped.pop(node.value, None)
            stale.discard(block)
            node.tag = NO_TAG if wipes is None else wipes.tag_of(owner)
        return given

    def _charge_each(self, owners: list[int]) -> int:
        """Charge tenants for a block each, from the first, and evict entries for them. Return how many were charged."""
        given, usage = 0, self.usage
        for owner in owners:
            if not self._may_take_free(owner, given) and not self._evict_one(owner):
                break
            if owner:
                usage[owner] = usage.get(owner, 0) + 1
            given += 1
        return given

    def _evict_one(self, owner: int) -> bool:
        """Evict the least recently used leaf that a tenant may take. Return False if there is none."""
        oldest = self._lru.oldest(self._givers(owner))
        if oldest is None:
            return False
        self.evicted_total += 1
        self.drop(oldest)
        return True

    def cached_nodes(self) -> list[int]:
        """Return the entries that no copy uses, least recently used first."""
        return list(self._lru)

    def _is_full(self, owner: int) -> bool:
        """Return whether a tenant is at its ceiling."""
        return self._shares is not None and self.usage.get(owner, 0) >= self._shares[1][owner]

    def _may_take_free(self, owner: int, given: int) -> bool:
        """Return whether a free block may become the tenant's, beside so many that are given already."""
        free = len(self._free) - given
        if free <= 0 or self._shares is None:
            return free > 0
        return not self._is_full(owner) and free > self._reserved(owner, self._shares[0])

    def _reserved(self, owner: int, floors: npt.NDArray[np.int64]) -> int:
        """Return how many blocks are reserved for the unused floors of other tenants."""
        lacking = ((tenant, int(floors[tenant]) - self.usage.get(tenant, 0)) for tenant in floors.nonzero()[0].tolist())
        return sum(max(0, blocks) for tenant, blocks in lacking if tenant != owner)

    def _givers(self, owner: int) -> set[int] | None:
        """Return the tenants of which an entry may give its block to the tenant; None: all."""
        if self._shares is None:
            return None
        if self._is_full(owner):
            return {owner}
        floors = self._shares[0]
        return {each for each in self._lru.by_owner if each in (0, owner) or self.usage[each] > floors[each]}

    def _charge(self, node: HostNode, owner: int) -> None:
        """Charge a node's block to another tenant."""
        for tenant, blocks in ((node.owner, -1), (owner, 1)):
            self.usage[tenant] = self.usage.get(tenant, 0) + blocks
            if not self.usage[tenant] or not tenant:
                self.usage.pop(tenant, None)
        node.owner = owner

    def forget_tenant(self, tenant: int) -> None:
        """Charge no tenant for a tenant's blocks, because its index will be reused."""
        self.yields.by_tenant.pop(tenant, None)
        if tenant not in self.usage:
            return
        for node_id, node in self.nodes.items():
            if node.owner == tenant and node.block != NO_HOST_BLOCK:
                if self._lru.has(node_id, tenant):
                    self._lru.discard(node_id, tenant)
                    self._lru.add(node_id, 0, not node.children)
                self._charge(node, 0)

    def use(self, node_id: int) -> None:
        """Make an entry the most recently used one, if no copy uses it."""
        node = self.nodes[node_id]
        if self._lru.has(node_id, node.owner):
            self._lru.add(node_id, node.owner, not node.children)

    def written(self, node_id: int) -> None:
        """Record that the copy into a node's block was acknowledged: it can be hit from now on."""
        self.filled(node_id)
        self.saved_total += 1

    def filled(self, node_id: int) -> None:
        """Record that a node's block has its content, wherever that came from."""
        node = self.nodes[node_id]
        assert node.block != NO_HOST_BLOCK and not node.written
        node.written = True
        if node.wiped:  # while the copy was in flight
            self.drop(node_id)
        else:
            self._lru.add(node_id, node.owner, not node.children)

    def wanted(self, node_id: int) -> None:
        """Count an entry that is going to be read, if its block was used once and not read since."""
        node = self.nodes[node_id]
        if node.once:
            node.once = False
            self.yields.wanted(node.owner)

    def hold(self, node_id: int) -> None:
        """Add a reader, which keeps the entry."""
        node = self.nodes[node_id]
        assert node.written, "a block is read before its copy was acknowledged"
        node.readers += 1
        self._lru.discard(node_id, node.owner)

    def release(self, node_id: int) -> None:
        """Remove a reader; the last one of a damaged entry takes it along."""
        node = self.nodes[node_id]
        assert node.readers > 0
        node.readers -= 1
        if node.readers:
            return
        if node.damaged:
            self.drop(node_id)
        else:
            self._lru.add(node_id, node.owner, not node.children)

    def damage(self, node_id: int) -> None:
        """Record that a read, which still holds the entry, did not find its content: it is no hit any more."""
        node = self.nodes[node_id]
        assert node.readers > 0, "an entry is damaged without a read"
        node.damaged = True

    def drop(self, node_id: int, quarantine: bool = False) -> None:
        """Remove a node's entry, and free its block.

        Args:
            node_id: The node.
            quarantine: A lost worker may still write the block.
        """
        node = self.nodes[node_id]
        self._lru.discard(node_id, node.owner)
        self._charge(node, 0)
        self.breaks += node.children > 0
        if node.wiped:  # a lost worker may write it too: it is overwritten by the next one, which has locked the file
            self.to_wipe.append(node.block)
        elif quarantine:
            self._quarantine.append(node.block)
        else:
            self._free.add(node.block)
            self.stale.add(node.block)
        node.block, node.written, node.readers, node.damaged = NO_HOST_BLOCK, False, 0, False
        node.tag, node.wiped, node.once = NO_TAG, False, False
        self.prune(node_id)

    def attach(self, epoch: int) -> None:
        """A worker has locked and mapped the file, so no earlier one can write it any more."""
        assert not self.epoch, "two workers have the same file"
        self.epoch = epoch
        self._free.update(self._quarantine)
        self.stale.update(self._quarantine)
        self._quarantine.clear()

    # --------------------------------------------------------------------------------------------------------- wiping

    def wipe(self, tag: int) -> int:
        """Drop the entries of a tenant, and overwrite their blocks and all others that may have bytes of it.

        An entry that a copy uses is no hit any more, and is dropped when the copy ends.

        Args:
            tag: The tag of the tenant's entries, from `Wipes.wipe`.

        Returns:
            The number of entries.
        """
        mine = [node_id for node_id, node in self.nodes.items() if node.tag == tag and not node.wiped]
        for node_id in mine:
            node = self.nodes[node_id]
            node.wiped = True
            if node.readers:
                node.damaged = True
            elif node.written:
                self.drop(node_id)
        self._wipe_unused()
        self.yields.skipped.clear()
        return len(mine)

    def _wipe_unused(self) -> None:
        """Overwrite free and quarantined blocks that may have bytes of any tenant."""
        self._free = self._free.without(self.stale)
        self.to_wipe.extend(sorted(self.stale))
        self.stale.clear()
        self.to_wipe.extend(self._quarantine)
        self._quarantine.clear()

    def next_wipes(self, most: int) -> list[int]:
        """Return up to `most` blocks to overwrite now, which `wiped` must follow."""
        blocks, self.to_wipe = self.to_wipe[:most], self.to_wipe[most:]
        self.wiping.update(blocks)
        return blocks

    def wiped(self, block: int) -> None:
        """Record that a block has been overwritten: it is free."""
        self.wiping.remove(block)
        self._free.add(block)

    def wipes_lost(self) -> None:
        """The worker was lost: order what it has not acknowledged from the next one."""
        self.to_wipe.extend(sorted(self.wiping))
        self.wiping.clear()

    @property
    def unwiped(self) -> int:
        """Blocks of wiped entries that may still have their bytes."""
        flagged = sum(node.wiped for node in self.nodes.values())
        return flagged + len(self.to_wipe) + len(self.wiping)

    # ---------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> None:
        """Check that the books agree."""
        owners = Counter(node.owner for node in self.nodes.values() if node.block != NO_HOST_BLOCK and node.owner)
        assert self.usage == owners, "host blocks that tenants are charged for"
        self.yields.check_invariants()
        if self._shares is not None:
            _, ceilings = self._shares
            assert all(blocks <= ceilings[tenant] for tenant, blocks in self.usage.items()), (
                "a tenant above its ceiling"
            )
        placed = [node.block for node in self.nodes.values() if node.block != NO_HOST_BLOCK]
        everywhere = sorted([*placed, *self._free, *self._quarantine, *self.to_wipe, *self.wiping])
        assert everywhere == list(range(self.total)), "a host block is lost, or at two places"
        for node_id, node in self.nodes.items():
            assert self._by_value[node.value] == node_id, "a hash names another node"
            assert node.parent < 0 or node.parent in self.nodes, "a node outlives its parent"
            assert node.block != NO_HOST_BLOCK or node.children, "a node without block or children is kept"
            assert not node.written or node.block != NO_HOST_BLOCK, "an entry without a block"
            assert not node.damaged or node.readers, "a damaged entry is kept"
            assert not node.wiped or not node.written or node.readers, "a wiped entry is kept"
            assert not node.tag or node.block != NO_HOST_BLOCK, "a node without a block has a tag"
            assert not node.once or node.block != NO_HOST_BLOCK, "a node without a block is waited for"
            assert node.block == NO_HOST_BLOCK or node.value not in self.yields.skipped, "a copied block was skipped"
            assert self._lru.has(node_id, node.owner) == (node.written and not node.readers), (
                "entries that can be evicted"
            )
        cached = [node_id for node_id, node in self.nodes.items() if node.written and not node.readers]
        assert self._lru.leaves == {node_id for node_id in cached if not self.nodes[node_id].children}, "leaves"
        assert self.stale.issubset(self._free), "a stale block is in use"
        self._free.check_invariants()
        assert len(self._by_value) == len(self.nodes) <= self._nodes_max, "hashes of nodes"
        parents = [node.parent for node in self.nodes.values() if node.parent > 0]
        assert len(parents) == sum(node.children for node in self.nodes.values()), "children of nodes"
