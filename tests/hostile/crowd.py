"""Hostile connections to both sockets of a coordinator: each follows its attack, and comes back when it is ended."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from random import Random

from kvforge.protocol.transport import CLIENT_SOCKET, WORKER_SOCKET
from tests.hostile.attacks import CLIENTS, WORKERS, Attack
from tests.hostile.raw import RawPeer


class Crowd:
    """One connection for each attack. Seeded: the same seed sends the same bytes, as far as they are taken."""

    def __init__(self, runtime: Path, seed: int) -> None:
        self._random = Random(seed)
        places = [(runtime / CLIENT_SOCKET, attack) for attack in CLIENTS]
        places += [(runtime / WORKER_SOCKET, attack) for attack in WORKERS]
        self._members = [Member(str(path), attack, self._random) for path, attack in places]

    @property
    def sent_bytes(self) -> int:
        """All that was taken from them."""
        return sum(member.sent_bytes for member in self._members)

    @property
    def ended(self) -> int:
        """How often one of them was disconnected."""
        return sum(member.ended for member in self._members)

    def go_on(self) -> bool:
        """Each sends a little more, if what it sent before was taken. Returns whether anything was taken."""
        before = self.sent_bytes
        for member in self._members:
            member.go_on()
        return self.sent_bytes > before

    def wait(self) -> None:
        """Until something more is taken, for a moment at most."""
        waiting = [member.peer.socket for member in self._members if member.peer.waits]
        select.select([], waiting, [], 0.01)

    def close(self) -> None:
        for member in self._members:
            member.peer.close()


class Member:
    """One hostile peer."""

    def __init__(self, path: str, attack: Attack, random: Random) -> None:
        self._path, self._attack, self._random = path, attack, random
        self.sent_bytes = self.ended = 0
        self._begin()

    def _begin(self) -> None:
        self.peer = RawPeer(self._path)
        self._data: Iterator[bytes] = self._attack(self._random)

    def go_on(self) -> None:
        """Sends what comes next. It reads nothing; only whether it was disconnected is of interest."""
        sent = self.peer.send(b"" if self.peer.waits else next(self._data))
        self.sent_bytes += max(0, sent)
        if sent < 0 or self._hung_up():
            self.ended += 1
            self.peer.close()
            self._begin()

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self.peer.socket, select.POLLHUP)
        return bool(poll.poll(0))
