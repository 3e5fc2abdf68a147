"""Entries of the host tier that no copy uses, by the tenants that are charged for them.

Only a leaf gives its block up: an entry with others behind it would leave these without their prefix. So the end of a
chain goes first, and its beginning stays as long as anything needs it. The oldest leaf is found with heaps, in which
items that have become invalid stay until they are seen, or until half of a heap is invalid.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from heapq import heapify, heappop, heappush

HEAP_SPARE = 64  # invalid items of a small heap


class HostLru:
    """Nodes in the order of their last use. Iteration begins with the least recently used one.

    Attributes:
        by_owner: For each owner with nodes, these and the times of their last use, the oldest first.
        stamp: The time of the last use of all.
        leaves: Those of the nodes that have none behind them.
        heaps: For each owner with leaves, the times of their last use and these, as heaps.
    """

    def __init__(self) -> None:
        self.by_owner: dict[int, OrderedDict[int, int]] = {}
        self.stamp = 0
        self.leaves: set[int] = set()
        self.heaps: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.by_owner.values()))

    def __iter__(self) -> Iterator[int]:
        stamps = {node_id: stamp for nodes in self.by_owner.values() for node_id, stamp in nodes.items()}
        return iter(sorted(stamps, key=stamps.__getitem__))

    def has(self, node_id: int, owner: int) -> bool:
        """Return whether a node of the owner is here."""
        return node_id in self.by_owner.get(owner, ())

    def add(self, node_id: int, owner: int, leaf: bool = True) -> None:
        """Add a node, or make it the most recently used one."""
        self.stamp += 1
        nodes = self.by_owner.setdefault(owner, OrderedDict())
        nodes[node_id] = self.stamp
        nodes.move_to_end(node_id)
        self.set_leaf(node_id, owner, leaf)

    def add_oldest(self, node_id: int, owner: int, leaf: bool = True) -> None:
        """Add a node as the least recently used one of its owner, or make it that."""
        nodes = self.by_owner.setdefault(owner, OrderedDict())
        first = next(iter(nodes.values()), self.stamp)
        nodes[node_id] = first - 1
        nodes.move_to_end(node_id, last=False)
        self.set_leaf(node_id, owner, leaf)

    def set_leaf(self, node_id: int, owner: int, leaf: bool) -> None:
        """Record whether other nodes are behind a node of the owner, if it is here."""
        if not leaf:
            self.leaves.discard(node_id)
            return
        nodes = self.by_owner.get(owner)
        if nodes is None or node_id not in nodes:
            return
        self.leaves.add(node_id)
        heap = self.heaps.setdefault(owner, [])
        heappush(heap, (nodes[node_id], node_id))
        if len(heap) > 2 * len(nodes) + HEAP_SPARE:
            self.heaps[owner] = [item for item in set(heap) if self._is_valid(item, nodes)]
            heapify(self.heaps[owner])

    def discard(self, node_id: int, owner: int) -> None:
        """Remove a node of the owner, if it is there."""
        nodes = self.by_owner.get(owner)
        if nodes is None or nodes.pop(node_id, None) is None:
            return
        self.leaves.discard(node_id)
        if not nodes:
            del self.by_owner[owner]
            self.heaps.pop(owner, None)

    def oldest(self, owners: Container[int] | None = None) -> int | None:
        """Return the least recently used leaf of these owners, or of all; None if they have none."""
        firsts: list[tuple[int, int]] = []
        for owner, nodes in self.by_owner.items():
            if owners is None or owner in owners:
                heap = self.heaps.get(owner, [])
                while heap and not self._is_valid(heap[0], nodes):
                    heappop(heap)
                firsts += heap[:1]
        return min(firsts)[1] if firsts else None

    def _is_valid(self, item: tuple[int, int], nodes: OrderedDict[int, int]) -> bool:
        stamp, node_id = item
        return node_id in self.leaves and nodes.get(node_id) == stamp
