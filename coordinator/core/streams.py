"""What each client is to be told at the end of this turn: at most one Stream message a connection."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.messages import Ended, Stream

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]


class Streams:
    """Rows and ends per client, in the order they happened."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Rows]] = {}
        self._ended: dict[int, list[Ended]] = {}

    def add_step(
        self,
        clients: npt.NDArray[np.int64],
        requests: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
    ) -> None:
        """One token for each of n requests, of any clients: all [n]."""
        for client in np.unique(clients).tolist():
            if client:
                mine = clients == client
                rows = (requests[mine], offsets[mine].astype(np.int32), tokens[mine], logprobs[mine])
                self._rows.setdefault(client, []).append(rows)

    def add_tokens(
        self,
        client: int,
        request_id: int,
        offset: int,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
    ) -> None:
        """Several tokens of one request from `offset` on: [n] each."""
        if client and tokens.size:
            offsets = np.arange(offset, offset + tokens.size, dtype=np.int32)
            rows = (np.full(tokens.size, request_id, np.int64), offsets, tokens, logprobs)
            self._rows.setdefault(client, []).append(rows)

    def add_end(self, client: int, ended: Ended) -> None:
        """A request of the client ended."""
        if client:
            self._ended.setdefault(client, []).append(ended)

    def forget(self, client: int) -> None:
        """The client is gone."""
        self._rows.pop(client, None)
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
            stream = Stream(ended=ended, request_ids=ids, offsets=offsets, tokens=tokens, logprobs=logprobs)
            messages.append((client, stream))
        self._rows.clear()
        self._ended.clear()
        return sorted(messages, key=lambda message: message[0])
