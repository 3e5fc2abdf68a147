"""The command that wipes a tenant: nothing that the cache has of it is a hit any more, on any tier.

Sequences of live requests and blocks of named holders stay: the reply counts them. Entries that a copy uses are dropped
when it ends. The bytes of host files and disks are overwritten by the workers, which the reply does not wait for.
"""

from __future__ import annotations

from kvforge.protocol.messages import TenantWiped, WipeTenant

from ..cache.kv_cache_manager import KVCacheManager
from .sequences import SequenceCommands


class WipeCommand:
    """The handler of WipeTenant."""

    def __init__(self, cache: KVCacheManager, sequences: SequenceCommands) -> None:
        self._cache, self._sequences = cache, sequences

    def wipe(self, message: WipeTenant) -> TenantWiped:
        """Wipe a tenant, which may be unknown by now: entries of lower tiers outlive its place in the table.

        Raises:
            InvalidRequest: The name is invalid.
        """
        cache, name = self._cache, message.tenant
        cache.tenants.check(name)
        index, tag = cache.tenants.peek(name), cache.wipes.wipe(name)
        sequences = self._sequences.remove_idle(index, "its tenant was wiped") if index else 0
        device = held = host = disk = 0
        for group in cache.groups.values():
            if index:
                device += group.pool.wipe(index)
                held += group.pool.held_by(index)
            if group.host is not None:
                host += group.host.wipe(tag)
            if group.disk is not None:
                disk += group.disk.tier.wipe(tag)
        for tier in cache.host_tiers.tiers.values():
            if not tier.epoch:
                host += tier.wipe(tag)
        tiers = [*cache.host_tiers.tiers.values(), *(group.disk.tier for group in cache.groups.values() if group.disk)]
        return TenantWiped(
            rid=message.rid,
            sequences=sequences,
            device_blocks=device,
            host_blocks=host,
            disk_blocks=disk,
            held_blocks=held,
            pending_blocks=sum(tier.unwiped for tier in tiers),
        )
