"""Entries of the host tier that can give their blocks up, by the tenants that are charged for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator


class HostLru:
    """Nodes in the order of their last use. Iteration begins with the least recently used one.

    Attributes:
        by_owner: For each owner with nodes, these and the times of their last use, the oldest first.
        stamp: The time of the last use of all.
    """

    def __init__(self) -> None:
        self.by_owner: dict[int, OrderedDict[int, int]] = {}
        self.stamp = 0

    def __len__(self) -> int:
        return sum(map(len, self.by_owner.values()))

    def __iter__(self) -> Iterator[int]:
        stamps = {node_id: stamp for nodes in self.by_owner.values() for node_id, stamp in nodes.items()}
        return iter(sorted(stamps, key=stamps.__getitem__))

    def has(self, node_id: int, owner: int) -> bool:
        """Return whether a node of the owner is here."""
        return node_id in self.by_owner.get(owner, ())

    def add(self, node_id: int, owner: int) -> None:
        """Add a node, or make it the most recently used one."""
        self.stamp += 1
        nodes = self.by_owner.setdefault(owner, OrderedDict())
        nodes[node_id] = self.stamp
        nodes.move_to_end(node_id)

    def add_oldest(self, node_id: int, owner: int) -> None:
        """Add a node as the least recently used one of its owner, or make it that."""
        nodes = self.by_owner.setdefault(owner, OrderedDict())
        first = next(iter(nodes.values()), self.stamp)
        nodes[node_id] = first - 1
        nodes.move_to_end(node_id, last=False)

    def discard(self, node_id: int, owner: int) -> None:
        """Remove a node of the owner, if it is there."""
        nodes = self.by_owner.get(owner)
        if nodes is not None and nodes.pop(node_id, None) is not None and not nodes:
            del self.by_owner[owner]

    def oldest(self, owners: Container[int] | None = None) -> int | None:
        """Return the least recently used node of these owners, or of all; None if they have none."""
        firsts = [
            next(iter(nodes.items())) for owner, nodes in self.by_owner.items() if owners is None or owner in owners
        ]
        return min(firsts, key=lambda first: first[1])[0] if firsts else None
