"""The processes that carry out the orders of a disk tier: several that read, and one that writes.

The copying process forks them and passes orders and results on, so that a read waits neither for a write nor for more
than its share of other reads. None of them has threads.

Each child keeps the socket to the worker open. So the worker sees its end only once nobody can touch the host file any
more. A child ends with the socket to its parent, and the parent ends with any child: the tier is then off.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvforge.protocol.messages import DISK_READ, Int32Array
from kvforge.protocol.readiness import Selector

RESULT_NUMBERS = 3
RESULT_BYTES = 4 * RESULT_NUMBERS
FAILED, CRASHED = 1, 2
log = logging.getLogger("worker")


@dataclass
class Copier:
    """A child.

    Attributes:
        pid: Its process.
        socket: For orders to it and results from it.
        given: Orders that it has not answered.
    """

    pid: int
    socket: socket.socket
    given: int = 0


class Copiers:
    """The children of a copying process.

    Args:
        worker: The socket to the worker.
        carry_out: Carries out an order, [n] int32, and returns its result, [3] int32.
        close: Ends the work of the child that writes.
        order_bytes: Bytes of an order.
    """

    def __init__(
        self,
        worker: socket.socket,
        carry_out: Callable[[Int32Array], Int32Array],
        close: Callable[[], None],
        order_bytes: int,
    ) -> None:
        self._worker, self._carry_out, self._close, self._order_bytes = worker, carry_out, close, order_bytes
        self._children: list[Copier] = []

    def serve(self, readers: int) -> int:
        """Pass orders and results on until the worker closes its socket; then wait for the children.

        Args:
            readers: How many children read; one more writes.

        Returns:
            The exit status of this process.
        """
        for number in range(readers + 1):
            self._fork(writes=number == readers)
        *reading, writing = self._children
        watched = Selector()
        watched.register(self._worker, selectors.EVENT_READ)
        for child in self._children:
            watched.register(child.socket, selectors.EVENT_READ, child)
        while True:
            ready = [key.data for key, _ in watched.select()]  # None: the worker
            for child in ready:
                if child is None:
                    continue
                result = _whole(child.socket, RESULT_BYTES)
                if result is None:
                    return _lost(child)
                child.given -= 1
                with suppress(ConnectionError):
                    self._worker.sendall(result)
            if None in ready:
                order = _whole(self._worker, self._order_bytes)
                if order is None:
                    return self._end()
                reads = int(np.frombuffer(order, np.int32)[1]) == DISK_READ
                child = min(reading, key=lambda each: each.given) if reads else writing
                child.given += 1
                try:
                    child.socket.sendall(order)
                except ConnectionError:
                    return _lost(child)

    def _fork(self, *, writes: bool) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            self._children.append(Copier(pid, ours))
            return
        status = CRASHED
        try:
            for other in self._children:
                other.socket.close()
            ours.close()
            self._work(theirs)
            if writes:
                self._close()
            status = 0
        except BaseException:
            log.exception("disk tier: a copy ended its process")
        finally:
            os._exit(status)

    def _work(self, parent: socket.socket) -> None:
        while (order := _whole(parent, self._order_bytes)) is not None:
            result = self._carry_out(np.frombuffer(order, np.int32))
            with suppress(ConnectionError):
                parent.sendall(result.tobytes())

    def _end(self) -> int:
        for child in self._children:
            child.socket.close()
        failed = [os.waitpid(child.pid, 0)[1] for child in self._children]
        return FAILED if any(failed) else 0


def _whole(other: socket.socket, size: int) -> bytes | None:
    """Wait for so many bytes; None if the other side has ended."""
    try:
        found = other.recv(size, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    return found if len(found) == size else None


def _lost(child: Copier) -> int:
    log.error("disk tier: process %d of its copies has ended", child.pid)
    return FAILED
