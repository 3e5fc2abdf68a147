"""The numbers of the storage for one scrape."""

from __future__ import annotations

from dataclasses import dataclass

from kvforge.gateway.storage import Storage, TenantUsage, Usage
from kvforge.protocol.errors import KvforgeError


@dataclass(frozen=True, slots=True)
class StorageNumbers:
    """What all tenants store. `up`: whether the database answered."""

    up: bool = True
    documents: int = 0
    size_bytes: int = 0
    in_progress: int = 0


async def storage_numbers(storage: Storage) -> StorageNumbers:
    """Ask a storage. One that was never used is not started for it."""
    if not storage.exists:
        return StorageNumbers()
    try:
        (tenants,) = await storage.apply(Usage())
    except KvforgeError:
        return StorageNumbers(up=False)
    assert isinstance(tenants, list)
    found = [one for one in tenants if isinstance(one, TenantUsage)]
    return StorageNumbers(
        documents=sum(one.documents for one in found),
        size_bytes=sum(one.size_bytes for one in found),
        in_progress=sum(one.in_progress for one in found),
    )
