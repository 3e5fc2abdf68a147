"""What each client is to be told at the end of this turn: at most one Stream message a connection.

A message has what the client's decoder takes and no more; what does not fit is told in the next turn, which is due at
once. So a message that is lost takes with it what was to follow of the same requests, and nothing else.

Nothing is kept for a client that does not read: what could not be sent is lost, its requests are paused, and the client
is told so as soon as it takes a message again. It asks for what it lacks by offset; the tokens are with the requests.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.codec import BODY_BYTES_MAX, FRAME_BYTES_MAX
from kvforge.protocol.messages import Ended, Stream

from ..clock import Clock
from ..events import Effect, ToClient
from ..sizes import END_BYTES, error_bytes
from .top_logprobs import Tops

ROW_BYTES, TOP_BYTES = 24, 8
ARRAY_BYTES_MAX = FRAME_BYTES_MAX // 4
BODY_BYTES = BODY_BYTES_MAX // 2
IDS_MAX = 16_384  # of requests that were paused or taken: 9 bytes each, in the body

RETRY_US = 50_000  # nothing tells when a client that took nothing more reads again
NO_TOPS = Tops.none(0)


class StreamRows(NamedTuple):
    """Tokens of one or more requests: [n] each, tops of n rows or None."""

    requests: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    tops: Tops | None

    @property
    def bytes(self) -> int:
        """What they take in a message."""
        return ROW_BYTES * self.tokens.size + (TOP_BYTES * self.tops.tokens.size if self.tops is not None else 0)

    def pick(self, rows: npt.NDArray[np.integer]) -> StreamRows:
        """Some of them."""
        tops = None if self.tops is None else self.tops.pick(rows)
        return StreamRows(self.requests[rows], self.offsets[rows], self.tokens[rows], self.logprobs[rows], tops)


class Streams:
    """StreamRows and ends per client, in the order they happened."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[int, list[StreamRows]] = {}
        self._ended: dict[int, list[Ended]] = {}
        self._paused: dict[int, set[int]] = {}
        self._taken: dict[int, list[int]] = {}
        self._retry_us = 0

    def add_step(
        self,
        clients: npt.NDArray[np.int64],
        requests: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        tops: Tops | None = None,
    ) -> None:
        """One token for each of n requests, of any clients: all [n]."""
        first, rows = int(clients[0]), StreamRows(requests, offsets.astype(np.int32), tokens, logprobs, tops)
        if np.count_nonzero(clients == first) == clients.size:
            if first:
                self._rows.setdefault(first, []).append(rows)
            return
        for client in sorted(set(clients.tolist())):
            if client:
                self._rows.setdefault(client, []).append(rows.pick(np.flatnonzero(clients == client)))

    def add_tokens(
        self,
        client: int,
        request_id: int,
        offset: int,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        tops: Tops | None = None,
    ) -> None:
        """Several tokens of one request from `offset` on: [n] each."""
        if client and tokens.size:
            offsets = np.arange(offset, offset + tokens.size, dtype=np.int32)
            self._rows.setdefault(client, []).append(
                StreamRows(np.full(tokens.size, request_id, np.int64), offsets, tokens, logprobs, tops)
            )

    def add_end(self, client: int, ended: Ended) -> None:
        """A request of the client ended."""
        if client:
            self._ended.setdefault(client, []).append(ended)

    def hand_over(self, client: int, request_id: int) -> None:
        """Another client reads the request from now on: it is told so."""
        self._resumed(client, request_id)
        self._taken.setdefault(client, []).append(request_id)

    def restart(self, client: int, request_id: int) -> None:
        """The client asks for the request anew: what it had not been told yet no longer counts."""
        self._resumed(client, request_id)
        if (taken := self._taken.get(client)) is not None:
            self._taken[client] = [other for other in taken if other != request_id]
        self._drop(client, {request_id})

    def _drop(self, client: int, request_ids: set[int]) -> None:
        """What the client was still to be told of these requests."""
        if (ended := self._ended.get(client)) is not None:
            self._ended[client] = [end for end in ended if end.request_id not in request_ids]
        for i, rows in enumerate(self._rows.get(client, ())):
            others = np.flatnonzero(~np.isin(rows.requests, list(request_ids)))
            if others.size < rows.requests.size:
                self._rows[client][i] = rows.pick(others)

    def _resumed(self, client: int, request_id: int) -> None:
        """The client need not be told that the request was paused."""
        paused = self._paused.get(client)
        if paused is not None:
            paused.discard(request_id)
            if not paused:
                del self._paused[client]

    def lost(self, client: int, stream: Stream) -> list[int]:
        """A message could not be sent. Returns the requests whose rows were in it: they are to be paused.

        Requests that another client has taken meanwhile are not: if this client were told of a pause, it would take
        them back.
        """
        self._retry_us = self._clock.now_us + RETRY_US
        missed = {*stream.request_ids.tolist(), *(ended.request_id for ended in stream.ended)}
        self._drop(client, missed)
        ids = sorted(missed - set(stream.taken))
        self._paused.setdefault(client, set()).update(ids, stream.paused)
        if stream.taken:
            self._taken.setdefault(client, [])[:0] = stream.taken
        return ids

    @property
    def due_us(self) -> int | None:
        """When to try again to tell a client what it missed; None where nobody waits for that."""
        return self._retry_us if self._paused or self._taken else None

    @property
    def more(self) -> bool:
        """Whether something is left to be told that can be told at once."""
        return bool(self._rows or self._ended)

    def forget(self, client: int) -> None:
        """The client is gone."""
        for news in (self._rows, self._ended, self._paused, self._taken):
            news.pop(client, None)

    def flush(self, effects: list[Effect]) -> None:
        """One message for each client that has news."""
        clients: AbstractSet[int] = self._rows.keys()
        if self._ended or self._paused or self._taken:
            clients = clients | self._ended.keys() | self._paused.keys() | self._taken.keys()
        effects.extend(ToClient(client, self._message(client)) for client in sorted(clients))

    def _message(self, client: int) -> Stream:
        """What comes next for the client, as much as fits: first what was paused, then tokens, ends, and what others
        took."""
        if not (self._ended or self._paused or self._taken):
            return _stream(self._next_rows(client), (), (), ())  # as in most turns
        paused = sorted(self._paused.pop(client, ()))
        if len(paused) > IDS_MAX:
            self._paused[client] = set(paused[IDS_MAX:])
            return Stream(paused=tuple(paused[:IDS_MAX]))
        rows = self._next_rows(client)
        ended: list[Ended] = []
        taken: list[int] = []
        if client not in self._rows:
            ended = self._next_ends(client)
            if client not in self._ended:
                taken = self._taken.pop(client, [])
                if len(taken) > IDS_MAX:
                    self._taken[client] = taken[IDS_MAX:]
        return _stream(rows, tuple(ended), tuple(paused), tuple(taken[:IDS_MAX]))

    def _next_rows(self, client: int) -> StreamRows | None:
        """The next of its rows; what does not fit stays."""
        parts = self._rows.pop(client, None)
        if parts is None:
            return None
        if len(parts) == 1 and parts[0].bytes <= ARRAY_BYTES_MAX:
            return parts[0]
        chosen: list[StreamRows] = []
        room = ARRAY_BYTES_MAX
        for i, part in enumerate(parts):
            if part.bytes > room:
                fits = max(0 if chosen else 1, int(room * part.tokens.size // max(part.bytes, 1)))
                every_row = np.arange(part.tokens.size)
                chosen += [part.pick(every_row[:fits])] if fits else []
                self._rows[client] = [part.pick(every_row[fits:]), *parts[i + 1 :]]
                break
            chosen.append(part)
            room -= part.bytes
        return _joined(chosen)

    def _next_ends(self, client: int) -> list[Ended]:
        """The next of its ends; what does not fit stays."""
        ends = self._ended.pop(client, [])
        room = BODY_BYTES
        for i, end in enumerate(ends):
            room -= END_BYTES + (0 if end.error is None else error_bytes(end.error))
            if room < 0 and i:
                self._ended[client] = ends[i:]
                return ends[:i]
        return ends


def _stream(
    rows: StreamRows | None, ended: tuple[Ended, ...], paused: tuple[int, ...], taken: tuple[int, ...]
) -> Stream:
    if rows is None:
        return Stream(ended, paused, taken)
    top = rows.tops if rows.tops is not None else NO_TOPS
    columns = (rows.requests, rows.offsets, rows.tokens, rows.logprobs, top.counts, top.tokens, top.logprobs)
    return Stream(ended, paused, taken, *columns)


def _joined(parts: list[StreamRows]) -> StreamRows:
    """All rows of the parts."""
    if len(parts) == 1:
        return parts[0]
    requests, offsets, tokens, logprobs = (np.concatenate([part[i] for part in parts]) for i in range(4))
    tops = None
    if any(part.tops is not None and part.tops.tokens.size for part in parts):
        tops = Tops.joined([part.tops or Tops.none(part.tokens.size) for part in parts])
    return StreamRows(requests, offsets, tokens, logprobs, tops)
