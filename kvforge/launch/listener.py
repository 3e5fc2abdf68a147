"""A listening TCP socket, created before its server, so that waiting connections survive a restart of the server."""

from __future__ import annotations

import socket

from kvforge.protocol.errors import InvalidConfiguration, Unavailable

BACKLOG = 2048


def listening(host: str, port: int, field: str = "port") -> socket.socket:
    """Create a listening socket.

    Args:
        host: The address.
        port: The port, 0 for any free one.
        field: The setting that names the port.

    Raises:
        InvalidConfiguration: Names `host` or `field`.
        Unavailable: Another program uses the port.
    """
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise InvalidConfiguration("host", f"{host}: {error.strerror}") from None
    except PermissionError:
        raise InvalidConfiguration(field, f"{port}: this user may not bind ports below 1024") from None
    except OSError as error:
        problem = f"cannot listen at {host}:{port}: {error.strerror}"
        raise Unavailable(f"{problem}; does another program use it? Choose another {field}") from None


def url_of(host: str, listener: socket.socket) -> str:
    """Return the URL for clients on this machine."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - only shown, not bound
    return f"http://{shown}:{port}"
