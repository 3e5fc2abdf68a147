"""Where new connections come in: a listening socket that stays usable when this process has no descriptor left."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket as sockets
import stat
from collections.abc import Iterator
from pathlib import Path

from kvforge.protocol.errors import InvalidConfiguration

ACCEPTS_MAX = 4
ACCEPT_PAUSE_S = 0.1
BACKLOG = 128
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
log = logging.getLogger("coordinator")


class Listener:
    """One endpoint. `epoll` reports it whenever somebody waits there, but not while nobody can be accepted.

    again_ns: when that is tried again; 0: somebody can be.
    """

    def __init__(self, endpoint: str, epoll: select.epoll) -> None:
        """Binds. Raises OSError, InvalidConfiguration."""
        self._socket, self._epoll = _listen(endpoint), epoll
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.again_ns = 0
        epoll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Its descriptor."""
        return self._socket.fileno()

    def look_again(self, now_ns: int) -> None:
        """Accepts again, if it is time."""
        if now_ns >= self.again_ns:
            self.again_ns = 0
            self._epoll.register(self._socket, select.EPOLLIN)

    def accept(self, now_ns: int) -> Iterator[sockets.socket]:
        """A few of those who wait."""
        for _ in range(ACCEPTS_MAX):
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
        """Listens no more. The socket's file is removed by the server."""
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


def _listen(endpoint: str) -> sockets.socket:
    """Listens at an endpoint `ipc://PATH`; the socket that a dead coordinator left is replaced. Raises OSError."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or not path:
        raise InvalidConfiguration("endpoint", f"{endpoint!r} is not ipc://PATH")
    if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
        Path(path).unlink()
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
