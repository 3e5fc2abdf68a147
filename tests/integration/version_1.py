"""A client and a worker of protocol version 1, limited to the messages of its fixture.

`python -m tests.integration.version_1 ENDPOINT NAME` is the worker. Its model is that of tests/coordinator/driver.py:
a token is a function of all earlier tokens, read block by block through the shared tables in the layout of version 1.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvforge.protocol.tables import TablesReader
from kvforge.protocol.transport import configure_dealer
from tests.coordinator.driver import choose, fingerprint, logprob_of
from tests.protocol.frozen import Peer, Version

V1 = Version.read(1)
WAIT_S, AGAIN_S = 30.0, 0.05
VOCABULARY = 1000
MODEL = {
    "name": "m",
    "source": "m",
    "architecture": "fake",
    "fingerprint": "of version 1",
    "vocab_size": VOCABULARY,
    "context_tokens_max": 4096,
}


class Lost(Exception):
    """The connection is lost, or was never established."""


def written(name: str, /, **values: Any) -> list[bytes]:
    """Encode a message as version 1 did. Raises KeyError for a field that version 1 lacks."""
    frozen = V1.structs[name]
    arrays = dict(frozen["arrays"])
    body = {"t": frozen["tag"]} | {field: values[field] for field in values if field not in arrays}
    assert set(values) <= set(frozen["fields"]), f"{name} of version 1 has no such field"
    parts = [np.asarray(values.get(array, ()), dtype) for array, dtype in arrays.items()]
    if not any(part.size for part in parts):
        return [msgpack.packb(body)]
    return [msgpack.packb({**body, "n": [part.size for part in parts]}), b"".join(part.tobytes() for part in parts)]


class Wire:
    """One connection. Every received message must be one of version 1, for this direction."""

    def __init__(self, endpoint: str, direction: str) -> None:
        self._names = {V1.structs[said["message"]]["tag"]: said["message"] for said in V1.examples}
        self._known = {said["message"] for said in V1.examples if said["from"] == direction}
        self._peer = Peer(V1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure_dealer(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(linger=200)

    def send(self, name: str, /, **values: Any) -> None:
        """Sends a message."""
        self._socket.send_multipart(written(name, **values))

    def receive(self) -> Any:
        """Return the next message. Raises Lost."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(WAIT_S * 1000))
        assert ready, f"nothing came within {WAIT_S} s"
        if self._socket not in ready:
            parse_monitor_message(self._monitor.recv_multipart())
            raise Lost
        frames = self._socket.recv_multipart()
        name = self._names.get(msgpack.unpackb(frames[0])["t"])
        assert name in self._known, f"version 1 knows no such message: {frames[0]!r}"
        return self._peer.read(name, frames)

    def ask(self, name: str, /, **values: Any) -> Any:
        """Send a command and return its answer, discarding streamed messages meanwhile."""
        self.send(name, **values)
        while getattr(answer := self.receive(), "rid", None) != values["rid"]:
            continue
        return answer


class Answer:
    """The outcome of one request. tokens: in the order of their offsets, from `start` on. ended: None while it runs."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.tokens, self.ended = start, [], None  # type: tuple[int, list[int], Any]

    def take(self, request_id: int, message: Any) -> None:
        """Process a received message of any kind."""
        if type(message).__name__ != "Stream":
            return
        rows = zip(message.request_ids.tolist(), message.offsets.tolist(), message.tokens.tolist(), strict=True)
        for of, offset, token in rows:
            if of == request_id:
                assert offset == self.start + len(self.tokens), "each token once, in order"
                self.tokens.append(token)
        self.ended = next((end for end in message.ended if end.request_id == request_id), self.ended)

    def read(self, wire: Wire, request_id: int, count: int) -> Answer:
        """Read until `count` tokens or the end have arrived."""
        while len(self.tokens) < count and self.ended is None:
            self.take(request_id, wire.receive())
        return self


class Worker:
    """A worker that serves until a stop. After a loss of its coordinator it registers with the next one."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._endpoint, self._name = endpoint, name
        self._kv: dict[tuple[int, int], int] = {}
        self._last: dict[int, int] = {}

    def run(self) -> None:
        """Serve until the coordinator sends a stop."""
        deadline = monotonic() + WAIT_S
        while monotonic() < deadline:
            try:
                with Wire(self._endpoint, "coordinator to worker") as wire:
                    welcome = wire.ask("WorkerHello", rid=1, name=self._name, pid=os.getpid())
                    self._serve(wire, welcome)
                    return
            except Lost:
                select.select([], [], [], AGAIN_S)

    def _serve(self, wire: Wire, welcome: Any) -> None:
        tables = TablesReader(Path(welcome.tables_path), welcome.boot)
        ready = {"model": MODEL, "blocks": 160, "bytes_per_block": 1024, "kv_dtype": "float32", "device": "cpu"}
        registered = wire.ask("WorkerReady", rid=2, **ready)
        print("ready", flush=True)
        while type(message := wire.receive()).__name__ != "Stop":
            wire.send("StepResult", step_id=message.step_id, epoch=registered.epoch, **self._step(message, tables))

    def _step(self, step: Any, tables: TablesReader) -> dict[str, Any]:
        """Apply copies, write the KV of new tokens, then sample the requested rows. The context is read from KV
        only."""
        size = tables.geometry.block_size
        for source, target, count in step.copies.reshape(-1, 3).tolist():
            self._kv |= {(target, offset): self._kv[source, offset] for offset in range(count)}
        width = -(-int((step.starts + step.counts).max(initial=0)) // size)
        rows = tables.rows(step.slots, max(width, 1))[0].tolist() if step.slots.size else []
        sampled, fed = [], 0
        columns = (step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), step.samples.tolist())
        for row, slot, start, count, sample in zip(rows, *columns, strict=True):
            context = self._kv[row[(start - 1) // size], (start - 1) % size] if start else 1
            for position, token in enumerate(step.tokens[fed : fed + count].tolist(), start):
                context = fingerprint(context, token if token >= 0 else self._last[slot])
                self._kv[row[position // size], position % size] = context
            fed += count
            if sample:
                self._last[slot] = choose(context, VOCABULARY)
                sampled.append(slot)
        tokens = [self._last[slot] for slot in sampled]
        return {"slots": sampled, "tokens": tokens, "logprobs": [logprob_of(token) for token in tokens]}


if __name__ == "__main__":
    Worker(*sys.argv[1:]).run()
