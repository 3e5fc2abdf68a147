"""Clients that come back after the coordinator's process was another one: who they are, and what they were answered.

A client that said a session with its hello keeps its number, and so all that is its own: requests, sequences, names on
blocks. It sends again what it has no answer to, under the numbers that it chose. A command that was done already is not
done again: it gets the answer that it got before.
"""

from __future__ import annotations

from kvforge.protocol.messages import Attach, Message

from ..clock import Clock
from ..limits import Bounds, microseconds


class Sessions:
    """Sessions of clients that are connected, and of those that are away. over: numbers of those that have been away
    for too long, for the machine to end."""

    def __init__(self, clock: Clock, bounds: Bounds) -> None:
        self._clock, self._bounds = clock, bounds
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._answers: dict[int, dict[int, Message]] = {}
        self._away: dict[int, int] = {}  # until when; who went first is first
        self.over: list[int] = []

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

    def gone(self, client: int) -> None:
        """Its connection ended, or it has been away for too long. Idempotent."""
        session = self._names.pop(client, None)
        if session is not None:
            del self._numbers[session], self._answers[client]
            self._away.pop(client, None)

    def restarted(self, clients: set[int]) -> list[int]:
        """No connection is there any more. Returns those of `clients` that cannot come back."""
        until_us = self._clock.now_us + microseconds(self._bounds.reattach_s)
        for client in self._names:
            self._away[client] = until_us
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
        return next(iter(self._away.values()), None)

    def pass_time(self) -> None:
        """Gives up those that have been away for too long."""
        while self._away:
            client, until_us = next(iter(self._away.items()))
            if until_us > self._clock.now_us:
                break
            del self._away[client]
            self.over.append(client)
