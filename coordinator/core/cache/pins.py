"""Named external holders of blocks: clients that keep a block alive without having it in a sequence.

A holder is a name of a tenant; it holds a block at most once. Whoever added it, any client that sees its tenant may
take it away by name; what a connection added is dropped when the connection ends, so that a dead client pins nothing.

Whoever pins is charged: from the first name on, the block counts for the tenant that was named with it, within that
one's ceiling, and no longer for the one that computed it; with the last name gone it is the other way round again,
where there is room.
"""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import (
    AlreadyHolder,
    BlockNotHeld,
    CapacityExceeded,
    InvalidRequest,
    NotAHolder,
    StaleGeneration,
)

from ..clock import Clock
from .blocks import FREE, QUARANTINED, Blocks
from .groups import Group
from .tenants import Tenants

NAME_LENGTH_MAX = 128
NOBODY = -1
OWNER_END = "\0"  # no name has it: what comes before it tells a name from the same one of another tenant


def shown(label: str) -> str:
    """The name that a tenant gave, of what it is called among all names on its block."""
    return label.rpartition(OWNER_END)[2]


class Pins:
    """Who holds what, on top of the blocks' own counts."""

    def __init__(self, clock: Clock, blocks: Blocks, tenants: Tenants, holders_per_block_max: int) -> None:
        self._clock, self._blocks, self._tenants = clock, blocks, tenants
        self._holders_max = holders_per_block_max
        self._added_by: dict[tuple[int, str], tuple[int, int]] = {}  # client and tenant of each name on a block
        self._computed_by: dict[int, int] = {}  # of blocks that are charged to somebody else meanwhile

    def check(self, block: int, generation: int, holder: str, tenant: int) -> None:
        """Raises InvalidRequest, StaleGeneration, BlockNotHeld, AlreadyHolder or CapacityExceeded where the block may
        not get the holder, of a tenant (0: a new one)."""
        blocks = self._blocks
        if not 0 < len(holder) <= NAME_LENGTH_MAX or not holder.isprintable():
            raise InvalidRequest("holder", f"1 to {NAME_LENGTH_MAX} printable characters")
        self.check_generation(block, generation)
        state = int(blocks.state[block])
        if state == FREE or (state == QUARANTINED and not blocks.indexed[block]):
            raise BlockNotHeld(block)
        names = blocks.external.get(block, {})
        if self._label(block, holder, tenant or NOBODY) is not None:
            raise AlreadyHolder(block, holder)
        if len(names) >= self._holders_max:
            raise CapacityExceeded("holders of a block", len(names) + 1, self._holders_max)

    def add(self, group: Group, block: int, holder: str, tenant: int, client: int) -> None:
        """One more holder, of a tenant that has room for the block. It was checked."""
        blocks = self._blocks
        owner = int(blocks.owner[block])
        group.hold(np.array([block], np.int64))
        if block not in blocks.external and tenant != owner:
            group.pool.make_room_within_ceiling(tenant, 1)
            self._charge(group, block, tenant)
        names = blocks.external.setdefault(block, {})
        label = holder if holder not in names else f"{tenant}{OWNER_END}{holder}"
        names[label] = self._clock.now_us
        self._added_by[block, label] = client, tenant

    def _label(self, block: int, holder: str, tenant: int) -> str | None:
        """What a tenant's (0: anybody's) name is called on the block; None where it is not there."""
        names = self._blocks.external.get(block, {})
        if holder in names and tenant in (0, self.tenant_of(block, holder)):
            return holder
        alike = (label for label in names if shown(label) == holder and tenant in (0, self.tenant_of(block, label)))
        return next(alike, None)

    def tenant_of(self, block: int, holder: str) -> int:
        """Which tenant a name on a block is of."""
        return self._added_by[block, holder][1]

    def drop(self, group: Group, block: int, generation: int, holder: str, tenant: int = 0) -> None:
        """One holder less, of a tenant (0: of any). Raises StaleGeneration, BlockNotHeld, NotAHolder."""
        self.check_generation(block, generation)
        if self._blocks.refcount[block] == 0:
            raise BlockNotHeld(block)
        label = holder if (block, holder) in self._added_by and not tenant else self._label(block, holder, tenant)
        if label is None:
            raise NotAHolder(block, holder)
        self._forget(block, label)
        self._pass_charge(group, block)
        group.release(np.array([block], np.int64), 0)

    def check_generation(self, block: int, generation: int) -> None:
        """Raises StaleGeneration where a generation is named (not -1) and is not the block's."""
        current = int(self._blocks.generation[block])
        if generation not in (-1, current):
            raise StaleGeneration(block, generation, current)

    def of_client(self, client: int) -> list[tuple[int, str]]:
        """The (block, holder) pairs that a connection added."""
        return [pair for pair, (owner, _) in self._added_by.items() if owner == client]

    def forget_pool(self, first: int, count: int) -> None:
        """The pool of blocks [first, first + count) is gone, and every hold on them."""
        for block, holder in [pair for pair in self._added_by if first <= pair[0] < first + count]:
            self._forget(block, holder)
        self._computed_by = {b: t for b, t in self._computed_by.items() if not first <= b < first + count}

    def tenants(self) -> set[int]:
        """Whoever has a name on a block, or computed one that another one pays for."""
        return {*(tenant for _, tenant in self._added_by.values()), *self._computed_by.values()}

    def _forget(self, block: int, holder: str) -> None:
        names = self._blocks.external[block]
        del names[holder]
        if not names:
            del self._blocks.external[block]
        del self._added_by[block, holder]

    # -------------------------------------------------------------------------------------------------------- charges

    def check_room(self, group: Group, tenant: int, block: int) -> None:
        """Raises QuotaExceeded or CapacityExceeded where the tenant cannot be charged for the block, or where it would
        take what is kept for others."""
        if not self._tenants.has_quotas:
            return
        pool, owner = group.pool, int(self._blocks.owner[block])
        before, after = pool.supply(), pool.supply(np.array([block], np.int64))
        if tenant != owner:
            after.give_up(owner)
        if (tenant != owner and after.room(tenant) < 1) or after.stock(tenant) < min(0, before.stock(tenant)):
            raise pool.shortage(tenant, 1, after)

    def _charge(self, group: Group, block: int, tenant: int) -> None:
        owner = int(self._blocks.owner[block])
        self._computed_by.setdefault(block, owner)
        group.pool.recharge(block, tenant)
        if self._computed_by[block] == tenant:
            del self._computed_by[block]

    def _pass_charge(self, group: Group, block: int) -> None:
        """A name let go: the block is charged to whoever still names it, else to the tenant that computed it.

        Where none of them has room, the charge stays as it is while the block is held, and afterwards the block is not
        cached.
        """
        names = self._blocks.external.get(block, {})
        heirs = [self._added_by[block, name][1] for name in names]
        if not names and block in self._computed_by:
            heirs = [self._computed_by[block]]
        if heirs and int(self._blocks.owner[block]) not in heirs:
            heir = next((t for t in heirs if group.pool.usage[t] < self._tenants.ceiling[t]), None)
            if heir is not None:
                self._charge(group, block, heir)
            elif self._blocks.refcount[block] == 1 and self._blocks.indexed[block]:
                group.pool.unindex(block)
        if not names:
            self._computed_by.pop(block, None)

    def check_invariants(self) -> None:
        """Every hold has a connection and a tenant, and the other way round."""
        held = {(block, holder) for block, names in self._blocks.external.items() for holder in names}
        assert held == self._added_by.keys(), "a hold without a connection, or the other way round"
        assert self._computed_by.keys() <= self._blocks.external.keys(), "a block without a name is charged for one"
        assert all(self._blocks.external.values()), "an empty list of holders"
