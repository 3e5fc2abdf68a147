"""Connected clients, clients that may reconnect, and the replies that they got."""

from __future__ import annotations

from kvforge.coordinator.core.machine import READING
from kvforge.protocol import codec
from kvforge.protocol.messages import Accepted, Attach, Message, Refused
from tools.simulation.settings import Settings
from tools.simulation.workers import Violation

Bytes = tuple[bytes, ...]


class Presence:
    """Clients by the numbers of their connections.

    Attributes:
        leaving: clients that the current event drops without an event of their own, and whether their requests lose
            their lease.
    """

    def __init__(self, settings: Settings) -> None:
        self._reattach_us, self._lease_us = settings.reattach_us, settings.lease_us
        self._there: set[int] = set()
        self._answers: dict[int, dict[int, Bytes]] = {}  # replies to clients with a session
        self._away: dict[int, tuple[int, bool]] = {}  # until when, and whether that is its lease
        self.leaving: dict[int, bool] = {}

    def came(self, client: int, session: str) -> bool:
        """Record a client's handshake; return whether it reconnected."""
        self._there.add(client)
        self._away.pop(client, None)
        back = client in self._answers
        if session:
            self._answers.setdefault(client, {})
        return back

    def left(self, client: int, now_us: int) -> bool:
        """Record the end of a connection without a goodbye; return whether the client is waited for."""
        waited = client in self._answers and self._lease_us > 0
        if waited:
            self._away[client] = (now_us + self._lease_us, True)
        return waited

    def gone(self, client: int) -> None:
        """Record that a client is gone for good."""
        self._there.discard(client)
        self._answers.pop(client, None)
        self._away.pop(client, None)

    def restarts(self, now_us: int) -> list[int]:
        """Record a restart without any connection; return the clients that may reconnect."""
        self.leaving = dict.fromkeys(self._there - self._answers.keys(), False)
        self._away = dict.fromkeys(sorted(self._answers), (now_us + self._reattach_us, False))
        return list(self._away)

    def passes(self, now_us: int) -> None:
        """Advance the time: some clients have been away for too long."""
        if not self._away:
            self.leaving = {}
            return
        self.leaving = {client: leased for client, (until_us, leased) in self._away.items() if until_us <= now_us}

    def answered_before(self, client: int, command: Message, reply: Message) -> bool:
        """Return whether this command was answered before; raise Violation if the reply differs."""
        answers = self._answers.get(client)
        if answers is None or isinstance(command, (Attach, *READING)) or isinstance(reply, Refused):
            return False
        rid: int = command.rid  # type: ignore[attr-defined]
        content, before = _content(reply), answers.get(rid)
        if before is None:
            answers[rid] = content
            return False
        if before != content or (isinstance(reply, Accepted) and not reply.repeated):
            raise Violation(f"{command!r} was executed already and now has another reply: {reply!r}")
        return True


def _content(message: Message) -> Bytes:
    if isinstance(message, Accepted):  # the same requests, although repeated
        return (b"%d" % message.request_id, b"%d" % message.count)
    return tuple(bytes(frame) for frame in codec.encode(message))
