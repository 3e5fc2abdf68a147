"""Block commands: inspect blocks, and add or remove named holders."""

from __future__ import annotations

import msgspec
import numpy as np

from kvforge.protocol.errors import BlockNotFound
from kvforge.protocol.layout import BLOCK_STATES
from kvforge.protocol.messages import BlockCount, BlockInfo, GetBlock, Holder, Message, RefBlock, UnrefBlock

from ..cache.blocks import RECURRENT, WINDOW
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.pins import shown
from ..events import FromClient
from ..sizes import HOLDERS_LISTED_MAX


class BlockCommands:
    """Handlers of the block messages."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache, self._clock = cache, cache.clock

    def concerns(self, block: int, tenant: str) -> bool:
        """Return whether the block exists and the tenant pays for it or holds it."""
        cache = self._cache
        index = cache.tenants.peek(tenant)
        try:
            cache.group_of_block(block)
        except BlockNotFound:
            return False
        return bool(index) and (int(cache.blocks.owner[block]) == index or bool(self._holders(block, tenant)))

    def info(self, tenant: str, message: GetBlock) -> BlockInfo:
        """Return a block's state and those of its holders that belong to the tenant ("": all holders).

        Raises:
            BlockNotFound: No pool has this block.
        """
        cache, block = self._cache, message.block_id
        group, owner = cache.group_of_block(block), cache.tenants.names[int(cache.blocks.owner[block])]
        return BlockInfo(
            **msgspec.structs.asdict(self._count(message.rid, block, tenant)),
            worker=group.name,
            tenant=owner if tenant in ("", owner) else "",
            indexed=bool(cache.blocks.indexed[block]),
            holders=tuple(self._holders(block, tenant)[:HOLDERS_LISTED_MAX]),
        )

    def _holders(self, block: int, tenant: str) -> list[Holder]:
        """Return the holders of the block that belong to a tenant ("": all), longest holder first."""
        s, blocks, index = self._cache.sequences, self._cache.blocks, self._cache.tenants.peek(tenant)
        width = int(s.used.max(initial=0))
        inside = np.arange(width) < s.used[:, None]
        found = []
        holds = ((s.table[:, :width] == block) & inside).any(axis=1)
        if blocks.kind[block] == RECURRENT:
            holds |= (s.states == block).any(axis=1) & (s.state_used > 0)
        elif blocks.kind[block] == WINDOW:
            holds[[slot for slot in s.slot_of.values() if block in self._cache.windows.of(slot)]] = True
        for slot in np.flatnonzero(holds).tolist():
            if tenant and int(s.tenant[slot]) != index:
                continue
            since = max(int(blocks.since_us[block]), int(s.resident_us[slot]))
            kind, number = ("sequence", int(s.id[slot])) if s.owned[slot] else ("request", int(s.request[slot]))
            found.append(Holder(kind=kind, name=f"{kind} {number}", id=number, since_us=self._clock.now_us - since))
        for name, since in blocks.external.get(block, {}).items():
            if tenant and self._cache.pins.tenant_of(block, name) != index:
                continue
            found.append(Holder(kind="external", name=shown(name), id=0, since_us=self._clock.now_us - since))
        return sorted(found, key=lambda holder: -holder.since_us)

    def ref(self, event: FromClient, seen: str, message: RefBlock) -> Message:
        """Add a named holder.

        Args:
            event: The event that carried the command.
            seen: The one tenant that the client sees, or "" for all.
            message: The command.

        Raises:
            BlockNotFound: No pool has this block.
            KvforgeError: As raised by Pins.check, KVCacheManager.check_tenant and Pins.check_room.
        """
        cache, pins, block = self._cache, self._cache.pins, message.block_id
        group, owner = cache.group_of_block(block), int(cache.blocks.owner[block])
        pins.check(block, message.generation, message.holder, cache.tenants.peek(message.tenant))
        cache.check_tenant(message.tenant, owner)
        pins.check_room(group, cache.tenants.peek(message.tenant), block)
        pins.add(group, block, message.holder, cache.intern(message.tenant, owner), event.client)
        return self._count(message.rid, message.block_id, seen)

    def unref(self, tenant: str, message: UnrefBlock) -> Message:
        """Remove a named holder of the tenant ("": any).

        Raises:
            BlockNotFound: No pool has this block.
            KvforgeError: As raised by Pins.drop.
        """
        group, owner = self._cache.group_of_block(message.block_id), self._cache.tenants.peek(tenant)
        self._cache.pins.drop(group, message.block_id, message.generation, message.holder, owner)
        return self._count(message.rid, message.block_id, tenant)

    def client_gone(self, client: int) -> None:
        """Drop the holders that a connection added."""
        for block, holder in self._cache.pins.of_client(client):
            self._cache.pins.drop(self._cache.group_of_block(block), block, -1, holder)

    def _count(self, rid: int, block: int, seen: str) -> BlockCount:
        """Return the block's counts. A client that sees one tenant gets only the number of its holders."""
        blocks = self._cache.blocks
        return BlockCount(
            rid=rid,
            block_id=block,
            refcount=len(self._holders(block, seen)) if seen else int(blocks.refcount[block]),
            generation=int(blocks.generation[block]),
            state=BLOCK_STATES[int(blocks.state[block])],
        )
