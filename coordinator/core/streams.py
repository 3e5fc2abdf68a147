"""What each client is to be told at the end of this turn: at most one Stream message a connection.

Nothing is kept for a client that does not read: what could not be sent is lost, its requests are paused, and the client
is told so as soon as it takes a message again. It asks for what it lacks by offset; the tokens are with the requests.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from protocol.messages import Ended, Stream

from .masks import every
from .tops import Tops

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]

RETRY_US = 50_000  # nothing tells when a client that took nothing more reads again
NO_TOPS = Tops.none(0)


class Streams:
    """Rows and ends per client, in the order they happened."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Rows]] = {}
        self._ended: dict[int, list[Ended]] = {}
        self._tops: dict[int, dict[int, Tops]] = {}  # by client and place in its rows
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
        first = int(clients[0])
        if every(clients == first):
            if first:
                self._add(first, (requests, offsets.astype(np.int32), tokens, logprobs), tops)
            return
        for client in sorted(set(clients.tolist())):
            if client:
                mine = clients == client
                rows = (requests[mine], offsets[mine].astype(np.int32), tokens[mine], logprobs[mine])
                self._add(client, rows, None if tops is None else tops.pick(np.flatnonzero(mine)))

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
            self._add(client, (np.full(tokens.size, request_id, np.int64), offsets, tokens, logprobs), tops)

    def _add(self, client: int, rows: Rows, tops: Tops | None) -> None:
        parts = self._rows.setdefault(client, [])
        if tops is not None and tops.tokens.size:
            self._tops.setdefault(client, {})[len(parts)] = tops
        parts.append(rows)

    def add_end(self, client: int, ended: Ended) -> None:
        """A request of the client ended."""
        if client:
            self._ended.setdefault(client, []).append(ended)

    def take(self, client: int, request_id: int) -> None:
        """Another client reads the request from now on: it is told so."""
        self._resumed(client, request_id)
        self._taken.setdefault(client, []).append(request_id)

    def restart(self, client: int, request_id: int) -> None:
        """The client asks for the request anew: what it was still to be told of it does not count."""
        self._resumed(client, request_id)
        if (taken := self._taken.get(client)) is not None:
            self._taken[client] = [other for other in taken if other != request_id]
        if (ended := self._ended.get(client)) is not None:
            self._ended[client] = [end for end in ended if end.request_id != request_id]
        tops = self._tops.get(client, {})
        for i, (ids, offsets, tokens, logprobs) in enumerate(self._rows.get(client, ())):
            others = np.flatnonzero(ids != request_id)
            if others.size < ids.size:
                self._rows[client][i] = (ids[others], offsets[others], tokens[others], logprobs[others])
                if i in tops:
                    tops[i] = tops[i].pick(others)

    def _resumed(self, client: int, request_id: int) -> None:
        """The client need not be told that the request was paused."""
        paused = self._paused.get(client)
        if paused is not None:
            paused.discard(request_id)
            if not paused:
                del self._paused[client]

    def lost(self, client: int, stream: Stream, now_us: int) -> list[int]:
        """A message could not be sent. Returns the requests whose rows were in it: they are to be paused.

        What another client has taken meanwhile is not: told that it was paused, this one would take it back.
        """
        self._retry_us = now_us + RETRY_US
        missed = {*stream.request_ids.tolist(), *(ended.request_id for ended in stream.ended)}
        ids = sorted(missed - set(stream.taken))
        self._paused.setdefault(client, set()).update(ids, stream.paused)
        if stream.taken:
            self._taken.setdefault(client, [])[:0] = stream.taken
        return ids

    @property
    def due_us(self) -> int | None:
        """When to try again to tell a client what it missed; None where nobody waits for that."""
        return self._retry_us if self._paused or self._taken else None

    def forget(self, client: int) -> None:
        """The client is gone."""
        for news in (self._rows, self._tops, self._ended, self._paused, self._taken):
            news.pop(client, None)

    def flush(self) -> list[tuple[int, Stream]]:
        """One message for each client that has news."""
        clients: AbstractSet[int] = self._rows.keys()
        if self._ended or self._paused or self._taken:
            clients = clients | self._ended.keys() | self._paused.keys() | self._taken.keys()
        if not clients:
            return []
        messages = [(client, self._message(client)) for client in sorted(clients)]
        for news in (self._rows, self._tops, self._ended, self._paused, self._taken):
            news.clear()
        return messages

    def _message(self, client: int) -> Stream:
        ended = tuple(self._ended.get(client, ()))
        paused, taken = tuple(sorted(self._paused.get(client, ()))), tuple(self._taken.get(client, ()))
        rows = self._rows.get(client)
        if rows is None:
            return Stream(ended=ended, paused=paused, taken=taken)
        if len(rows) == 1:
            ids, offsets, tokens, logprobs = rows[0]
        else:
            ids, offsets, tokens, logprobs = (np.concatenate(column) for column in zip(*rows, strict=True))
        found, top = self._tops.get(client), NO_TOPS
        if found:
            top = Tops.joined([found.get(i) or Tops.none(part[0].size) for i, part in enumerate(rows)])
        return Stream(
            ended=ended,
            paused=paused,
            taken=taken,
            request_ids=ids,
            offsets=offsets,
            tokens=tokens,
            logprobs=logprobs,
            top_counts=top.counts,
            top_tokens=top.tokens,
            top_logprobs=top.logprobs,
        )
