"""Who may ask for what: API keys (kept as hashes) with a tenant, rights and rates each."""

from .callers import Access, Caller

__all__ = ["Access", "Caller"]
