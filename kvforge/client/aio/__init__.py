"""The asyncio client, which is also the source of the blocking client.

`client` and `requests` declare each public call once: arguments, types, documentation. `python -m tools.twins`
generates the same two files of `kvforge.client.blocking` from them, and a test fails if they are out of date. They are
generated files rather than one class because Python cannot derive the type of a blocking method from an awaited one: a
class built at runtime would show less to editors, `help()` and mypy. httpx keeps its twin clients alike by hand;
httpcore, below it, generates them in the same way.

`waiting` differs and is written by hand on both sides: how a client waits, and what iterating over a request does. A
docstring paragraph that starts with "In asyncio:" is omitted from the blocking client.
"""

from .client import AsyncClient
from .request_handles import AsyncRequest, AsyncTextRequest
from .streams import AsyncStream, AsyncStreams

__all__ = ["AsyncClient", "AsyncRequest", "AsyncStream", "AsyncStreams", "AsyncTextRequest"]
