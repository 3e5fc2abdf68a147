"""How a client or worker reaches a coordinator over a network: it knows the coordinator's key, and proves its own.

`tcp://` is always encrypted (CURVE, https://rfc.zeromq.org/spec/26/), and both sides prove who they are. `ipc://` needs
none of this: the system says who is at the other end.
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


class Proof(NamedTuple):
    """The coordinator's public key, and a pair of our own."""

    server_key: str
    own: keys.KeyPair

    def set_on(self, socket: zmq.Socket[bytes]) -> None:
        """Has a socket use it; before it connects."""
        socket.curve_serverkey = self.server_key.encode()
        socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in self.own)


REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH  # to be watched for on a socket's monitor


def refusal(endpoint: str, proof: Proof) -> NotAllowed:
    """What REFUSED means."""
    problem = f"the coordinator at {endpoint} does not know the key '{proof.own.public}' ([access] names those it does)"
    return NotAllowed("connect", problem)


def is_network(endpoint: str) -> bool:
    """Whether others than the users of this machine can reach it."""
    return endpoint.startswith("tcp://")


def host_and_port(endpoint: str, field: str) -> tuple[str, int]:
    """The parts of `tcp://HOST:PORT`; host "" for `*`, every interface. Raises InvalidConfiguration naming `field`."""
    scheme, _, where = endpoint.partition("://")
    host, _, port = where.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if scheme != "tcp" or not host or not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
        problem = f"{endpoint!r} is not tcp://HOST:PORT (an address of IPv6 in brackets; * for every interface)"
        raise InvalidConfiguration(field, problem)
    return "" if host == "*" else host, int(port)


def proof_for(endpoint: str, server_key: str | None, key_file: str | os.PathLike[str] | None) -> Proof | None:
    """What is needed to be let in at `endpoint`, None for `ipc://`. What is not given is looked for in the environment.

    Raises InvalidConfiguration naming `server_key` or `key_file`.
    """
    if not is_network(endpoint):
        return None
    server_key = server_key or os.environ.get(SERVER_KEY)
    key_file = key_file or os.environ.get(KEY_FILE)
    if not server_key:
        problem = f"{endpoint} is encrypted, so the coordinator's public key is needed: give --server-key, server_key"
        raise InvalidConfiguration("server_key", f"{problem} or {SERVER_KEY}")
    if not key_file:
        problem = f"{endpoint} lets in only whom it knows: make a key with `kvforge keys client`, and give --key-file"
        raise InvalidConfiguration("key_file", f"{problem}, key_file or {KEY_FILE}")
    keys.bytes_of(server_key, "server_key")
    return Proof(server_key, keys.read(Path(key_file).expanduser()))
