"""Errors of a storage."""

from __future__ import annotations

from kvforge.protocol.errors import KvforgeError, QuotaExceeded, StorageFailed


class TenantFull(QuotaExceeded):
    """A tenant's bytes are used up by documents that may not be removed to make room."""

    def __init__(self, tenant: str, needed: int, ceiling: int) -> None:
        problem = f"tenant {tenant!r} would store {needed} bytes; its ceiling is {ceiling}"
        remedy = "delete stored objects, or raise [storage] tenant_bytes_max in gateway.toml"
        KvforgeError.__init__(self, f"{problem}; {remedy}", tenant=tenant, needed=needed, ceiling=ceiling)


__all__ = ["StorageFailed", "TenantFull"]
