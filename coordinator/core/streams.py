"""What each client is to be told at the end of this turn: at most one Stream message a connection."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.messages import Ended, Stream

from .tops import Tops

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]


class Streams:
    """Rows and ends per client, in the order they happened."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Rows]] = {}
        self._ended: dict[int, list[Ended]] = {}
        self._tops: dict[int, dict[int, Tops]] = {}  # by client and place in its rows

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

    def forget(self, client: int) -> None:
        """The client is gone."""
        self._rows.pop(client, None)
        self._tops.pop(client, None)
        self._ended.pop(client, None)

    def flush(self) -> list[tuple[int, Stream]]:
        """One message for each client that has news."""
        messages = []
        for client in self._rows.keys() | self._ended.keys():
            rows = self._rows.get(client)
            ended = tuple(self._ended.get(client, ()))
            if rows is None:
                messages.append((client, Stream(ended=ended)))
                continue
            ids, offsets, tokens, logprobs = (np.concatenate(column) for column in zip(*rows, strict=True))
            found, top = self._tops.get(client), Tops.none(0)
            if found:
                top = Tops.joined([found.get(i) or Tops.none(part[0].size) for i, part in enumerate(rows)])
            stream = Stream(
                ended=ended,
                request_ids=ids,
                offsets=offsets,
                tokens=tokens,
                logprobs=logprobs,
                top_counts=top.counts,
                top_tokens=top.tokens,
                top_logprobs=top.logprobs,
            )
            messages.append((client, stream))
        self._rows.clear()
        self._tops.clear()
        self._ended.clear()
        return sorted(messages, key=lambda message: message[0])
