"""The totals of a storage, for metrics and the live page."""

from __future__ import annotations

from dataclasses import dataclass

from kvforge.protocol.errors import KvforgeError

from .interface import Storage
from .operations import TenantUsage, Usage


@dataclass(frozen=True, slots=True)
class StorageTotals:
    """The storage that all tenants use. `up`: whether the database answered."""

    up: bool = True
    documents: int = 0
    size_bytes: int = 0
    in_progress: int = 0


async def storage_totals(storage: Storage) -> StorageTotals:
    """Ask a storage. One that was never used is not started for it."""
    if not storage.exists:
        return StorageTotals()
    try:
        (tenants,) = await storage.apply(Usage())
    except KvforgeError:
        return StorageTotals(up=False)
    assert isinstance(tenants, list)
    found = [one for one in tenants if isinstance(one, TenantUsage)]
    return StorageTotals(
        documents=sum(one.documents for one in found),
        size_bytes=sum(one.size_bytes for one in found),
        in_progress=sum(one.in_progress for one in found),
    )
