"""Who reads which request, from where on, and what each client must be told at the end of a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

from kvforge.coordinator.core.requests.streams import RETRY_US
from kvforge.protocol.messages import Ended, Stream
from tools.simulation.model import Oracle
from tools.simulation.workers import Violation


class BookedRequest:
    """One accepted request.

    reader: the connection it is streamed to, 0 for none; at: the offset of the next token for it; paused: until it asks
    again. before: (reader, at) of others who had it earlier in this turn: rows from before are still told to them.
    seen: how many of its tokens were streamed to anyone. cut: how many of them its end took back. orphan_us: since when
    its connection is gone, -1: it is not. tops: how many most likely tokens it wants told at each place. early: it came
    before any model was known, and may fail. reason: why it ended, "" while it lives.
    """

    def __init__(self, client: int, oracle: Oracle, sequence_id: int, detached: bool, salt: str) -> None:
        self.reader, self.oracle, self.sequence_id = client, oracle, sequence_id
        self.detached, self.salt = detached, salt
        self.tops = 0
        self.at = self.seen = self.generated = self.cut = 0
        self.paused = self.early = False
        self.before: list[list[int]] = []
        self.orphan_us = self.over_us = -1
        self.deadline_us = self.first_token_us = 0
        self.reason = ""

    def __deepcopy__(self, _memo: dict[int, Any]) -> BookedRequest:
        """All but `before` is never changed in place."""
        copied = object.__new__(BookedRequest)
        copied.__dict__.update(self.__dict__)
        copied.before = [before.copy() for before in self.before]
        return copied


class Owed:
    """What the next Stream to one client must say."""

    def __init__(self) -> None:
        self.ended: Counter[int] = Counter()
        self.taken: Counter[int] = Counter()
        self.paused: set[int] = set()
        self.forgotten: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.ended.total() or self.taken.total() or self.paused)

    def __repr__(self) -> str:
        return f"ended {list(self.ended)}, paused {sorted(self.paused)}, taken {list(self.taken)}"


class Telling:
    """Holds every Stream to what is due, and every turn to having told it."""

    def __init__(self, requests: dict[int, BookedRequest]) -> None:
        self._requests = requests
        self._owed: dict[int, Owed] = {}
        self._lost_us: dict[int, int] = {}
        self._moved: list[BookedRequest] = []

    def _of(self, client: int) -> Owed:
        return self._owed.setdefault(client, Owed())

    def give(self, request_id: int, client: int, offset: int) -> None:
        """The request is streamed to this client from now on; whoever had it is told."""
        booked, mine = self._requests[request_id], self._of(client)
        if booked.reader not in (0, client):
            other = self._of(booked.reader)
            other.paused.discard(request_id)
            other.taken[request_id] += 1
            if not booked.paused:
                booked.before.append([booked.reader, booked.at])
                self._moved.append(booked)
        booked.before = [before for before in booked.before if before[0] != client]
        mine.paused.discard(request_id)
        del mine.taken[request_id], mine.ended[request_id]
        booked.reader, booked.at, booked.paused, booked.orphan_us = client, offset, False, -1
        if booked.reason:
            mine.ended[request_id] += 1

    def forgotten(self, request_id: int, client: int) -> None:
        """A request that nobody knows any more was asked for by its key: the client is told that, and nothing else."""
        mine = self._of(client)
        mine.forgotten.add(request_id)
        mine.paused.discard(request_id)
        del mine.taken[request_id]
        mine.ended[request_id] = 1

    def over(self, request_id: int) -> None:
        """The request ended: its reader is told in this turn, or when it asks again."""
        booked = self._requests[request_id]
        if booked.reader and not booked.paused:
            self._of(booked.reader).ended[request_id] += 1

    def row(self, client: int, request_id: int, offset: int) -> None:
        """A token for a client: the next one that is due to it."""
        booked = self._requests[request_id]
        booked.seen = max(booked.seen, offset + 1)
        if client == booked.reader and offset == booked.at and not booked.paused:
            booked.at += 1
            return
        for before in booked.before:
            if before == [client, offset]:
                before[1] += 1
                return
        due = f"{booked.at} is due to {booked.reader}{', but paused' if booked.paused else ''}"
        raise Violation(f"request {request_id}: offset {offset} is streamed to {client}; {due}")

    def news(self, client: int, stream: Stream, lost: bool, now_us: int) -> None:
        """The ends and the notices of a Stream, which are all that is owed to the client."""
        self._lost_us.pop(client, None)
        owed = self._owed.pop(client, None)
        if owed is None:
            if not (stream.ended or stream.taken or stream.paused or lost):
                return  # as most of them
            owed = Owed()
        ended = Counter(end.request_id for end in stream.ended)
        if (ended, Counter(stream.taken), set(stream.paused)) != (owed.ended, owed.taken, owed.paused):
            told = f"ended {list(ended)}, paused {stream.paused}, taken {stream.taken}"
            raise Violation(f"client {client} is owed {owed}, and told {told}")
        for end in stream.ended:
            if end.request_id not in owed.forgotten:
                self._end(client, end)
            elif end.error is None or end.error.code != "request_not_found":
                raise Violation(f"request {end.request_id} is forgotten, and {client} is told {end}")
        if lost:
            self._lost(client, stream, owed)
            self._lost_us[client] = now_us

    def _end(self, client: int, end: Ended) -> None:
        booked = self._requests[end.request_id]
        if (end.reason, end.generated_tokens) != (booked.reason, booked.generated):
            raise Violation(f"request {end.request_id} ended by {booked.reason}, and {client} is told {end.reason}")
        if not 0 <= end.cut_tokens <= booked.cut:
            raise Violation(f"request {end.request_id}: {booked.cut} tokens were cut, not {end.cut_tokens}")
        told = end.generated_tokens + end.cut_tokens
        if told not in [at for reader, at in ((booked.reader, booked.at), *booked.before) if reader == client]:
            raise Violation(f"request {end.request_id}: {told} tokens, but {booked.at} were streamed")

    def _lost(self, client: int, stream: Stream, owed: Owed) -> None:
        """The client takes nothing more: what it misses is paused, unless another one has it by now."""
        missed = {*stream.request_ids.tolist(), *owed.ended} - set(owed.taken)
        for request_id in missed:
            booked = self._requests[request_id]
            booked.paused |= booked.reader == client
        later = self._of(client)
        later.paused, later.taken = owed.paused | missed, owed.taken

    def gone(self, client: int) -> None:
        """Nobody is there to be told anything."""
        self._owed.pop(client, None)
        self._lost_us.pop(client, None)

    def away(self, client: int) -> None:
        """It is not connected, and asks for what it lacks when it is."""
        self.gone(client)
        for booked in self._requests.values():
            booked.paused |= booked.reader == client
            if booked.before:
                booked.before = [before for before in booked.before if before[0] != client]

    def forget(self) -> None:
        """Nothing is owed to anybody any more."""
        self._owed.clear()
        self._lost_us.clear()
        self._end_of_moves()

    def late(self, latest_us: int) -> None:
        """A turn begins: whoever took nothing was to be tried again by then."""
        for client, lost_us in self._lost_us.items():
            if lost_us + RETRY_US < latest_us and self._owed.get(client):
                raise Violation(f"client {client} took nothing at {lost_us} us, and was not tried again since")

    def turn_ends(self, clients: Container[int]) -> None:
        """Everything that was owed to those who are there, and who took anything, has been told."""
        for client, owed in self._owed.items():
            if owed and client in clients and client not in self._lost_us:
                raise Violation(f"client {client} was not told in this turn: {owed}")
        self._end_of_moves()

    def _end_of_moves(self) -> None:
        for booked in self._moved:
            booked.before.clear()
        self._moved.clear()
