"""Blocks by name: who holds one, and holding one."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.messages import BlockCount, BlockInfo, GetBlock, Holder, Message, RefBlock, UnrefBlock

from ..cache.blocks import STATE_NAMES
from ..cache.cache import Cache
from ..events import FromClient
from ..sizes import HOLDERS_LISTED_MAX


class BlockCommands:
    """Handlers of the block messages. A handler that raises has changed nothing."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._clock = cache, cache.clock

    def info(self, message: GetBlock) -> Message:
        """A block, its state and its holders. Raises BlockNotFound."""
        cache, block = self._cache, message.block_id
        group = cache.group_of_block(block)
        return BlockInfo(
            rid=message.rid,
            block_id=block,
            worker=group.name,
            state=STATE_NAMES[int(cache.blocks.state[block])],
            refcount=int(cache.blocks.refcount[block]),
            generation=int(cache.blocks.generation[block]),
            tenant=cache.tenants.names[int(cache.blocks.owner[block])],
            indexed=bool(cache.blocks.indexed[block]),
            holders=tuple(self.holders(block)[:HOLDERS_LISTED_MAX]),
        )

    def holders(self, block: int) -> list[Holder]:
        """Everyone who holds the block and for how long, longest first."""
        s, blocks = self._cache.sequences, self._cache.blocks
        width = int(s.used.max(initial=0))
        inside = np.arange(width) < s.used[:, None]
        found = []
        for slot in np.flatnonzero(((s.table[:, :width] == block) & inside).any(axis=1)).tolist():
            since = max(int(blocks.since_us[block]), int(s.resident_us[slot]))
            sequence, request = int(s.id[slot]), int(s.request[slot])
            if s.owned[slot]:
                found.append(
                    Holder(
                        kind="sequence", name=f"sequence {sequence}", id=sequence, since_us=self._clock.now_us - since
                    )
                )
            else:
                found.append(
                    Holder(kind="request", name=f"request {request}", id=request, since_us=self._clock.now_us - since)
                )
        for name, since in blocks.external.get(block, {}).items():
            found.append(Holder(kind="external", name=name, id=0, since_us=self._clock.now_us - since))
        return sorted(found, key=lambda holder: -holder.since_us)

    def ref(self, event: FromClient, message: RefBlock) -> Message:
        """Adds a holder. Raises BlockNotFound and what Pins.check, Cache.check_tenant and Pins.check_room raise."""
        cache, pins, block = self._cache, self._cache.pins, message.block_id
        group, owner = cache.group_of_block(block), int(cache.blocks.owner[block])
        pins.check(block, message.generation, message.holder)
        cache.check_tenant(message.tenant, owner)
        pins.check_room(group, cache.tenants.peek(message.tenant), block)
        pins.add(group, block, message.holder, cache.intern(message.tenant, owner), event.client)
        return self._count(message.rid, message.block_id)

    def unref(self, message: UnrefBlock) -> Message:
        """Takes a holder away. Raises BlockNotFound and what Pins.drop raises."""
        group = self._cache.group_of_block(message.block_id)
        self._cache.pins.drop(group, message.block_id, message.generation, message.holder)
        return self._count(message.rid, message.block_id)

    def client_gone(self, client: int) -> None:
        """What a connection held is released."""
        for block, holder in self._cache.pins.of_client(client):
            self._cache.pins.drop(self._cache.group_of_block(block), block, -1, holder)

    def _count(self, rid: int, block: int) -> BlockCount:
        blocks = self._cache.blocks
        return BlockCount(
            rid=rid,
            block_id=block,
            refcount=int(blocks.refcount[block]),
            generation=int(blocks.generation[block]),
            state=STATE_NAMES[int(blocks.state[block])],
        )
