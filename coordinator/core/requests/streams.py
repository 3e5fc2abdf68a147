"""Pending stream data of each client: at most one Stream message a connection and turn.

A message never exceeds the client's decoder limit; the rest follows in the next turn, which is due immediately. A
lost message therefore affects only the requests in it.

There is no send queue for a client that does not read. Data that cannot be sent is dropped, its requests pause, and
a notice of the pause is sent as soon as the client accepts messages. The client then resumes by offset; the tokens are
kept with the requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.codec import BODY_BYTES_MAX, FRAME_BYTES_MAX
from kvforge.protocol.messages import NO_INT32, Ended, Stream

from ..clock import Clock
from ..events import Effect, ToClient
from ..sizes import END_BYTES, error_bytes
from .top_logprobs import TopLogprobs

ROW_BYTES, TOP_BYTES, RANK_BYTES = 24, 8, 4
ARRAY_BYTES_MAX = FRAME_BYTES_MAX // 4
ROWS_MAX = ARRAY_BYTES_MAX // ROW_BYTES
BODY_BYTES = BODY_BYTES_MAX // 2
IDS_MAX = 16_384  # paused or taken requests in one message: 9 bytes each, in the body

RETRY_US = 50_000  # the socket does not signal when a slow client reads again
NO_TOP_LOGPROBS = TopLogprobs.none(0)


class StreamRows(NamedTuple):
    """Tokens of one or more requests: [n] each; tops of n rows, or None; ranks [n] if any row is of a prompt."""

    requests: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    tops: TopLogprobs | None
    ranks: npt.NDArray[np.int32] | None = None

    @property
    def bytes(self) -> int:
        """Their size in a message."""
        row_bytes = ROW_BYTES if self.ranks is None else ROW_BYTES + RANK_BYTES
        return row_bytes * self.tokens.size + (TOP_BYTES * self.tops.tokens.size if self.tops is not None else 0)

    def pick(self, rows: npt.NDArray[np.integer]) -> StreamRows:
        """Return the given rows."""
        tops = None if self.tops is None else self.tops.pick(rows)
        ranks = None if self.ranks is None else self.ranks[rows]
        return StreamRows(self.requests[rows], self.offsets[rows], self.tokens[rows], self.logprobs[rows], tops, ranks)


class Streams:
    """Rows and ends of each client, in order of occurrence."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[int, list[StreamRows]] = {}
        self._ended: dict[int, list[Ended]] = {}
        self._paused: dict[int, set[int]] = {}
        self._taken: dict[int, list[int]] = {}
        self._retry_us = 0

    def add_step(self, client: int, rows: StreamRows) -> None:
        """Add one token for each of n requests of one client."""
        self._rows.setdefault(client, []).append(rows)

    def add_step_of_clients(self, clients: npt.NDArray[np.int64], rows: StreamRows) -> None:
        """Add one token for each of n requests of any clients, [n]; client 0 means that none reads."""
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
        tops: TopLogprobs | None = None,
        ranks: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Add tokens of one request from `offset` on: [n] each."""
        if client and tokens.size:
            offsets = np.arange(offset, offset + tokens.size, dtype=np.int32)
            self._rows.setdefault(client, []).append(
                StreamRows(np.full(tokens.size, request_id, np.int64), offsets, tokens, logprobs, tops, ranks)
            )

    def add_end(self, client: int, ended: Ended) -> None:
        """Add the end of a request."""
        if client:
            self._ended.setdefault(client, []).append(ended)

    def hand_over(self, client: int, request_id: int) -> None:
        """Add a notice to the client that another client took over the request."""
        self._resumed(client, request_id)
        self._taken.setdefault(client, []).append(request_id)

    def restart(self, client: int, request_id: int) -> None:
        """Drop pending data of a request because the client asked for it from an offset."""
        self._resumed(client, request_id)
        if (taken := self._taken.get(client)) is not None:
            self._taken[client] = [other for other in taken if other != request_id]
        self._drop(client, {request_id})

    def _drop(self, client: int, request_ids: set[int]) -> None:
        """Drop pending data of these requests."""
        if (ended := self._ended.get(client)) is not None:
            self._ended[client] = [end for end in ended if end.request_id not in request_ids]
        for i, rows in enumerate(self._rows.get(client, ())):
            others = np.flatnonzero(~np.isin(rows.requests, list(request_ids)))
            if others.size < rows.requests.size:
                self._rows[client][i] = rows.pick(others)

    def _resumed(self, client: int, request_id: int) -> None:
        """Cancel the notice that the request is paused."""
        paused = self._paused.get(client)
        if paused is not None:
            paused.discard(request_id)
            if not paused:
                del self._paused[client]

    def lost(self, client: int, stream: Stream) -> list[int]:
        """Handle a message that could not be sent.

        Requests that another client has taken over meanwhile are not paused: on a notice of a pause, this client would
        take them back.

        Returns:
            The requests in the message, for the caller to pause.
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
        """When to send notices to slow clients again, or None."""
        return self._retry_us if self._paused or self._taken else None

    @property
    def more(self) -> bool:
        """Whether data is pending that can be sent immediately."""
        return bool(self._rows or self._ended)

    def forget(self, client: int) -> None:
        """Drop all data of a client that is gone."""
        for news in (self._rows, self._ended, self._paused, self._taken):
            news.pop(client, None)

    def flush(self, effects: list[Effect]) -> bool:
        """Send one message to each client with pending data. Return whether more data can be sent immediately."""
        if self._ended or self._paused or self._taken:
            clients = self._rows.keys() | self._ended.keys() | self._paused.keys() | self._taken.keys()
            effects.extend([ToClient(client, self._message(client)) for client in sorted(clients)])
        else:  # the common case
            for client in sorted(self._rows):
                rows = self._next_rows(client)
                effects.append(ToClient(client, _stream(rows)))
        return bool(self._rows or self._ended)

    def _message(self, client: int) -> Stream:
        """Build the next message of a client, up to its limit: pauses, then tokens, ends and take-overs."""
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
        """Remove and return the next rows that fit into a message."""
        parts = self._rows.pop(client, None)
        if parts is None:
            return None
        if len(parts) == 1 and parts[0].tops is None and parts[0].tokens.size <= ROWS_MAX:
            return parts[0]  # the common case
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
        """Remove and return the next ends that fit into a message."""
        ends = self._ended.pop(client, [])
        room = BODY_BYTES
        for i, end in enumerate(ends):
            room -= END_BYTES + (0 if end.error is None else error_bytes(end.error))
            if room < 0 and i:
                self._ended[client] = ends[i:]
                return ends[:i]
        return ends


def _stream(
    rows: StreamRows | None,
    ended: tuple[Ended, ...] = (),
    paused: tuple[int, ...] = (),
    taken: tuple[int, ...] = (),
) -> Stream:
    if rows is None:
        return Stream(ended, paused, taken)
    top = rows.tops if rows.tops is not None else NO_TOP_LOGPROBS
    columns = (rows.requests, rows.offsets, rows.tokens, rows.logprobs, top.counts, top.tokens, top.logprobs)
    return Stream(ended, paused, taken, *columns, NO_INT32 if rows.ranks is None else rows.ranks)


def _joined(parts: list[StreamRows]) -> StreamRows:
    """Concatenate the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    requests, offsets, tokens, logprobs = (np.concatenate([part[i] for part in parts]) for i in range(4))
    tops = None
    if any(part.tops is not None and part.tops.tokens.size for part in parts):
        tops = TopLogprobs.joined([part.tops or TopLogprobs.none(part.tokens.size) for part in parts])
    ranks = None
    if any(part.ranks is not None for part in parts):
        ranks = np.concatenate(
            [np.zeros(part.tokens.size, np.int32) if part.ranks is None else part.ranks for part in parts]
        )
    return StreamRows(requests, offsets, tokens, logprobs, tops, ranks)
