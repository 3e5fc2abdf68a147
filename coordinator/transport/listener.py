"""Listening sockets, which stay usable when the process runs out of file descriptors."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket as sockets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvforge.coordinator.transport.runtime_folder import OwnFiles, check_free
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.network import host_and_port

from . import zmtp
from .peer_credentials import LocalUsers

ACCEPTS_MAX = 4
ACCEPT_PAUSE_S = 0.1
BACKLOG = 512  # also holds peers that connect while a coordinator replays its journal
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
log = logging.getLogger("coordinator")


class Endpoint(NamedTuple):
    """Where to listen, and how the input is parsed.

    Attributes:
        address: `ipc://PATH` or `tcp://HOST:PORT`.
        setting: The setting that configured it, for error messages.
        users: Checks local users; None accepts any peer.
    """

    address: str
    reader: Callable[[zmtp.Bounds], zmtp.Reader] = zmtp.Reader
    setting: str = "runtime_dir"
    users: LocalUsers | None = None


class Listener:
    """A listening socket. `epoll` reports waiting connections, except while none can be accepted.

    Attributes:
        again_ns: When to try to accept again; 0 if accepting works.
    """

    def __init__(self, endpoint: Endpoint, epoll: select.epoll) -> None:
        """Bind the endpoint.

        Raises:
            OSError: No descriptor is left.
            InvalidConfiguration: The endpoint cannot be used.
            CoordinatorInUse: Another process listens there.
        """
        self.endpoint = endpoint
        self._socket, self._epoll = _listen(endpoint), epoll
        self._own = OwnFiles()
        if endpoint.address.startswith("ipc://"):
            self._own.note(Path(endpoint.address.removeprefix("ipc://")))
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.again_ns = 0
        epoll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """The address, with the actual port if the system chose it."""
        address = self.endpoint.address
        return f"{address[:-2]}:{self._socket.getsockname()[1]}" if address.endswith(":0") else address

    def look_again(self, now_ns: int) -> None:
        """Resume accepting if it is time."""
        if now_ns >= self.again_ns:
            self.again_ns = 0
            self._epoll.register(self._socket, select.EPOLLIN)

    def accept(self, now_ns: int, count: int = ACCEPTS_MAX) -> Iterator[sockets.socket]:
        """Accept at most `count` waiting connections."""
        for _ in range(count):
            try:
                socket, _address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTOR and self._refuse():
                    continue
                log.error("cannot accept a connection: %s; next attempt in %g s", error, ACCEPT_PAUSE_S)
                self._epoll.unregister(self._socket)
                self.again_ns = now_ns + int(ACCEPT_PAUSE_S * 1e9)
                return
            yield socket

    def close(self) -> None:
        """Stop listening, and remove the socket file if it is still this one's."""
        self._own.remove()  # while the socket is open, no other file can get its inode number
        self._socket.close()
        os.close(self._spare)

    def _refuse(self) -> bool:
        """Close the next connection, using the spare descriptor, when no other is left."""
        os.close(self._spare)
        try:
            self._socket.accept()[0].close()
            log.warning("refused a connection: out of file descriptors")
        except OSError:
            return False
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return True


def _listen(endpoint: Endpoint) -> sockets.socket:
    """Open a listening socket. Raise InvalidConfiguration or CoordinatorInUse."""
    scheme, _, where = endpoint.address.partition("://")
    try:
        if scheme == "ipc" and where:
            listener = _bound(sockets.AF_UNIX, _free(where))
            if endpoint.users is not None:
                endpoint.users.own_socket(where)
            return listener
        host, port = host_and_port(endpoint.address, endpoint.setting)
        found = sockets.getaddrinfo(host or None, port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE)
        family, *_, address = found[0]
        return _bound(family, address)
    except OSError as error:
        raise InvalidConfiguration(endpoint.setting, f"{endpoint.address} cannot be used: {error}") from None


def _free(path: str) -> str:
    """Return the path, after removing a dead coordinator's socket file. Raise CoordinatorInUse if it is alive."""
    if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
        check_free(path)
        Path(path).unlink()
    return path


def _bound(family: int, address: str | tuple[Any, ...]) -> sockets.socket:
    listener = sockets.socket(family, sockets.SOCK_STREAM)
    try:
        listener.setblocking(False)
        if family != sockets.AF_UNIX:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)  # allows an immediate restart
            listener.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)  # inherited by accepted sockets
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
