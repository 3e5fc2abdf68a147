"""Clients that come back, after their connection ended or the coordinator's process was another one: who they are, and
what they were answered.

A client that said a session with its hello keeps its number, and so all that is its own: requests, sequences, names on
blocks. It sends again what it has no answer to, under the numbers that it chose. A command that was done already is not
done again: it gets the answer that it got before.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvforge.protocol.messages import Attach, Message

from ..clock import Clock
from ..events import ClientGone
from ..limits import Bounds, microseconds

OWNER_END = "\n"  # what a session's name begins with, the entry that it is of, ends here


class Away(NamedTuple):
    """until_us: so long a client is waited for. leased: so long its requests had, and end with it."""

    until_us: int
    leased: bool


class Sessions:
    """Sessions of clients that are connected, and of those that are away. over: those that have been away for too long,
    for the machine to end."""

    def __init__(self, clock: Clock, bounds: Bounds) -> None:
        self._clock, self._bounds = clock, bounds
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._answers: dict[int, dict[int, Message]] = {}
        self._away: dict[int, Away] = {}  # who is waited for the least is first
        self.over: list[ClientGone] = []

    @property
    def away(self) -> int:
        """How many are not connected."""
        return len(self._away)

    def came(self, client: int, session: str) -> bool:
        """A client said hello. Returns whether it has come back."""
        self._away.pop(client, None)
        back = client in self._names
        if session and not back:
            self._numbers[session], self._names[client] = client, session
            self._answers[client] = {}
        return back

    def number(self, session: str) -> int | None:
        """The number that a client of this session has, away or not."""
        return self._numbers.get(session)

    def left(self, client: int) -> bool:
        """Its connection ended without a word. Returns whether it is waited for.

        Where more are away than may be, whoever has the most of them loses the one that is waited for the least.
        """
        lease_us = microseconds(self._bounds.lease_s)
        if client not in self._names or not lease_us:
            return False
        until_us = self._clock.now_us + lease_us
        last_us = next((away.until_us for away in reversed(self._away.values())), until_us)
        self._away[client] = Away(until_us, leased=True)
        if last_us > until_us:  # those whom a restart cut off are waited for differently
            self._away = dict(sorted(self._away.items(), key=lambda entry: entry[1].until_us))
        if len(self._away) > self._bounds.away_max:
            owners = {number: self._names[number].partition(OWNER_END)[0] for number in self._away}
            most = Counter(owners.values()).most_common(1)[0][0]
            self._give_up(next(number for number, owner in owners.items() if owner == most))
        return True

    def gone(self, client: int) -> None:
        """Its connection ended, or it has been away for too long. Idempotent."""
        session = self._names.pop(client, None)
        if session is not None:
            del self._numbers[session], self._answers[client]
            self._away.pop(client, None)

    def restarted(self, clients: set[int]) -> list[int]:
        """No connection is there any more. Returns those of `clients` that cannot come back."""
        until_us = self._clock.now_us + microseconds(self._bounds.reattach_s)
        self._away = {client: Away(until_us, leased=False) for client in self._names}
        return sorted(clients - self._names.keys())

    # --------------------------------------------------------------------------------------------------------- answers

    def answer(self, client: int, rid: int) -> Message | None:
        """What this command of the client was answered, where it was done already."""
        answers = self._answers.get(client)
        return answers.get(rid) if answers is not None else None

    def keep(self, client: int, rid: int, answer: Message, command: Message) -> None:
        """Until the client has been answered so many more. What was attached to is attached to anew."""
        answers = self._answers.get(client)
        if answers is not None and not isinstance(command, Attach):
            answers[rid] = answer
            if len(answers) > self._bounds.answers_kept_max:
                del answers[next(iter(answers))]

    # ------------------------------------------------------------------------------------------------------------ time

    def due_us(self) -> int | None:
        """When the first one has been away for too long."""
        return next(iter(self._away.values())).until_us if self._away else None

    def pass_time(self) -> None:
        """Gives up those that have been away for too long."""
        while self._away:
            client, away = next(iter(self._away.items()))
            if away.until_us > self._clock.now_us:
                break
            self._give_up(client)

    def _give_up(self, client: int) -> None:
        # Who said goodbye has no further lease: neither has who was waited for so long.
        self.over.append(ClientGone(client, goodbye=self._away.pop(client).leased))
