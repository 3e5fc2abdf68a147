"""Explains why no node has room for a replica or gateway."""

from __future__ import annotations

from collections.abc import Iterable

from .views import Amounts

WORDS = {"CPU": "CPU", "GPU": "GPU"}


def reason_for_no_room(bundle: Amounts, nodes: Iterable[Amounts], what: str) -> str:
    """Return why no node can hold `bundle`; "" if an empty node could.

    Args:
        bundle: The needed resources.
        nodes: All resources of each node.
        what: The member to place, like `a replica`.
    """
    sizes = list(nodes)
    if any(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in sizes):
        return ""
    largest = {name: max((node.get(name, 0.0) for node in sizes), default=0.0) for name in bundle}
    has = ", ".join(amount_of(name, largest[name]) for name in bundle)
    return f"the cluster has no node with {wanted(bundle)} for {what}; the largest has {has}"


def wanted(bundle: Amounts) -> str:
    """Return a bundle in words, the scarcest resource first."""
    return " and ".join(amount_of(name, bundle[name]) for name in sorted(bundle, key=lambda name: name != "GPU"))


def amount_of(name: str, amount: float) -> str:
    """Return an amount in words, like `2 GPUs`."""
    return f"{amount:g} {WORDS.get(name, name)}{'s' if name in WORDS and amount != 1 else ''}"
