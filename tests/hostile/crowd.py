"""Hostile connections to both sockets of a coordinator; each runs its attack and reconnects when dropped."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from random import Random

from kvforge.protocol.transport import CLIENT_SOCKET, WORKER_SOCKET
from tests.hostile.attacks import CLIENTS, WORKERS, Attack
from tests.hostile.raw import RawPeer


class Crowd:
    """A hostile connection per attack; the same seed sends the same bytes, as far as the coordinator reads them."""

    def __init__(self, runtime: Path, seed: int) -> None:
        self._random = Random(seed)
        places = [(runtime / CLIENT_SOCKET, attack) for attack in CLIENTS]
        places += [(runtime / WORKER_SOCKET, attack) for attack in WORKERS]
        self._members = [Member(str(path), attack, self._random) for path, attack in places]

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that the coordinator's sockets accepted."""
        return sum(member.sent_bytes for member in self._members)

    @property
    def ended(self) -> int:
        """Return how often a hostile peer was disconnected."""
        return sum(member.ended for member in self._members)

    def go_on(self) -> bool:
        """Let each peer with no unsent bytes send more; return whether any byte was accepted."""
        before = self.sent_bytes
        for member in self._members:
            member.go_on()
        return self.sent_bytes > before

    def wait(self) -> None:
        """Wait a moment until a socket accepts more bytes."""
        waiting = [member.peer.socket for member in self._members if member.peer.waits]
        select.select([], waiting, [], 0.01)

    def close(self) -> None:
        for member in self._members:
            member.peer.close()


class Member:
    """A hostile peer."""

    def __init__(self, path: str, attack: Attack, random: Random) -> None:
        self._path, self._attack, self._random = path, attack, random
        self.sent_bytes = self.ended = 0
        self._begin()

    def _begin(self) -> None:
        self.peer = RawPeer(self._path)
        self._data: Iterator[bytes] = self._attack(self._random)

    def go_on(self) -> None:
        """Send the next bytes without reading; check only whether the peer was disconnected."""
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
