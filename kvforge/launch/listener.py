"""A socket that takes connections over TCP, made before who serves it: so what waits there outlives that one."""

from __future__ import annotations

import socket

from kvforge.protocol.errors import InvalidConfiguration, Unavailable

BACKLOG = 2048


def listening(host: str, port: int, field: str = "port") -> socket.socket:
    """port: 0: any that is free. Raises InvalidConfiguration naming `host` or `field`, or Unavailable where the port is
    another's."""
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise InvalidConfiguration("host", f"{host}: {error.strerror}") from None
    except PermissionError:
        raise InvalidConfiguration(field, f"{port}: this user may not serve ports below 1024") from None
    except OSError as error:
        problem = f"{host}:{port} cannot be served: {error.strerror}"
        raise Unavailable(f"{problem}; does another program serve it? Choose another {field}") from None


def url_of(host: str, listener: socket.socket) -> str:
    """Where clients of this machine find it."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - it is not bound
    return f"http://{shown}:{port}"
