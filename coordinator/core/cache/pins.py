"""Named external holders: clients that keep blocks alive without a sequence.

A holder is a name that belongs to a tenant; it holds a block at most once. Any client with access to the tenant may
remove it by name. When the connection that added a holder ends, the holder is dropped, so dead clients pin nothing.

The tenant that pins a block pays for it. With its first holder, the charge for a block moves from the tenant that
computed it to the tenant of the holder, within the ceiling of that tenant. With the last holder gone, the charge
moves back if the ceiling permits.
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
from .blocks import FREE, KV, QUARANTINED, WINDOW, Blocks
from .groups import Group
from .tenants import Tenants

NAME_LENGTH_MAX = 128
NO_TENANT = -1
OWNER_END = "\0"  # not printable, so never part of a name: ends the tenant prefix of a label


def shown(label: str) -> str:
    """Return the holder name of a label, without its tenant prefix."""
    return label.rpartition(OWNER_END)[2]


class Pins:
    """The named holders of blocks, in addition to the reference counts."""

    def __init__(self, clock: Clock, blocks: Blocks, tenants: Tenants, holders_per_block_max: int) -> None:
        self._clock, self._blocks, self._tenants = clock, blocks, tenants
        self._holders_max = holders_per_block_max
        self._added_by: dict[tuple[int, str], tuple[int, int]] = {}  # client and tenant of each name on a block
        self._computed_by: dict[int, int] = {}  # tenants that computed blocks now charged to another tenant

    def check(self, block: int, generation: int, holder: str, tenant: int) -> None:
        """Check that a block may get a holder.

        Args:
            block: Global block id.
            generation: Expected generation of the block, -1 for any.
            holder: The holder's name.
            tenant: The holder's tenant, 0 for a new one.

        Raises:
            InvalidRequest: The name is empty, too long, or not printable, or the block holds no KV.
            StaleGeneration: The block has another generation.
            BlockNotHeld: The block's content is lost.
            AlreadyHolder: The tenant's holder of this name already holds the block.
            CapacityExceeded: The block has too many holders.
        """
        blocks = self._blocks
        if not 0 < len(holder) <= NAME_LENGTH_MAX or not holder.isprintable():
            raise InvalidRequest("holder", f"must be 1 to {NAME_LENGTH_MAX} printable characters")
        self.check_generation(block, generation)
        if blocks.kind[block] != KV:
            what = (
                "only the KV of layers with a window" if blocks.kind[block] == WINDOW else "a part of a recurrent state"
            )
            problem = f"{block} holds {what}: only blocks with KV can be held"
            raise InvalidRequest("block_id", problem)
        state = int(blocks.state[block])
        if state == FREE or (state == QUARANTINED and not blocks.indexed[block]):
            raise BlockNotHeld(block)
        names = blocks.external.get(block, {})
        if self._label(block, holder, tenant or NO_TENANT) is not None:
            raise AlreadyHolder(block, holder)
        if len(names) >= self._holders_max:
            raise CapacityExceeded("holders of a block", len(names) + 1, self._holders_max)

    def add(self, group: Group, block: int, holder: str, tenant: int, client: int) -> None:
        """Add a holder. `check` has accepted it, and the tenant has room for the block."""
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
        """Return the label of a tenant's holder (0: any tenant's) on the block, or None."""
        names = self._blocks.external.get(block, {})
        if holder in names and tenant in (0, self.tenant_of(block, holder)):
            return holder
        alike = (label for label in names if shown(label) == holder and tenant in (0, self.tenant_of(block, label)))
        return next(alike, None)

    def tenant_of(self, block: int, holder: str) -> int:
        """Return the tenant of a label on a block."""
        return self._added_by[block, holder][1]

    def drop(self, group: Group, block: int, generation: int, holder: str, tenant: int = 0) -> None:
        """Remove a holder of the tenant (0: any tenant).

        Raises:
            StaleGeneration: The block has another generation.
            BlockNotHeld: The block has no holders.
            NotAHolder: The name does not hold the block.
        """
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
        """Check the block's generation; -1 accepts any.

        Raises:
            StaleGeneration: The block has another generation.
        """
        current = int(self._blocks.generation[block])
        if generation not in (-1, current):
            raise StaleGeneration(block, generation, current)

    def of_client(self, client: int) -> list[tuple[int, str]]:
        """Return the (block, label) pairs that a connection added."""
        return [pair for pair, (owner, _) in self._added_by.items() if owner == client]

    def forget_pool(self, first: int, count: int) -> None:
        """Drop every hold on the blocks [first, first + count) of a pool that is gone."""
        for block, holder in [pair for pair in self._added_by if first <= pair[0] < first + count]:
            self._forget(block, holder)
        self._computed_by = {b: t for b, t in self._computed_by.items() if not first <= b < first + count}

    def tenants(self) -> set[int]:
        """Return the tenants that hold a block by name, or that computed one charged to another tenant."""
        return {*(tenant for _, tenant in self._added_by.values()), *self._computed_by.values()}

    def _forget(self, block: int, holder: str) -> None:
        names = self._blocks.external[block]
        del names[holder]
        if not names:
            del self._blocks.external[block]
        del self._added_by[block, holder]

    # -------------------------------------------------------------------------------------------------------- charges

    def check_room(self, group: Group, tenant: int, block: int) -> None:
        """Check that the tenant can be charged for the block without cutting into other tenants' floors.

        Raises:
            QuotaExceeded: The tenant is at its ceiling.
            CapacityExceeded: The block is reserved for other tenants.
        """
        if not self._tenants.has_quotas:
            return
        pool, owner = group.pool, int(self._blocks.owner[block])
        before, after = pool.supply(), pool.supply(np.array([block], np.int64))
        if tenant != owner:
            after.give_up(owner)
        if (tenant != owner and after.room(tenant) < 1) or after.stock(tenant) < min(0, before.stock(tenant)):
            raise after.shortage(tenant, 1)

    def _charge(self, group: Group, block: int, tenant: int) -> None:
        owner = int(self._blocks.owner[block])
        self._computed_by.setdefault(block, owner)
        group.pool.recharge(block, tenant)
        if self._computed_by[block] == tenant:
            del self._computed_by[block]

    def _pass_charge(self, group: Group, block: int) -> None:
        """Move the charge of a block after a holder left: to a remaining holder, else to the tenant that computed it.

        If no heir has room, the charge stays while the block is held, and the block is not cached afterwards.
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
        """Check that holders and connections agree."""
        held = {(block, holder) for block, names in self._blocks.external.items() for holder in names}
        assert held == self._added_by.keys(), "holders and connections disagree"
        assert self._computed_by.keys() <= self._blocks.external.keys(), "a block without holders has a second payer"
        assert all(self._blocks.external.values()), "an empty list of holders"
