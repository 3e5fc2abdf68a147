"""Ends worker processes that are alive and do nothing, or nothing that counts. Never waits for one.

A worker's process is known by a pidfd, opened while its connection is there: a descriptor stands for one process and
never for another that was given the same id later, so a late signal reaches that process or nobody. The id is what the
worker said of itself; the kernel, which knows who is at the other end of a connection, must say the same. Nobody can
have another process ended by naming it, and an id that means something else here (the worker lives in a container) is
not used. Successors are started by whoever keeps workers running: `kvforge up`, systemd.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket as sockets
from typing import NamedTuple

from .users import credentials

GRACE_S = 1.0
log = logging.getLogger("coordinator")


class Kill(NamedTuple):
    """A process that was asked for its stack, and when it is killed (microseconds)."""

    at_us: int
    pid: int
    pidfd: int


class Replacer:
    """Worker processes by the number of their connection: kvforge.coordinator.turn.Processes. Times in microseconds."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._left: list[int] = []
        self._kills: list[Kill] = []

    def watch(self, worker: int, pid: int, descriptor: int) -> None:
        """A worker that says it is process `pid` connected; `descriptor`: its connection, our end of it."""
        self._pids[worker] = pid
        try:
            peer = _peer(descriptor)
            if pid <= 1 or pid == os.getpid() or pid != peer:
                log.debug("worker connection %d says it is process %d, the kernel says %d", worker, pid, peer)
                return
            self._pidfds[worker] = os.pidfd_open(pid)
        except OSError as error:
            log.debug("the process %d of worker connection %d cannot be watched: %s", pid, worker, error)

    def leave(self, worker: int) -> None:
        """Its connection ended. What is known of its process is kept for the rest of the turn: it may be the very one
        that is to be replaced. Idempotent."""
        self._left.append(worker)

    def ended(self, worker: int) -> bool:
        """Return whether a worker's process is known to have ended: its pidfd is readable then."""
        pidfd = self._pidfds.get(worker)
        return pidfd is not None and bool(select.select([pidfd], [], [], 0)[0])

    def silent(self, worker: int, reason: str, now_us: int) -> None:
        """Nothing comes from it any more, and its connection is ended for that: its process is replaced too, for it
        keeps its memory, and whoever keeps workers running sees that it is there."""
        if (pid := self._pids.get(worker)) is not None:
            self.replace(worker, pid, reason, now_us)

    def replace(self, worker: int, pid: int, reason: str, now_us: int) -> None:
        """Has the process write its stack to its own log, and kills it `GRACE_S` later."""
        pidfd = self._pidfds.pop(worker, None)
        if pidfd is None:
            log.error("worker process %d must end (%s) and cannot be ended from here: end it yourself", pid, reason)
            return
        log.error(
            "worker process %d must end (%s): it is killed in %g s, its stack is in its log", pid, reason, GRACE_S
        )
        if _signal(pidfd, pid, signal.SIGUSR1):
            self._kills.append(Kill(now_us + int(GRACE_S * 1e6), pid, pidfd))
        else:
            os.close(pidfd)

    def act(self, now_us: int) -> int | None:
        """Does what is due. Called at the end of each turn; returns when it must be called again, None: then only."""
        due = [kill for kill in self._kills if kill.at_us <= now_us]
        if due:
            self._kills = [kill for kill in self._kills if kill.at_us > now_us]
            self._end(due)
        left, self._left = self._left, []
        for worker in left:
            self._pids.pop(worker, None)
            pidfd = self._pidfds.pop(worker, None)
            if pidfd is not None:
                os.close(pidfd)
        return min((kill.at_us for kill in self._kills), default=None)

    def close(self) -> None:
        """Kills at once what was to be killed, and closes everything. Idempotent."""
        kills, self._kills = self._kills, []
        self._end(kills)
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def _end(self, kills: list[Kill]) -> None:
        for kill in kills:
            if _signal(kill.pidfd, kill.pid, signal.SIGKILL):
                log.warning("worker process %d was killed", kill.pid)
            os.close(kill.pidfd)


def _peer(descriptor: int) -> int:
    """The process at the other end of a local connection; 0: one that cannot be seen from here. Raises OSError."""
    with sockets.fromfd(descriptor, sockets.AF_UNIX, sockets.SOCK_STREAM) as connection:
        return credentials(connection)[0]


def _signal(pidfd: int, pid: int, number: signal.Signals) -> bool:
    """Sends a signal. False where the process is gone already, or is not ours to signal (then someone is told)."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    except OSError as error:
        log.error("worker process %d cannot be ended: %s", pid, error)
        return False
    return True
