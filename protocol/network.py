"""Keys for a connection over a network: the peer knows the coordinator's public key and proves its own.

`tcp://` is always encrypted (CURVE, https://rfc.zeromq.org/spec/26/), and both sides are authenticated. `ipc://` needs
no keys: the kernel identifies the user at the other end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import zmq

from . import keys
from .errors import InvalidConfiguration, NotAllowed

SERVER_KEY, KEY_FILE = "KVFORGE_SERVER_KEY", "KVFORGE_KEY_FILE"
PORT_MAX = 65_535


class CurveCredentials(NamedTuple):
    """The coordinator's public key, and this peer's own key pair."""

    server_key: str
    own: keys.KeyPair

    def set_on(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys on a socket, before it connects."""
        socket.curve_serverkey = self.server_key.encode()
        socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in self.own)


REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH  # the event on a socket's monitor


def refusal(endpoint: str, proof: CurveCredentials) -> NotAllowed:
    """Return the error for the event REFUSED."""
    problem = f"the coordinator at {endpoint} does not know the key '{proof.own.public}': add it to [access]"
    return NotAllowed("connect", problem)


def is_network(endpoint: str) -> bool:
    """Return whether other machines can reach the endpoint."""
    return endpoint.startswith("tcp://")


def host_and_port(endpoint: str, field: str) -> tuple[str, int]:
    """Split `tcp://HOST:PORT`.

    Args:
        endpoint: The endpoint.
        field: The setting or argument that names it.

    Returns:
        The host, "" for `*` (every interface), and the port.

    Raises:
        InvalidConfiguration: Names `field`.
    """
    scheme, _, where = endpoint.partition("://")
    host, _, port = where.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if scheme != "tcp" or not host or not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
        problem = f"{endpoint!r} is not tcp://HOST:PORT (IPv6 addresses in brackets; * for every interface)"
        raise InvalidConfiguration(field, problem)
    return "" if host == "*" else host, int(port)


def credentials_for(
    endpoint: str, server_key: str | None, key_file: str | os.PathLike[str] | None
) -> CurveCredentials | None:
    """Return the keys for a connection to `endpoint`; None for `ipc://`.

    Args:
        endpoint: The endpoint.
        server_key: The coordinator's public key; default: KVFORGE_SERVER_KEY.
        key_file: The file of this peer's key pair; default: KVFORGE_KEY_FILE.

    Raises:
        InvalidConfiguration: Names `server_key` or `key_file`.
    """
    if not is_network(endpoint):
        return None
    server_key = server_key or os.environ.get(SERVER_KEY)
    key_file = key_file or os.environ.get(KEY_FILE)
    if not server_key:
        problem = f"{endpoint} is encrypted and needs the coordinator's public key: give --server-key, server_key"
        raise InvalidConfiguration("server_key", f"{problem} or {SERVER_KEY}")
    if not key_file:
        problem = f"{endpoint} accepts only known keys: make one with `kvforge keys client`, and give --key-file"
        raise InvalidConfiguration("key_file", f"{problem}, key_file or {KEY_FILE}")
    keys.bytes_of(server_key, "server_key")
    return CurveCredentials(server_key, keys.read(Path(key_file).expanduser()))
