"""A server that answers each request with given bytes in given pieces, and its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np

from kvforge.loadtest.drive.http import HttpOptions, HttpTarget
from kvforge.loadtest.drive.outcome import Outcome
from kvforge.loadtest.drive.target import TargetRequest
from kvforge.loadtest.load.texts import Encode
from kvforge.protocol.messages import Int32Array

WAIT_S = 20.0
PROMPT = np.array([5, 6, 7], np.int32)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def event(text: str | None = "a", finish: str | None = None, **others: Any) -> bytes:
    """Return a streamed event of a completion."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"id": "1", "choices": choices, **others}).encode() + b"\n\n"


def usage(tokens: int, prompt: int = 3, cached: int = 2) -> dict[str, Any]:
    """Return a server's usage counts."""
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "prompt_tokens_details": details}


DONE = b"data: [DONE]\n\n"


def stream(tokens: int) -> bytes:
    """Return all events of a valid answer."""
    counted = event(None, usage=usage(tokens))
    return event() * (tokens - 1) + event("z", "length") + counted + DONE


def chunked(*pieces: bytes, head: str = "") -> bytes:
    """Return a valid chunked response with this body."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{head}\r\n".encode() + chunks + b"0\r\n\r\n"


def whole(status: str, body: bytes, head: str = "") -> bytes:
    """Return a response with a content length."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


async def request_of(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    """Read a request; return its head and its JSON."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    return head, json.loads(await reader.readexactly(length)) if length else None


def answering(pieces: Iterable[bytes], *, close: bool = False) -> Handler:
    """Give every request of a connection the same answer, sending each piece after the previous one is written."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return handle


@asynccontextmanager
async def serving(handle: Handler, **options: Any) -> AsyncIterator[str]:
    """Run a server with this connection handler; yield its address. Running handlers are cancelled at the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handle(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 24, **options)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Engine:
    """A minimal driver: sends through a target and waits for the ends."""

    def __init__(self, target: HttpTarget) -> None:
        self.target, self.start = target, monotonic()
        self.ends: list[Outcome] = []
        self._changed = asyncio.Event()

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return monotonic() - self.start

    def send(self, tokens: int = 3, *, timeout_s: float = WAIT_S, prompt: Int32Array = PROMPT, **more: Any) -> Outcome:
        """Send one request; `cancel` can abort it. more: other fields of `TargetRequest`."""
        outcome = Outcome(session=len(self.ends), due_s=self.now_s())
        until = self.start + self.now_s() + timeout_s
        ask = TargetRequest(prompt=prompt, output_tokens=tokens, until=until, **more)
        self.cancel = self.target.send(ask, outcome, self.start, self._ended)
        return outcome

    def _ended(self, outcome: Outcome) -> None:
        assert all(outcome is not other for other in self.ends), "an outcome ended twice"
        self.ends.append(outcome)
        self._changed.set()

    async def ended(self, count: int) -> None:
        """Wait until `count` requests have ended."""
        async with asyncio.timeout(WAIT_S):
            while len(self.ends) < count:
                self._changed.clear()
                await self._changed.wait()

    async def one(self, tokens: int = 3, **options: Any) -> Outcome:
        """Send one request and wait for its end."""
        outcome = self.send(tokens, **options)
        await self.ended(len(self.ends) + 1)
        return outcome


@asynccontextmanager
async def driving(url: str, encode: Encode | None = None, **options: Any) -> AsyncIterator[Engine]:
    """Yield an engine with an open target."""
    target = HttpTarget(HttpOptions(url=url, **{"model": "m", "connections": 1} | options), encode)
    await target.open()
    try:
        yield Engine(target)
    finally:
        await target.close()


def in_order(outcome: Outcome) -> bool:
    """Check that the request's recorded times are in order."""
    moments = [outcome.due_s, outcome.sent_s, outcome.accepted_s, *outcome.tokens_s, outcome.ended_s]
    moments = [moment for moment in moments if moment != -1.0]
    return all(first <= second for first, second in pairwise(moments))
