"""Errors of a storage."""

from __future__ import annotations

from kvforge.protocol.errors import CapacityExceeded, StorageFailed


class TenantFull(CapacityExceeded):
    """A tenant's bytes are used up by documents that may not be removed to make room."""

    def __init__(self, tenant: str, needed: int, available: int) -> None:
        hint = "delete stored objects, or raise [storage] tenant_bytes_max in gateway.toml"
        super().__init__(f"storage of tenant {tenant!r} in bytes", needed, available, hint)


__all__ = ["StorageFailed", "TenantFull"]
