"""A null server for OpenAI's API: measurements against it show the client alone.

    python -m kvforge.loadtest.drive.http_null_server [--port 0] [--model null] [--pace TOKENS_PER_S] [--first-ms T]

It prints its address when it is ready. Every answer has the requested number of tokens: all at once, or at a fixed rate
per stream, the first one after --first-ms.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from time import monotonic
from typing import Any, cast

import msgspec

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import OK, status_of

from .http_wire import encode, httptools, many_files

TOKENS_MAX = 1 << 16
BODY_BYTES_MAX = 64 << 20
BACKLOG = 4096
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class RequestBody(msgspec.Struct):
    """The fields of a request that it reads."""

    max_tokens: int = 16
    prompt: msgspec.Raw = msgspec.Raw(b"")
    return_token_ids: bool = False


_decode_request = msgspec.json.Decoder(RequestBody).decode


def _chunk(event: bytes) -> bytes:
    content = b"data: " + event + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(content), content)


@lru_cache(maxsize=1024)
def pieces(chat: bool, ids: bool, tokens: int, prompt_tokens: int) -> tuple[bytes, bytes, bytes]:
    """Return the chunks of an answer's first events, of one token, and of its end."""
    name = "chat.completion.chunk" if chat else "text_completion"
    begin = {"id": "null", "object": name, "created": 0, "model": "null"}
    delta: dict[str, Any] = {"delta": {"content": " null"}} if chat else {"text": " null"}
    last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    if ids:
        delta["token_ids"], last["token_ids"] = [7], []
    index = {"index": 0}
    opening = [begin | {"choices": [index | {"delta": {"role": "assistant", "content": ""}}]}] if chat else []
    token = begin | {"choices": [index | delta | {"finish_reason": None}]}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    closing = [
        begin | {"choices": [index | last | {"finish_reason": "length"}]},
        begin | {"choices": [], "usage": usage},
    ]
    end = b"".join(_chunk(encode(event)) for event in closing) + _chunk(b"[DONE]") + END
    return b"".join(_chunk(encode(event)) for event in opening), _chunk(encode(token)), end


class Stream:
    """A paced answer in progress."""

    __slots__ = ("due", "end", "left", "serving", "token")

    def __init__(self, serving: Serving, due: float, left: int, token: bytes, end: bytes) -> None:
        self.serving, self.due, self.left, self.token, self.end = serving, due, left, token, end


class TokenWriter:
    """Writes each token of each stream when it is due. With `tokens_per_s` 0 all are written at once."""

    def __init__(self, tokens_per_s: float, first_s: float) -> None:
        self.at_once = tokens_per_s <= 0 and first_s <= 0
        self._gap_s, self._first_s = 1 / tokens_per_s if tokens_per_s > 0 else 0.0, first_s
        self._due: list[tuple[float, int, Stream]] = []
        self._order = count()
        self._wake: asyncio.TimerHandle | None = None

    def begin(self, serving: Serving, tokens: int, token: bytes, end: bytes) -> Stream:
        """Start a stream after its header was written."""
        stream = Stream(serving, monotonic() + self._first_s, tokens, token, end)
        heapq.heappush(self._due, (stream.due, next(self._order), stream))
        if self._due[0][2] is stream:
            self._set()
        return stream

    def _set(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        wait_s = max(0.0, self._due[0][0] - monotonic())
        self._wake = asyncio.get_running_loop().call_later(wait_s, self._write)

    def _write(self) -> None:
        self._wake, now, due = None, monotonic(), self._due
        while due and due[0][0] <= now:
            stream = due[0][2]
            if self._gap_s == 0:
                written, stream.left = stream.token * stream.left, 0
            else:
                written, stream.left = stream.token, stream.left - 1
            if stream.serving.transport is None:
                heapq.heappop(due)
            elif stream.left <= 0:
                heapq.heappop(due)
                stream.serving.write(written + stream.end)
                stream.serving.stream = None
            else:
                stream.serving.write(written)
                stream.due += self._gap_s
                heapq.heapreplace(due, (stream.due, next(self._order), stream))
        if due:
            self._set()


class Serving(asyncio.Protocol):
    """One connection."""

    def __init__(self, pace: TokenWriter, models: bytes) -> None:
        http = httptools()
        self._broken = (http.HttpParserError, http.HttpParserUpgrade)
        self._parser: Any = http.HttpRequestParser(self)
        self._pace, self._models = pace, models
        self._url = self._body = b""
        self.transport: asyncio.Transport | None = None
        self.stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Drop the connection's streams."""
        self.transport = self._parser = None

    def data_received(self, data: bytes) -> None:
        """Parse a piece of a request."""
        try:
            self._parser.feed_data(data)
        except self._broken:
            self._drop()
        if len(self._body) > BODY_BYTES_MAX:
            self._drop()

    def write(self, data: bytes) -> None:
        """Write to the client if it is still connected."""
        if self.transport is not None:
            self.transport.write(data)

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Reset the request."""
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        """Collect the target."""
        self._url += url

    def on_body(self, data: bytes) -> None:
        """Collect a piece of the body."""
        self._body = self._body + data if self._body else data

    def on_message_complete(self) -> None:
        """Answer the request."""
        if self.stream is not None:
            self._drop()  # a second request before the first one's answer
        elif self._url.endswith(b"/completions"):
            self._answer(self._url.endswith(b"/chat/completions"))
        elif self._url.endswith(b"/models"):
            self._whole(b"200 OK", self._models)
        else:
            self._refuse(b"404 Not Found", "not found")

    def _answer(self, chat: bool) -> None:
        try:
            asked = _decode_request(self._body)
        except (msgspec.MsgspecError, UnicodeError) as error:
            self._refuse(b"400 Bad Request", str(error))
            return
        if not 1 <= asked.max_tokens <= TOKENS_MAX:
            self._refuse(b"400 Bad Request", f"max_tokens must be 1 to {TOKENS_MAX}")
            return
        prompt = bytes(asked.prompt)
        prompt_tokens = prompt.count(b",") + 1 if prompt.startswith(b"[") else len(prompt) // 4
        begin, token, end = pieces(chat, asked.return_token_ids, asked.max_tokens, prompt_tokens)
        if self._pace.at_once:
            self.write(HEAD + begin + token * asked.max_tokens + end)
        else:
            self.write(HEAD + begin)
            self.stream = self._pace.begin(self, asked.max_tokens, token, end)

    def _refuse(self, status: bytes, message: str) -> None:
        self._whole(status, encode({"error": {"message": message, "type": "invalid_request_error", "code": None}}))

    def _whole(self, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self.write(head + body)


async def serve(host: str, port: int, model: str, pace: TokenWriter) -> asyncio.Server:
    """Start the server on the running event loop."""
    many_files()
    models = encode({"object": "list", "data": [{"id": model, "object": "model"}]})
    return await asyncio.get_running_loop().create_server(lambda: Serving(pace, models), host, port, backlog=BACKLOG)


async def _run(options: argparse.Namespace) -> None:
    pace = TokenWriter(options.pace, options.first_ms / 1e3)
    server = await serve(options.host, options.port, options.model, pace)
    port = server.sockets[0].getsockname()[1]
    print(f"http://{options.host}:{port}/v1", flush=True)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    server.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal stops the process."""
    top = argparse.ArgumentParser(prog="python -m kvforge.loadtest.drive.http_null_server", description=__doc__)
    add = top.add_argument
    add("--host", default="127.0.0.1", help="the address to listen on [127.0.0.1]")
    add("--port", type=int, default=0, help="0 picks a free port [0]")
    add("--model", default="null", help="the model that /v1/models lists [null]")
    add(
        "--pace",
        "--tokens-per-s",
        type=float,
        default=0.0,
        metavar="TOKENS_PER_S",
        help="the rate of each stream; 0 writes all tokens at once [0]",
    )
    add("--first-ms", type=float, default=0.0, metavar="T", help="the delay of the first token [0]")
    options = top.parse_args(argv)
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    with suppress(ImportError):
        import uvloop

        run = uvloop.run
    try:
        run(_run(options))
    except (KvforgeError, OSError) as error:
        print(f"http_null_server: {error}", file=sys.stderr)
        return status_of(error) if isinstance(error, KvforgeError) else 1
    return OK


if __name__ == "__main__":
    sys.exit(main())
