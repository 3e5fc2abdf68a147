"""Sessions: clients that reconnect after their connection or the coordinator process ended.

A client that names a session in its handshake keeps its client number, and with it all its requests, sequences and
block holders. After a reconnect, it resends unanswered commands under their original ids. A command that was already
carried out is not repeated: the client gets the original reply.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvforge.protocol.messages import Attach, Message

from ..clock import Clock
from ..deadlines import NEVER, SESSIONS
from ..events import ClientGone
from ..limits import Bounds, microseconds

OWNER_END = "\n"  # separates the access entry at the start of a session's name from the rest


class Away(NamedTuple):
    """A client that is away.

    Attributes:
        until_us: When the coordinator stops waiting for the client.
        leased: Its requests had the same lease, and end with it.
    """

    until_us: int
    leased: bool


class Sessions:
    """Sessions of connected and absent clients.

    Attributes:
        away: Clients that are away, by number, in the order in which their time ends.
        over: Clients that were away for too long, for the machine to end.
    """

    def __init__(self, clock: Clock, bounds: Bounds) -> None:
        self._clock, self._bounds = clock, bounds
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._answers: dict[int, dict[int, Message]] = {}
        self.away: dict[int, Away] = {}
        self.over: list[ClientGone] = []

    def connected(self, client: int, session: str) -> bool:
        """Record a handshake. Return whether the client reconnected."""
        self.away.pop(client, None)
        back = client in self._names
        if session and not back:
            self._numbers[session], self._names[client] = client, session
            self._answers[client] = {}
        return back

    def number(self, session: str) -> int | None:
        """Return the client number of a session, connected or away."""
        return self._numbers.get(session)

    def left(self, client: int) -> bool:
        """Record that a connection ended without a goodbye. Return whether the client may reconnect.

        If too many clients are away, the access entry with the most of these gives up the one that expires first.
        """
        lease_us = microseconds(self._bounds.lease_s)
        if client not in self._names or not lease_us:
            return False
        until_us = self._clock.now_us + lease_us
        last_us = next((away.until_us for away in reversed(self.away.values())), until_us)
        self.away[client] = Away(until_us, leased=True)
        self._clock.deadlines.arm(SESSIONS, until_us)
        if last_us > until_us:  # clients that a restart cut off have a different deadline
            self.away = dict(sorted(self.away.items(), key=lambda entry: entry[1].until_us))
        if len(self.away) > self._bounds.away_max:
            owners = {number: self._names[number].partition(OWNER_END)[0] for number in self.away}
            most = Counter(owners.values()).most_common(1)[0][0]
            self._give_up(next(number for number, owner in owners.items() if owner == most))
        return True

    def ended(self, client: int) -> None:
        """End the client's session. Idempotent."""
        session = self._names.pop(client, None)
        if session is not None:
            del self._numbers[session], self._answers[client]
            self.away.pop(client, None)

    def restarted(self, clients: set[int]) -> list[int]:
        """Mark every session as away. Return those of `clients` that cannot reconnect."""
        until_us = self._clock.now_us + microseconds(self._bounds.reattach_s)
        self.away = {client: Away(until_us, leased=False) for client in self._names}
        self._clock.deadlines.arm(SESSIONS, until_us)
        return sorted(clients - self._names.keys())

    # --------------------------------------------------------------------------------------------------------- answers

    def answer(self, client: int, rid: int) -> Message | None:
        """Return the reply to a command that was carried out before, or None."""
        answers = self._answers.get(client)
        return answers.get(rid) if answers is not None else None

    def keep(self, client: int, rid: int, answer: Message, command: Message) -> None:
        """Keep a reply, at most `answers_kept_max` for a client. An Attach is carried out again instead."""
        answers = self._answers.get(client)
        if answers is not None and not isinstance(command, Attach):
            answers[rid] = answer
            if len(answers) > self._bounds.answers_kept_max:
                del answers[next(iter(answers))]

    # ------------------------------------------------------------------------------------------------------------ time

    def pass_time(self) -> int:
        """Give up the clients that have been away for too long. Return when the next will have been, or NEVER."""
        while self.away:
            client, away = next(iter(self.away.items()))
            if away.until_us > self._clock.now_us:
                return away.until_us
            self._give_up(client)
        return NEVER

    def _give_up(self, client: int) -> None:
        # The lease is over, as after a goodbye.
        self.over.append(ClientGone(client, goodbye=self.away.pop(client).leased))
