"""What each platform can do: servers run on Linux, the client library everywhere.

A program of a server checks before its own imports, since these fail elsewhere:

    if sys.platform != "linux":
        from kvforge.protocol.platforms import leave

        leave("the coordinator")
"""

from __future__ import annotations

import sys
from typing import NoReturn

from .errors import InvalidConfiguration, Unavailable
from .exits import status_of

IPC = "ipc://"


def check_linux(what: str) -> None:
    """Check that this is Linux.

    Args:
        what: The subject of the sentence, such as "the coordinator".

    Raises:
        Unavailable: It is another platform.
    """
    if sys.platform != "linux":
        raise Unavailable(f"{what} runs on Linux only (this is {sys.platform}); clients run everywhere")


def leave(what: str) -> NoReturn:
    """End a process that needs Linux: print the sentence of `check_linux`, and exit with its status."""
    try:
        check_linux(what)
    except Unavailable as error:
        print(f"kvforge: {error}", file=sys.stderr)
        sys.exit(status_of(error))
    raise AssertionError("called on Linux")


def check_tables() -> None:
    """Check that shared tables can be read: only the coordinator's own machine can map them.

    Raises:
        Unavailable: This is not Linux.
    """
    if sys.platform != "linux":
        problem = "shared tables are memory of the coordinator's machine, which runs Linux"
        raise Unavailable(f"{problem} (this is {sys.platform}): use `stats()` or `kvforge stats`")


def check_endpoint(endpoint: str, field: str = "endpoint") -> None:
    """Check that this platform has the sockets of an endpoint.

    Args:
        endpoint: The endpoint.
        field: The setting or argument that names it.

    Raises:
        InvalidConfiguration: It is `ipc://`, and this is Windows.
    """
    if sys.platform == "win32" and endpoint.startswith(IPC):
        raise InvalidConfiguration(field, "ipc:// needs Unix sockets, which Windows lacks: use tcp://HOST:PORT")
