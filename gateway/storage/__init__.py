"""Durable objects of the HTTP APIs: responses, conversations, and whatever an API must find again after a restart.

The contract stands in `interface.py`, the operations in `operations.py`. Two databases implement them: SQLite in the
gateway's state folder, and PostgreSQL for several gateways.

A helper process owns the connection to the database (`process.py`). The event loop never waits for a disk, and no two
threads share Python state. The helper commits all calls that wait for it together, so that many calls cost one flush.
"""

from .failures import StorageFailed
from .interface import Storage
from .operations import (
    Append,
    Chain,
    Claim,
    Delete,
    Document,
    Entry,
    Expire,
    Get,
    GetEntry,
    List,
    Mark,
    Operation,
    Put,
    Read,
    Release,
    RemoveEntry,
    Renew,
    Result,
    TenantUsage,
    Usage,
    Watch,
)

__all__ = [
    "Append",
    "Chain",
    "Claim",
    "Delete",
    "Document",
    "Entry",
    "Expire",
    "Get",
    "GetEntry",
    "List",
    "Mark",
    "Operation",
    "Put",
    "Read",
    "Release",
    "RemoveEntry",
    "Renew",
    "Result",
    "Storage",
    "StorageFailed",
    "TenantUsage",
    "Usage",
    "Watch",
]
