"""Owner tags of the entries of host and disk tiers, and which of them were wiped.

An entry carries a tag of the tenant that was charged when it was copied. A tag is a keyed hash of the name, so it stays
valid when the tenant's index is reused, and a disk can keep it across restarts. A wipe gives the tenant another tag. A
worker that was away meanwhile then announces entries with the tag of before, which are wiped and not taken.
"""

from __future__ import annotations

import msgspec

from .hashing import BlockHasher
from .tenants import Tenants

WIPES_MAX = 1 << 16  # remembered for workers that are away; the oldest are forgotten
NO_TAG = 0


class WipedTenant(msgspec.Struct):
    """A tenant that was wiped.

    Attributes:
        number: Of its last wipe.
        used: Entries, or the numbers by which workers share drafts, may have its present tag.
    """

    number: int
    used: bool = False


class Wipes:
    """Tags of tenants.

    Attributes:
        count: Wipes that gave a tenant another tag.
        latest: Wiped tenants by name, those that were wiped last at the end.
        dead: Tags of before, the oldest first.
    """

    def __init__(self, tenants: Tenants, hasher: BlockHasher) -> None:
        self._tenants, self._hasher = tenants, hasher
        self.count = 0
        self.latest: dict[str, WipedTenant] = {}
        self.dead: dict[int, None] = {}

    def tag_of(self, owner: int) -> int:
        """Return the tag for a new entry of a tenant, or for drafts from its requests: 62 bits, NO_TAG for index 0."""
        if not owner:
            return NO_TAG
        name = self._tenants.names[owner]
        if (wiped := self.latest.get(name)) is not None:
            wiped.used = True
        return self.tag(name)

    def tag(self, name: str) -> int:
        """Return the present tag of a tenant."""
        wiped = self.latest.get(name)
        return self._hasher.salt(f"owner:{wiped.number if wiped is not None else 0}:{name}") or 1

    def known(self) -> dict[int, int]:
        """Return the tenants in the table by their present tags."""
        return {self.tag(name): index for index, name in enumerate(self._tenants.names) if index}

    def wipe(self, name: str) -> int:
        """Give a tenant another tag, unless nothing has the present one. Return the present one."""
        tag, wiped = self.tag(name), self.latest.get(name)
        if wiped is not None and not wiped.used:
            return tag
        self.count += 1
        self.latest.pop(name, None)
        self.latest[name] = WipedTenant(self.count)
        self.dead[tag] = None
        if len(self.latest) > WIPES_MAX:
            del self.latest[next(iter(self.latest))]
        if len(self.dead) > WIPES_MAX:
            del self.dead[next(iter(self.dead))]
        return tag
