"""Where new connections come in: a listening socket that stays usable when this process has no descriptor left."""

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

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.network import host_and_port

from . import zmtp
from .runtime_folder import OwnFiles, check_free
from .users import LocalUsers

ACCEPTS_MAX = 4
ACCEPT_PAUSE_S = 0.1
BACKLOG = 512  # of those who wait while a coordinator reads its journal, too
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
log = logging.getLogger("coordinator")


class Door(NamedTuple):
    """Where peers come in, `ipc://PATH` or `tcp://HOST:PORT`, and how what they send there is read.

    setting: by which it was configured, for words about what is wrong with it. users: who may connect, None: whoever
    can.
    """

    endpoint: str
    reader: Callable[[zmtp.Bounds], zmtp.Reader] = zmtp.Reader
    setting: str = "runtime_dir"
    users: LocalUsers | None = None


class Listener:
    """One door. `epoll` reports it whenever somebody waits there, but not while nobody can be accepted.

    again_ns: when that is tried again; 0: somebody can be.
    """

    def __init__(self, door: Door, epoll: select.epoll) -> None:
        """Binds. Raises OSError, InvalidConfiguration, CoordinatorInUse."""
        self.door = door
        self._socket, self._epoll = _listen(door), epoll
        self._own = OwnFiles()
        if door.endpoint.startswith("ipc://"):
            self._own.note(Path(door.endpoint.removeprefix("ipc://")))
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.again_ns = 0
        epoll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Its descriptor."""
        return self._socket.fileno()

    @property
    def endpoint(self) -> str:
        """Where it is, also where the system chose the port (0)."""
        endpoint = self.door.endpoint
        return f"{endpoint[:-2]}:{self._socket.getsockname()[1]}" if endpoint.endswith(":0") else endpoint

    def look_again(self, now_ns: int) -> None:
        """Accepts again, if it is time."""
        if now_ns >= self.again_ns:
            self.again_ns = 0
            self._epoll.register(self._socket, select.EPOLLIN)

    def accept(self, now_ns: int, count: int = ACCEPTS_MAX) -> Iterator[sockets.socket]:
        """At most `count` of those who wait."""
        for _ in range(count):
            try:
                socket, _address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTOR and self._refuse():
                    continue
                log.error("a connection cannot be accepted: %s; the next try is in %g s", error, ACCEPT_PAUSE_S)
                self._epoll.unregister(self._socket)
                self.again_ns = now_ns + int(ACCEPT_PAUSE_S * 1e9)
                return
            yield socket

    def close(self) -> None:
        """Listen no more, and remove the socket's file, if it is still this one's."""
        self._own.remove()  # while the socket is open no other file can have its number
        self._socket.close()
        os.close(self._spare)

    def _refuse(self) -> bool:
        """Where no descriptor is left: closes the next connection, with the one that is kept for this."""
        os.close(self._spare)
        try:
            self._socket.accept()[0].close()
            log.warning("a connection was refused: this process has no descriptor left for it")
        except OSError:
            return False
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return True


def _listen(door: Door) -> sockets.socket:
    """Listens at a door. Raises InvalidConfiguration, CoordinatorInUse."""
    scheme, _, where = door.endpoint.partition("://")
    try:
        if scheme == "ipc" and where:
            listener = _bound(sockets.AF_UNIX, _free(where))
            if door.users is not None:
                door.users.own_socket(where)
            return listener
        host, port = host_and_port(door.endpoint, door.setting)
        found = sockets.getaddrinfo(host or None, port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE)
        family, *_, address = found[0]
        return _bound(family, address)
    except OSError as error:
        raise InvalidConfiguration(door.setting, f"{door.endpoint} cannot be used: {error}") from None


def _free(path: str) -> str:
    """The path, where the socket that a dead coordinator left is not in the way. Raises CoordinatorInUse."""
    if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
        check_free(path)
        Path(path).unlink()
    return path


def _bound(family: int, address: str | tuple[Any, ...]) -> sockets.socket:
    listener = sockets.socket(family, sockets.SOCK_STREAM)
    try:
        listener.setblocking(False)
        if family != sockets.AF_UNIX:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)  # after a restart, at once
            listener.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)  # whoever is accepted inherits it
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
