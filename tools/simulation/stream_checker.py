"""Tracks the reader of each request and its offset, and what each client must receive by the end of a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

from kvforge.coordinator.core.requests.streams import RETRY_US
from kvforge.protocol.messages import Ended, Stream
from tools.simulation.model import Oracle
from tools.simulation.workers import Violation


class BookedRequest:
    """An accepted request.

    Attributes:
        reader: the connection that it is streamed to, or 0.
        at: offset of the reader's next token.
        paused: no tokens until the reader attaches again.
        before: (reader, at) of earlier readers in this turn, which still receive rows from before.
        seen: tokens streamed to any client.
        cut: tokens that its end took back.
        orphan_us: when its connection ended, or -1.
        tops: top tokens wanted per position.
        scores: top tokens wanted for each prompt token; None for no log-probabilities of the prompt.
        ahead: it gives way to all others.
        keeps: its sequence is kept at its end.
        kept_id: the sequence that was kept.
        early: it came before any model was known, and may fail.
        reason: why it ended, or "".
    """

    def __init__(self, client: int, oracle: Oracle, sequence_id: int, detached: bool, salt: str) -> None:
        self.reader, self.oracle, self.sequence_id = client, oracle, sequence_id
        self.detached, self.salt = detached, salt
        self.tops = 0
        self.scores: int | None = None
        self.at = self.seen = self.generated = self.cut = 0
        self.paused = self.early = self.keeps = self.ahead = False
        self.kept_id = 0
        self.before: list[list[int]] = []
        self.orphan_us = self.over_us = -1
        self.deadline_us = self.first_token_us = 0
        self.reason = ""

    def __deepcopy__(self, _memo: dict[int, Any]) -> BookedRequest:
        """Copy `before`; everything else is never changed in place."""
        copied = object.__new__(BookedRequest)
        copied.__dict__.update(self.__dict__)
        copied.before = [before.copy() for before in self.before]
        return copied


class Owed:
    """The required contents of the next Stream to a client."""

    def __init__(self) -> None:
        self.ended: Counter[int] = Counter()
        self.taken: Counter[int] = Counter()
        self.paused: set[int] = set()
        self.forgotten: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.ended.total() or self.taken.total() or self.paused)

    def __repr__(self) -> str:
        return f"ended {list(self.ended)}, paused {sorted(self.paused)}, taken {list(self.taken)}"


class StreamChecker:
    """Checks every Stream against what is due, and every turn for completeness."""

    def __init__(self, requests: dict[int, BookedRequest]) -> None:
        self._requests = requests
        self._owed: dict[int, Owed] = {}
        self._lost_us: dict[int, int] = {}
        self._moved: list[BookedRequest] = []

    def _of(self, client: int) -> Owed:
        return self._owed.setdefault(client, Owed())

    def first_offset(self, request_id: int) -> int:
        """Return the offset of the first row of a request: negative if its prompt is scored."""
        booked = self._requests[request_id]
        return 1 - len(booked.oracle.prompt) if booked.scores is not None else 0

    def give(self, request_id: int, client: int, offset: int) -> None:
        """Give the stream to this client; the previous reader must get a notice."""
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
        """Expect the notice that a repeated key's request was evicted, and nothing else."""
        mine = self._of(client)
        mine.forgotten.add(request_id)
        mine.paused.discard(request_id)
        del mine.taken[request_id]
        mine.ended[request_id] = 1

    def over(self, request_id: int) -> None:
        """Expect the end of the request in this turn, or when its reader attaches again."""
        booked = self._requests[request_id]
        if booked.reader and not booked.paused:
            self._of(booked.reader).ended[request_id] += 1

    def row(self, client: int, request_id: int, offset: int) -> None:
        """Check a token for a client: it must be the next one due."""
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
        """Check the ends and the notices of a Stream, which must be all that is owed to the client."""
        self._lost_us.pop(client, None)
        owed = self._owed.pop(client, None)
        if owed is None:
            if not (stream.ended or stream.taken or stream.paused or lost):
                return  # the usual case
            owed = Owed()
        ended = Counter(end.request_id for end in stream.ended)
        if (ended, Counter(stream.taken), set(stream.paused)) != (owed.ended, owed.taken, owed.paused):
            found = f"ended {list(ended)}, paused {stream.paused}, taken {stream.taken}"
            raise Violation(f"client {client} expects {owed}, got {found}")
        for end in stream.ended:
            if end.request_id not in owed.forgotten:
                self._end(client, end)
            elif end.error is None or end.error.code != "request_not_found":
                raise Violation(f"request {end.request_id} is evicted, but {client} got {end}")
        if lost:
            self._lost(client, stream, owed)
            self._lost_us[client] = now_us

    def _end(self, client: int, end: Ended) -> None:
        booked = self._requests[end.request_id]
        if (end.reason, end.generated_tokens) != (booked.reason, booked.generated):
            raise Violation(f"request {end.request_id} ended by {booked.reason}, but {client} got {end.reason}")
        if not 0 <= end.cut_tokens <= booked.cut:
            raise Violation(f"request {end.request_id}: {booked.cut} tokens were cut, not {end.cut_tokens}")
        counted = end.generated_tokens + end.cut_tokens
        whole = booked.reason in ("length", "stop")  # otherwise it may end in the middle of its prompt
        if counted not in [
            at if whole else max(0, at)
            for reader, at in ((booked.reader, booked.at), *booked.before)
            if reader == client
        ]:
            raise Violation(f"request {end.request_id}: {counted} tokens, but {booked.at} were streamed")

    def _lost(self, client: int, stream: Stream, owed: Owed) -> None:
        """Record a lost Stream: its requests are paused, unless another client has taken them."""
        missed = {*stream.request_ids.tolist(), *owed.ended} - set(owed.taken)
        for request_id in missed:
            booked = self._requests[request_id]
            booked.paused |= booked.reader == client
        later = self._of(client)
        later.paused, later.taken = owed.paused | missed, owed.taken

    def gone(self, client: int) -> None:
        """Drop what is owed to a client that is gone."""
        self._owed.pop(client, None)
        self._lost_us.pop(client, None)

    def away(self, client: int) -> None:
        """Record a disconnected client, which attaches to the missing tokens when it returns."""
        self.gone(client)
        for booked in self._requests.values():
            booked.paused |= booked.reader == client
            if booked.before:
                booked.before = [before for before in booked.before if before[0] != client]

    def forget(self) -> None:
        """Drop what is owed to all clients."""
        self._owed.clear()
        self._lost_us.clear()
        self._end_of_moves()

    def late(self, latest_us: int) -> None:
        """Check at the start of a turn that every slow consumer was retried in time."""
        for client, lost_us in self._lost_us.items():
            if lost_us + RETRY_US < latest_us and self._owed.get(client):
                raise Violation(f"client {client} accepted nothing at {lost_us} us and was not retried since")

    def turn_ends(self, clients: Container[int]) -> None:
        """Check that every connected client that accepts messages has received what was owed to it."""
        for client, owed in self._owed.items():
            if owed and client in clients and client not in self._lost_us:
                raise Violation(f"client {client} did not receive in this turn: {owed}")
        self._end_of_moves()

    def _end_of_moves(self) -> None:
        for booked in self._moved:
            booked.before.clear()
        self._moved.clear()
