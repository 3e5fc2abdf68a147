"""The blocking client. `client` and `requests` are generated from those of `kvforge.client.aio`: change them there.

python -m tools.twins
"""

from .client import Client
from .request_handles import Request, TextRequest

__all__ = ["Client", "Request", "TextRequest"]
