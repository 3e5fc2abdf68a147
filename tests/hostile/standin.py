"""A worker without a model: it registers a pool, so that sequences have blocks, and runs no step."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from kvforge.protocol import codec, token
from kvforge.protocol.messages import (
    WORKER_REPLIES,
    Message,
    ModelInfo,
    PoolRegistered,
    WorkerHello,
    WorkerReady,
    WorkerWelcome,
)
from kvforge.protocol.transport import dealer

WAIT_MS = 30_000
BLOCKS = 1024


class StandIn:
    """Context manager of one worker."""

    def __init__(self, endpoint: str, name: str = "honest", pid: int = 1) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context)
        self._socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, WAIT_MS)
        self._socket.connect(endpoint)
        self._decoder = codec.Decoder(WORKER_REPLIES)
        self._runtime = Path(endpoint.removeprefix("ipc://")).parent
        self._name, self._pid = name, pid

    def __enter__(self) -> Self:
        assert self._socket.poll(WAIT_MS, zmq.POLLOUT), "no coordinator accepts the connection"
        hello = WorkerHello(rid=1, name=self._name, pid=self._pid, token=token.read(self._runtime))
        assert isinstance(self._ask(hello), WorkerWelcome)
        model = ModelInfo(
            name="m", source="", architecture="any", fingerprint="1", vocab_size=100, context_tokens_max=1 << 20
        )
        ready = WorkerReady(
            rid=2, model=model, blocks=BLOCKS, bytes_per_block=1024, kv_dtype="float32", device="none", watches=False
        )
        assert isinstance(self._ask(ready), PoolRegistered)
        return self

    def _ask(self, message: Message) -> Message:
        self._socket.send_multipart(codec.encode(message))
        return self._decoder.decode(self._socket.recv_multipart())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._context.destroy(linger=0)
