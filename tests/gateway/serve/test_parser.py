"""Refusals by the HTTP parser, before the application: JSON in the format of the API, with an id."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from kvforge.gateway.config import Settings
from kvforge.gateway.serve.protocol import protocol_of

HEAD_BYTES_MAX, WAIT_S = 2000, 20.0
LARGE = b"x: " + b"a" * 3000 + b"\r\n"


class Served:
    """A port with an application that answers on command. answering: number of open requests."""

    def __init__(self) -> None:
        self.answering = asyncio.Semaphore(0)
        self.may = asyncio.Event()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, send the first word, wait, send the second one."""
        while (await receive()).get("more_body"):
            pass
        if scope["path"] != "/later":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            self.answering.release()
            await self.may.wait()
            await send({"type": "http.response.body", "body": b"two", "more_body": False})
        else:
            self.answering.release()
            await self.may.wait()

    async def __aenter__(self) -> Self:
        settings = Settings(head_bytes_max=HEAD_BYTES_MAX, head_s=1.0)
        config = uvicorn.Config(
            self.app, http=protocol_of(settings), lifespan="off", interface="asgi3", log_config=None
        )
        config.load()
        self._state = uvicorn.server.ServerState()
        kind: Any = config.http_protocol_class
        made = lambda: kind(config=config, server_state=self._state, app_state={})  # noqa: E731
        self._server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.may.set()
        self._server.close()
        for task in [*self._state.tasks]:
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._server.sockets[0].getsockname()[1])


async def said(content: bytes) -> bytes:
    """Return all received bytes until the server closes the connection."""
    async with Served() as served:
        reader, writer = await served.connect()
        writer.write(content)
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        return answer


def parsed(answer: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),  # TLS
        (b"GET /v1/models HTTP/9.9\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"GET /v1/mod\xff\xfeels HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"CONNECT evil.example:80 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\n" + LARGE + b"\r\n", 431),
        (b"GET /v1/models HTTP/1.1\r\n" + LARGE, 431),
        (b"GET /" + b"a" * 3000, 431),
    ],
)
def test_the_parsers_refusals_are_json_with_an_id(content: bytes, status: int) -> None:
    found, headers, body = parsed(asyncio.run(said(content)))
    assert (found, headers["content-type"], headers["connection"]) == (status, "application/json", "close")
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["param"] == "request"
    assert headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    "content",
    [
        b"POST /v1/messages HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/messages?beta=true HTTP/1.1\r\n" + LARGE + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nanthropic-version: 2023-06-01\r\nhost: a\r\nbad header\r\n\r\n",
    ],
)
def test_under_anthropics_paths_they_have_its_shape(content: bytes) -> None:
    _, headers, body = parsed(asyncio.run(said(content)))
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == headers["request-id"]


@pytest.mark.parametrize("path", ["/now", "/later"])
@pytest.mark.parametrize(
    "second", [b"nonsense\r\n\r\n", b"GET /b HTTP/1.1\r\n" + LARGE + b"\r\n", b"GET /" + b"a" * 3000]
)
def test_a_refusal_is_no_part_of_another_answer(path: str, second: bytes) -> None:
    """The refused request follows one that is being answered: the connection closes without another answer."""

    async def both() -> bytes:
        async with Served() as served:
            reader, writer = await served.connect()
            writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
            await asyncio.wait_for(served.answering.acquire(), WAIT_S)
            writer.write(second)
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return answer

    answer = asyncio.run(both())
    assert b"error" not in answer and answer.count(b"HTTP/1.1") == (path == "/now")
