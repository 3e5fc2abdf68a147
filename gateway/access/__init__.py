"""Access control: API keys (stored as hashes), each with a tenant, rights and rate limits."""

from .callers import Access, Caller

__all__ = ["Access", "Caller"]
