"""A client's view of requests cut off by the gateway's exit, and of waiting requests."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from starlette.types import Message

from kvforge.gateway.config import Settings
from tests.gateway.scripted import Script, application, client

ASKED = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"model": "other", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.parametrize("path", ASKED)
def test_who_is_cut_off_before_an_answer_began_is_told_to_ask_again(path: str) -> None:
    """uvicorn cancels its task, and would answer 500 with two words of plain text."""
    script = Script([""], hang=True)

    async def test() -> httpx.Response:
        async with client(application(script)) as http:
            asking = asyncio.create_task(http.post(path, json=ASKED[path]))
            while not script.asked:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert not asking.done()
            asking.cancel()
            return await asking

    response = asyncio.run(test())
    assert response.status_code == 503 and "the gateway is shutting down" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) > 0
    assert script.cancelled, "the request has no reader and must be cancelled"


@pytest.mark.parametrize("path", [*ASKED, "/v1/responses"])
def test_a_stream_that_is_cut_off_ends_with_an_error_event(path: str) -> None:
    script = Script(["Once upon a time"], hang=True)
    body = {**ASKED.get(path, {"input": "Hi"}), "stream": True}

    async def test() -> httpx.Response:
        async with client(application(script)) as http:
            asking = asyncio.create_task(http.post(path, json=body))
            while not script.given:
                await asyncio.sleep(0)
            asking.cancel()
            return await asking

    response = asyncio.run(test())
    assert response.status_code == 200
    *_, last = response.text.strip().split("\n\n")
    assert "error" in last and "drain_s is over" in last, response.text
    assert script.cancelled, "it has no reader any more"


@pytest.mark.parametrize(
    ("path", "sign"),
    [
        ("/v1/completions", b": ping\n\n"),
        ("/v1/chat/completions", b": ping\n\n"),
        ("/v1/messages", b'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
def test_a_stream_is_not_silent_for_longer_than_ping_s(path: str, sign: bytes) -> None:
    """The script sends nothing, so only pings arrive."""
    script, pings = Script([""], hang=True), 3
    app = application(script, Settings(ping_s=0.01))
    body = json.dumps({**ASKED[path], "stream": True}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}

    async def test() -> bytes:
        came, enough, asked = b"", asyncio.Event(), iter([{"type": "http.request", "body": body}])

        async def receive() -> Message:
            for message in asked:
                return message
            await asyncio.Event().wait()
            raise AssertionError("waits for ever")

        async def send(message: Message) -> None:
            nonlocal came
            came += message.get("body", b"")
            if came.count(sign) >= pings:
                enough.set()

        serving = asyncio.ensure_future(app({**scope, "headers": headers}, receive, send))
        try:
            async with asyncio.timeout(60):
                await enough.wait()
        finally:
            serving.cancel()
            await serving
        return came

    assert asyncio.run(test()).count(sign) >= pings
