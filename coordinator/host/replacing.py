"""Replacement of worker processes that hang or are unreachable, without waiting for them.

A worker's process is identified by a pidfd, which is opened while its connection exists. A pidfd never refers to
another process that reuses the id, so a late signal reaches the right process or none. The worker announces its process
id, and the kernel, which knows the peer of a connection, must confirm it. A peer can therefore not get another process
killed, and an id from another namespace (a worker in a container) is not used. The supervisor, `kvforge up` or systemd,
starts successors.
"""

from __future__ import annotations

import logging
import os
import signal
import socket as sockets
from typing import NamedTuple

from kvforge.coordinator.transport.peer_credentials import credentials
from kvforge.protocol.readiness import readable

GRACE_S = 1.0
log = logging.getLogger("coordinator")


class Kill(NamedTuple):
    """A process that was asked for its stack, and when to kill it (microseconds)."""

    at_us: int
    pid: int
    pidfd: int


class Replacer:
    """Worker processes by connection number: implements kvforge.coordinator.turn.Processes. Times in microseconds."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._left: list[int] = []
        self._kills: list[Kill] = []

    def watch(self, worker: int, pid: int, descriptor: int) -> None:
        """Identify the process of a worker.

        Args:
            worker: The number of its connection.
            pid: The process id that it announced.
            descriptor: The coordinator's end of the connection.
        """
        self._pids[worker] = pid
        try:
            peer = _peer(descriptor)
            if pid <= 1 or pid == os.getpid() or pid != peer:
                log.debug("worker connection %d announces process %d, but the kernel reports %d", worker, pid, peer)
                return
            self._pidfds[worker] = os.pidfd_open(pid)
        except OSError as error:
            log.debug("cannot watch process %d of worker connection %d: %s", pid, worker, error)

    def leave(self, worker: int) -> None:
        """Forget a worker at the end of the turn; until then, its process may still be replaced. Idempotent."""
        self._left.append(worker)

    def ended(self, worker: int) -> bool:
        """Return whether a worker's process is known to have ended."""
        pidfd = self._pidfds.get(worker)
        return pidfd is not None and bool(readable([pidfd], 0))

    def silent(self, worker: int, reason: str, now_us: int) -> None:
        """Replace the process of a worker that is disconnected for silence.

        It would otherwise keep its memory, and its supervisor would not start a successor.
        """
        if (pid := self._pids.get(worker)) is not None:
            self.replace(worker, pid, reason, now_us)

    def replace(self, worker: int, pid: int, reason: str, now_us: int) -> None:
        """Make the process log its stack, and kill it `GRACE_S` later."""
        pidfd = self._pidfds.pop(worker, None)
        if pidfd is None:
            log.error("worker process %d must end (%s), but cannot be killed from here: kill it manually", pid, reason)
            return
        log.error(
            "worker process %d must end (%s): it is killed in %g s, its stack is in its log", pid, reason, GRACE_S
        )
        if _signal(pidfd, pid, signal.SIGUSR1):
            self._kills.append(Kill(now_us + int(GRACE_S * 1e6), pid, pidfd))
        else:
            os.close(pidfd)

    def act(self, now_us: int) -> int | None:
        """Do what is due; called at the end of each turn. Return the time of the next action, or None."""
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
        """Kill pending processes immediately, and close everything. Idempotent."""
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
    """Return the peer process of a local connection; 0 if it is not visible from here. Raise OSError."""
    with sockets.fromfd(descriptor, sockets.AF_UNIX, sockets.SOCK_STREAM) as connection:
        return credentials(connection)[0]


def _signal(pidfd: int, pid: int, number: signal.Signals) -> bool:
    """Send a signal. Return False if the process is gone, or may not be signalled, which is logged."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    except OSError as error:
        log.error("worker process %d cannot be ended: %s", pid, error)
        return False
    return True
