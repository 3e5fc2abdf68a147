"""Copies between a group's host tier and its disk tier, ordered beside the steps.

*Down*: an entry of the host tier is copied to the disk soon after it has come there, so that the host tier can give its
block up at any time, and a host that dies loses little.

*Up*: a request about to start whose prefix goes on on the disk waits until these blocks are in the host tier, if that
takes less time than computing them (`disk_costs`). Then it starts as with any host hit. It waits for a limited time,
and is computed then.

An order holds what it reads and owns what it writes until the worker's answer, so orders end in any order, and no step
waits for one. A worker that comes back to a restarted coordinator gets the unanswered orders again. The disks of
several ranks count as one (`rank_disks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_FULL,
    DISK_NOT_FOUND,
    DISK_READ,
    DISK_WIPE,
    DISK_WRITE,
    DiskEntries,
    DiskOrders,
    DiskResults,
    DiskScan,
    DiskStats,
)

from .disk_costs import DiskCosts
from .disk_entries import read_entries
from .disk_orders import DiskOrder, orders_message
from .disk_tier import DiskTier
from .hashing import BlockHasher, Hashes
from .host_free import ALIGN
from .host_node import NO_HOST_BLOCK
from .host_tier import HostTier
from .prefix_cache import Tokens, root_key
from .rank_disks import DiskOutcome, RankDisks

ORDERS_MAX = 1 << 12  # in flight, reads and writes: bounds a message
WRITES_MAX = 64  # in flight: so many blocks of the host tier cannot be given up
READ_SHARE = 2  # a request brings at most 1 / READ_SHARE of the host tier from the disk
FAILURES_MAX = 16  # in a row: the tier is off until the worker registers again


class DiskLoad:
    """The reads that one request orders together.

    Attributes:
        number: Its number.
        most: The most blocks to read.
        ours: Its orders.
        awaited: Loads to wait for: others may bring a part.
    """

    def __init__(self, copies: DiskCopies, number: int, most: int) -> None:
        self._copies, self.number, self.most = copies, number, most
        self.ours: set[int] = set()
        self.awaited: dict[int, None] = {}

    def request(self, node_id: int, disk_id: int, owner: int) -> bool:
        """Order the copy of an entry.

        Args:
            node_id: Its node in the host tier.
            disk_id: Its node in the disk tier, which is a hit.
            owner: The tenant that is charged for the block of the host tier; 0 for none.

        Returns:
            False if the host tier has no place for it.
        """
        return self._copies.read(self, node_id, disk_id, owner)


class DiskCopies:
    """The disk copies of one group.

    Attributes:
        tier: The books of the disk tier.
        wanted: Nodes of the host tier that are going to be written, oldest first.
        orders: Orders in flight, by id.
        loads: Orders that have not ended, by load.
        cursor: Of the next scan.
        scanning: A scan is to be sent or in flight: 0: none, 1: to be sent, 2: sent.
        failures: Orders in a row that failed.
        stalled: A request stopped waiting, and no order has ended since: no other request waits meanwhile.
        off: There were too many failures.
        costs: Measures reads, and decides whether they are worth it.
        ranks: What the ranks of the worker announce and answer; None for one process.
    """

    def __init__(self, tier: DiskTier, host: HostTier, block_size: int, costs: DiskCosts, ranks: int = 1) -> None:
        self.tier, self._host, self._token_bytes, self.costs = tier, host, 4 * block_size, costs
        self.ranks = RankDisks(ranks) if ranks > 1 else None
        self.wanted: dict[int, None] = {}
        self.orders: dict[int, DiskOrder] = {}
        self.loads: dict[int, set[int]] = {}
        self._loading: dict[int, int] = {}  # node of the host tier -> load
        self._last_order = self._last_load = 0
        self.cursor, self.scanning = 0, 1
        self.failures = 0
        self.stalled = self.off = False

    # ---------------------------------------------------------------------------------------------------- registration

    def announce(self, message: DiskEntries, hasher: BlockHasher, tenants: dict[int, int], rank: int = 0) -> None:
        """Take entries that the worker found, and ask for the next ones.

        Args:
            message: The entries.
            hasher: Makes hashes under this coordinator's key.
            tenants: The tenants that are known, by their tags.
            rank: The rank that found them.

        Raises:
            ProtocolError: The message is malformed, or names a block twice or outside the tier.
        """
        tier, ranks, block_size = self.tier, self.ranks, self._token_bytes // 4
        if tier.announced:
            return  # sent twice, around a restart of the coordinator
        if rank and ranks is not None:
            ranks.announce(rank, message, tier.total, block_size)
            return
        entries = read_entries(message, self.cursor, tier.total, block_size)
        if entries is None:
            return
        used = {*(node.block for node in tier.nodes.values()), *tier.to_wipe}
        if not used.isdisjoint(entry.block for entry in entries):
            raise ProtocolError("disk_entries: a block was announced before")
        for entry in entries:
            if ranks is None or ranks.has(entry):
                tier.adopt(*entry[:5], hasher, entry.tag, tenants.get(entry.tag, 0))
            else:
                tier.reject(entry.block, entry.tag)
        self.cursor += len(entries)
        self.scanning = 0 if message.last else 1
        if not message.last:
            return
        if ranks is None:
            tier.end_announcement(message.usable)
        else:
            tier.end_announcement(max(message.usable, ranks.usable), ranks.tags())
            ranks.forget_found()
        self.wanted.update(dict.fromkeys(self._host.cached_nodes()))

    def came_back(self) -> None:
        """The worker has another connection: send everything that is unanswered again."""
        self.scanning = 1 if self.scanning else 0
        if self.ranks is not None:
            self.ranks.came_back()
        self.costs.interrupt()  # the reads in flight waited for the coordinator too
        for order in self.orders.values():
            order.sent = False

    # ---------------------------------------------------------------------------------------------------------- down

    def want(self, node_id: int) -> None:
        """Write an entry that has come into the host tier, as soon as the disk can take it."""
        if self.off:
            return
        self.wanted[node_id] = None
        if len(self.wanted) > self._host.total:  # a slow disk: the oldest have left the host tier, or will soon
            del self.wanted[next(iter(self.wanted))]
            self.tier.unsaved_total += 1

    def _write_next(self) -> bool:
        """Order the next write. Return False if none can be ordered now."""
        host, tier = self._host, self.tier
        while self.wanted:
            node_id = next(iter(self.wanted))
            del self.wanted[node_id]
            node = host.nodes.get(node_id)
            if node is None or not node.written or node.damaged:
                tier.unsaved_total += node is None or node.block == NO_HOST_BLOCK
                continue
            disk_id = self._node_of(node_id)
            if disk_id is None:
                tier.unsaved_total += 1
                continue
            if tier.nodes[disk_id].block != NO_HOST_BLOCK:
                tier.use(disk_id)
                continue
            if not tier.give_block(disk_id, owner=node.owner):
                tier.prune(disk_id)
                tier.unsaved_total += 1
                continue
            tier.nodes[disk_id].tag, tier.nodes[disk_id].once = node.tag, node.once
            host.hold(node_id)
            self._order(DiskOrder(DISK_WRITE, node_id, disk_id))
            return True
        return False

    def _node_of(self, node_id: int) -> int | None:
        """Return the disk node with the content of a host node, made with those of its ancestors; None for none."""
        host, tier = self._host, self.tier
        path: list[int] = []
        at = node_id
        while at > 0:
            node = host.nodes[at]
            known = tier.find(node.value, node.tokens)
            if known is not None:
                at = known
                break
            path.append(at)
            at = node.parent
        parent = at
        for number in reversed(path):
            node = host.nodes[number]
            found = tier.add(parent, node.value, node.tokens)
            if found is None:
                tier.prune(parent)
                return None
            parent = found
        return parent

    def _order(self, order: DiskOrder) -> int:
        self._last_order += 1
        self.orders[self._last_order] = order
        return self._last_order

    # ------------------------------------------------------------------------------------------------------------ up

    def load(
        self, salt: int, tokens: Tokens, hashes: Hashes, held: tuple[int, ...], first: int, end: int, owner: int = 0
    ) -> tuple[int, ...]:
        """Order the copies of a prefix's blocks from the disk to the host tier.

        Args:
            salt: The salt of the prefix.
            tokens: Tokens in the form in which they are indexed, [n] int32.
            hashes: The chained hashes of their full blocks, [m] uint64.
            held: Nodes of the host tier that the prefix has before block `first`. They keep their blocks.
            first: The first block that is neither on the device nor in the host tier.
            end: Where to stop.
            owner: The tenant that is charged for the blocks of the host tier; 0 for none.

        Returns:
            The loads to wait for; () if the disk has nothing that is worth reading.
        """
        host, tier = self._host, self.tier
        if not self.takes_reads:
            return ()
        end = min(end, first + max(1, host.total // READ_SHARE), first + ORDERS_MAX - len(self.orders))
        found = tier.entries(root_key(salt), tokens, hashes, first, end)
        found = found[: self.worth(found, len(found) * self._token_bytes // 4)]
        if not found:
            return ()
        size = len(tier.nodes[found[0]].tokens) // 4
        parent = root_key(salt)
        for kept in held:
            host.hold(kept)
        load = self.begin_load()
        for number in range(first + len(found)):
            own = tokens[number * size : (number + 1) * size].tobytes()
            added = host.add(parent, int(hashes[number]), own)
            if added is None:
                break
            parent = node_id = added
            if number < first:
                continue
            if not load.request(node_id, found[number - first], owner):
                break
        host.prune(parent)
        for kept in held:
            host.release(kept)
        return self.end_load(load)

    @property
    def takes_reads(self) -> bool:
        """Whether a request may wait for the disk."""
        return not (self.off or self.stalled or len(self.orders) >= ORDERS_MAX)

    def worth(self, found: Sequence[int], tokens: int) -> int:
        """Return how many of the blocks that a request wants are to be read: the first ones, or none.

        Args:
            found: Their nodes in the disk tier.
            tokens: The tokens that need not be computed with these blocks.
        """
        if not found:
            return 0
        coming = sum(self.tier.nodes[disk_id].readers > 0 for disk_id in found)
        worth = self.costs.worth(len(found), tokens, len(self._loading) - coming)
        self.tier.declined_total += not worth
        return worth

    def begin_load(self, most: int = ORDERS_MAX) -> DiskLoad:
        """Begin a load of at most so many blocks, which `end_load` must follow."""
        self._last_load += 1
        return DiskLoad(self, self._last_load, min(most, max(1, self._host.total // READ_SHARE)))

    def end_load(self, load: DiskLoad) -> tuple[int, ...]:
        """End the ordering of a load. Return the loads to wait for."""
        if load.ours:
            self.loads[load.number] = load.ours
            load.awaited[load.number] = None
        return tuple(load.awaited)

    def read(self, load: DiskLoad, node_id: int, disk_id: int, owner: int) -> bool:
        """Order the copy of an entry from the disk, unless the host tier has it or gets it; see `DiskLoad.request`."""
        host, tier = self._host, self.tier
        node = host.nodes[node_id]
        if node.block != NO_HOST_BLOCK:
            if node.written and not node.damaged:
                return True
            if node_id not in self._loading:
                return False
            load.awaited[self._loading[node_id]] = None
            return True
        full = len(load.ours) >= load.most or len(self.orders) >= ORDERS_MAX
        before = host.nodes[node.parent].block if node.parent > 0 else NO_HOST_BLOCK
        if full or not host.give_block(node_id, owner, before, room=ALIGN):
            return False
        tier.hold(disk_id)
        node.once, tier.nodes[disk_id].once = tier.nodes[disk_id].once, False
        self._loading[node_id] = load.number
        self.costs.began()
        load.ours.add(self._order(DiskOrder(DISK_READ, node_id, disk_id, load.number)))
        return True

    def read_above(self, host_id: int) -> None:
        """Note that the copy in the host tier is read: reading the one on the disk later is no first read."""
        node = self._host.nodes[host_id]
        disk_id = self.tier.find(node.value, node.tokens)
        if disk_id is not None:
            self.tier.nodes[disk_id].once = False

    def stats(self) -> DiskStats:
        """Return what is shown of the tier."""
        return self.tier.stats(self.off)

    def late(self) -> None:
        """A request has stopped waiting: no other one waits until an order has ended."""
        self.stalled = True
        self.tier.late_total += 1
        self.costs.late()

    # ------------------------------------------------------------------------------------------------------- messages

    def flush(self, epoch: int) -> list[tuple[int, DiskScan | DiskOrders]]:
        """Return what is to be sent now, each with the rank that gets it."""
        ranks = self.ranks
        if self.scanning:
            if ranks is not None and not ranks.announced:
                return [*ranks.scans(epoch)]
            if self.scanning == 2:
                return []
            self.scanning = 2
            return [(0, DiskScan(epoch, self.cursor))]
        orders = self._due(epoch)
        return [] if orders is None else [(rank, orders) for rank in range(ranks.count if ranks is not None else 1)]

    def _due(self, epoch: int) -> DiskOrders | None:
        """Return the orders to send now; None for none."""
        if self.off or not self.tier.announced:
            return None
        for block in self.tier.next_wipes(ORDERS_MAX - len(self.orders)) if self.tier.to_wipe else ():
            self._order(DiskOrder(DISK_WIPE, 0, block))
        if self.wanted:
            writes = sum(order.kind == DISK_WRITE for order in self.orders.values())
            most = min(WRITES_MAX, max(1, self._host.total // 4))
            while writes < most and len(self.orders) < ORDERS_MAX and self._write_next():
                writes += 1
        due = [(number, order) for number, order in self.orders.items() if not order.sent]
        if not due:
            return None
        return orders_message(epoch, due, self._host.nodes, self.tier.nodes, self._token_bytes)

    def ended(self, message: DiskResults, rank: int = 0) -> list[int]:
        """Record orders that have ended.

        Args:
            message: The results.
            rank: The rank that sends them. An order has ended once all ranks have answered it.

        Returns:
            The loads that have ended with them.

        Raises:
            ProtocolError: The message is malformed, or names an order that was never given.
        """
        results = message.results
        if results.size % 3:
            raise ProtocolError(f"disk_results: {results.size} numbers are no results")
        over: list[int] = []
        loading, loaded = len(self._loading), self.tier.loaded_total
        for number, outcome, usable in results.reshape(-1, 3).tolist():
            if not 0 < number <= self._last_order or not DISK_DONE <= outcome <= DISK_FULL:
                raise ProtocolError(f"disk_results: order {number}, outcome {outcome}")
            if number not in self.orders:
                continue  # answered twice, around a restart of the coordinator
            result: DiskOutcome | None = DiskOutcome(number, outcome, usable)
            if self.ranks is not None:
                result = self.ranks.answer(rank, DiskOutcome(number, outcome, usable))
            if result is not None:
                over.extend(self._ended(result))
        if len(self._loading) < loading:
            self.costs.progressed(self.tier.loaded_total - loaded, len(self._loading))
        self.off |= self.failures >= FAILURES_MAX
        if self.off:
            self.wanted.clear()
        return over

    def _ended(self, result: DiskOutcome) -> list[int]:
        """Record an order that has ended. Return its load if that has ended with it."""
        order, outcome = self.orders.pop(result.order), result.outcome
        self.stalled = False
        self.tier.failed_total += outcome in (DISK_FAILED, DISK_FULL)
        self.failures = self.failures + 1 if outcome == DISK_FAILED else 0
        if order.kind == DISK_WRITE:
            self._written(order, result)
        elif order.kind == DISK_WIPE:
            self.tier.wiped(order.disk) if outcome == DISK_DONE else self.tier.not_wiped(order.disk)
        else:
            self._read(order, outcome)
            left = self.loads[order.load]
            left.discard(result.order)
            if not left:
                del self.loads[order.load]
                return [order.load]
        return []

    def _written(self, order: DiskOrder, result: DiskOutcome) -> None:
        tier = self.tier
        self._host.release(order.host)
        if result.outcome == DISK_DONE:
            tier.written(order.disk)
            return
        tier.unsaved_total += 1
        block = tier.nodes[order.disk].block
        tier.drop(order.disk, quarantine=result.outcome == DISK_FAILED)
        if result.outcome == DISK_FULL:
            tier.limit(result.usable)
        if result.partly:
            tier.note_half(block)

    def _read(self, order: DiskOrder, outcome: int) -> None:
        host, tier = self._host, self.tier
        del self._loading[order.host]
        if outcome == DISK_DONE:
            host.filled(order.host)
            tier.loaded_total += 1
            tier.release(order.disk)
            return
        host.drop(order.host)
        tier.missed_tags_total += outcome == DISK_NOT_FOUND
        tier.missed_checksums_total += outcome == DISK_DAMAGED
        tier.damage(order.disk)
        tier.release(order.disk)

    def lost(self) -> list[int]:
        """The worker is lost: give back what its orders use in the host tier. Return the loads, which have ended.

        A process of the worker may still write the host blocks of its reads.
        """
        for order in self.orders.values():
            if order.kind == DISK_WRITE:
                self._host.release(order.host)
            elif order.kind == DISK_READ:
                self._host.drop(order.host, quarantine=True)
        over = list(self.loads)
        self.orders.clear()
        if self.ranks is not None:
            self.ranks.answers.clear()
        self.loads.clear()
        self._loading.clear()
        self.wanted.clear()
        return over

    # ----------------------------------------------------------------------------------------------------- invariants

    def held_nodes(self) -> Iterable[int]:
        """Yield the nodes of the host tier that orders read."""
        return (order.host for order in self.orders.values() if order.kind == DISK_WRITE)

    def filled_nodes(self) -> Iterable[int]:
        """Yield the nodes of the host tier that orders write."""
        return self._loading

    def check_invariants(self) -> None:
        """Check that each order in flight has its blocks, and that nothing else uses one."""
        tier, readers, writes = self.tier, dict[int, int](), set[int]()
        tier.check_invariants()
        if self.ranks is not None:
            assert self.orders.keys() >= self.ranks.answers.keys(), "answers to orders that are not in flight"
        wiped = {order.disk for order in self.orders.values() if order.kind == DISK_WIPE}
        assert wiped == tier.wiping, "disk blocks that orders wipe"
        for number, order in self.orders.items():
            if order.kind == DISK_WRITE:
                assert order.disk not in writes, "a disk block is written twice"
                writes.add(order.disk)
            elif order.kind == DISK_READ:
                readers[order.disk] = readers.get(order.disk, 0) + 1
                assert number in self.loads[order.load] and self._loading[order.host] == order.load, "a load"
        for node_id, node in tier.nodes.items():
            assert node.readers == readers.get(node_id, 0), "readers of a disk block"
            if node.block != NO_HOST_BLOCK:
                assert node.written != (node_id in writes), "a disk block is neither written nor in the making"
        assert sum(map(len, self.loads.values())) == len(self._loading) == sum(readers.values()), "reads of loads"
