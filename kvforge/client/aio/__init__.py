"""The client for asyncio; and the description that the blocking client is made of.

`client` and `requests` say each public call once: its arguments, its types, its words. `python -m tools.twins`
writes the same two files of `kvforge.client.blocking` from them, and a test fails where that was forgotten. Why files
that are written, and not one class for both: a method that is awaited and one that is not have different types, which
Python cannot derive from each other; so whatever is put together at runtime shows an editor, `help()` and mypy less
than there is. httpx keeps its twin clients alike by hand; httpcore, below it, has its files made as these are.

What differs is in `waiting`, by hand on both sides: how a client waits, and what iterating over a request means. In a
docstring, a paragraph that begins with "In asyncio:" is for this side alone.
"""

from .client import AsyncClient
from .requests import AsyncRequest, AsyncTextRequest
from .streams import AsyncStream, AsyncStreams

__all__ = ["AsyncClient", "AsyncRequest", "AsyncStream", "AsyncStreams", "AsyncTextRequest"]
