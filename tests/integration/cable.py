"""A proxy between a client and its coordinator that forwards all bytes until the test cuts it."""

from __future__ import annotations

import select
import socket as sockets
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 16
JOIN_S = 30.0


class Cable:
    """A thread that forwards connections from the socket `path` to the socket `target`."""

    def __init__(self, path: Path, target: str) -> None:
        self._target = target
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(closing(sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)))
        self._listener.bind(str(path))
        self._listener.listen()
        ends = sockets.socketpair()
        self._orders, self._hears = (self._stack.enter_context(closing(end)) for end in ends)
        self._pairs: list[tuple[sockets.socket, sockets.socket]] = []
        self._left: list[sockets.socket] = []
        self._thread = Thread(target=self._run)
        self.endpoint = f"ipc://{path}"
        self.connections = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._order(b"q")
        self._thread.join(JOIN_S)
        for socket in (*(end for pair in self._pairs for end in pair), *self._left):
            socket.close()
        self._stack.close()

    def cut(self, *, seen_by_both: bool) -> None:
        """Close every connection. Otherwise only the client notices; the coordinator sees a silent client."""
        self._order(b"c" if seen_by_both else b"h")
        assert self._orders.recv(1) == b"."

    def _order(self, what: bytes) -> None:
        self._orders.sendall(what)

    def _run(self) -> None:
        while True:
            ends = [end for pair in self._pairs for end in pair]
            ready, _, _ = select.select([self._listener, self._hears, *ends], [], [])
            if self._hears in ready:
                order = self._hears.recv(1)
                if order == b"q":
                    return
                for client, coordinator in self._pairs:
                    client.close()
                    coordinator.close() if order == b"c" else self._left.append(coordinator)
                self._pairs.clear()
                self._hears.sendall(b".")
                continue
            if self._listener in ready:
                self._connect()
            for client, coordinator in list(self._pairs):
                if (client in ready and not _pass_on(client, coordinator)) or (
                    coordinator in ready and not _pass_on(coordinator, client)
                ):
                    self._pairs.remove((client, coordinator))
                    client.close()
                    coordinator.close()

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        coordinator = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        coordinator.connect(self._target)
        self._pairs.append((client, coordinator))
        self.connections += 1


def _pass_on(source: sockets.socket, target: sockets.socket) -> bool:
    """Forward the received bytes; return whether more may follow."""
    data = b""
    with suppress(OSError):
        data = source.recv(CHUNK_BYTES)
        target.sendall(data)
    return bool(data)
