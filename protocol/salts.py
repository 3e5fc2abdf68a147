"""Salts of the prefix cache that belong to one tenant.

A cache hit reveals that the same text was computed before. A salt that a tenant names is therefore private: no other
tenant shares it, even if it names the same one.
"""

from __future__ import annotations

from .errors import InvalidRequest

OWNER_END = "\n"  # ends the tenant's name within a salt; no tenant's name contains it


def tenant_salt(tenant: str, salt: str) -> str:
    """Return the salt of one tenant.

    Args:
        tenant: The tenant's name.
        salt: The salt as the tenant names it.
    """
    return f"{tenant}{OWNER_END}{salt}"


def check_salt(salt: str) -> None:
    """Refuse a salt that could be a private salt of a tenant.

    Raises:
        InvalidRequest: Names `salt`.
    """
    if OWNER_END in salt:
        raise InvalidRequest("salt", "holds a line break: use other characters")
