"""The HTTP target against servers of every kind: each request ends once, and connections are reused if possible."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvforge.loadtest.drive import http_connection, http_wire
from kvforge.loadtest.drive.driver_check import null_server
from kvforge.loadtest.drive.http import HttpOptions, HttpTarget
from kvforge.loadtest.drive.http_word_map import WordMap
from kvforge.loadtest.drive.outcome import FAILED, FINISHED, INTERRUPTED, REFUSED, TIMED_OUT
from kvforge.loadtest.drive.spec import HTTP
from kvforge.process.installation import install_command
from kvforge.protocol.errors import InvalidRequest, Unavailable

from .raw_http import DONE, PROMPT, Engine, answering, chunked, driving, in_order, request_of, serving, stream, whole

GOOD = chunked(stream(3))


Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test's coroutine on either event loop, and check that no task is left."""

    def runs(body: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            await body()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        factory = uvloop.new_event_loop if request.param == "uvloop" else None
        with asyncio.Runner(debug=True, loop_factory=factory) as runner:
            runner.run(main())

    return runs


def test_a_request_and_what_is_noted_of_its_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen: list[tuple[bytes, Any]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_of(reader))
        writer.write(GOOD)

    async def body() -> None:
        async with serving(handle) as url, driving(url) as engine:
            outcome = await engine.one()
            assert (outcome.state, outcome.code, len(outcome.tokens_s)) == (FINISHED, "", 3)
            assert (outcome.prompt_tokens, outcome.asked_tokens, outcome.cached_tokens) == (3, 3, 2)
            assert in_order(outcome)
            assert outcome.ended_s <= engine.now_s()

    run(body)
    head, asked = seen[0]
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer secret\r\n" in head
    assert asked == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 3,
        "temperature": 0.0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
    }


def test_chats_are_text_and_nothing_extra_is_sent_where_that_is_asked(run: Run) -> None:
    seen: list[tuple[bytes, Any]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_of(reader))
        writer.write(GOOD)

    async def body() -> None:
        async with serving(handle) as url, driving(url, api="chat", extra=False) as engine:
            assert (await engine.one(text="hello")).state == FINISHED
            assert (await engine.one()).state == FINISHED
            engine.send()
            engine.cancel()  # before it is sent
            assert [end.state for end in engine.ends] == [FINISHED, FINISHED, INTERRUPTED]

    run(body)
    (head, asked), (_, other) = seen[:2]
    # For a server that takes text, each token id is always the same word.
    assert other["messages"] == [{"role": "user", "content": WordMap(1).text(PROMPT)}]
    assert head.startswith(b"POST /v1/chat/completions ")
    assert b"Authorization" not in head
    assert asked["messages"] == [{"role": "user", "content": "hello"}]
    assert not {"prompt", "ignore_eos", "return_token_ids"} & set(asked)
    assert asked["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("response", [GOOD, chunked(*stream(3).splitlines(True)), whole("200 OK", stream(3))])
def test_a_response_split_at_any_byte_and_its_connection_serves_again(run: Run, response: bytes) -> None:
    connections = at = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, at
        connections += 1
        while True:
            await request_of(reader)
            cut, at = at, at + 1
            writer.write(response[:cut])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writer.write(response[cut:])

    async def body() -> None:
        async with serving(handle) as url, driving(url) as engine:
            for _ in range(len(response)):
                outcome = await engine.one()
                assert (outcome.state, len(outcome.tokens_s)) == (FINISHED, 3), outcome

    run(body)
    assert connections <= 2  # including the one opened in advance
    assert at == len(response)


BROKEN = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nxx",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "cut in its head": GOOD[:30],
    "cut in its body": GOOD[:200],
    "cut before its end": GOOD.removesuffix(b"0\r\n\r\n").replace(DONE, b"data: [DO\n\n\n\n"),
    "nothing": b"",
    "no stream": whole("200 OK", b'{"id": "1", "choices": [{"text": "all at once"}]}'),
    "HTML": whole("500 Internal Server Error", b"<html><h1>It is not our fault.</h1></html>"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_answer_fails_its_request_alone(run: Run, what: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(BROKEN[what] if bad else GOOD)

    async def body() -> None:
        nonlocal bad
        async with serving(handle) as url, driving(url) as engine:
            outcome = await engine.one()
            assert outcome.state == FAILED, outcome
            assert outcome.code
            assert outcome.message
            assert in_order(outcome)
            bad = False
            assert (await engine.one()).state == FINISHED

    bad = True
    run(body)


def test_a_reset_in_mid_stream(run: Run) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(GOOD[:150])
        await writer.drain()
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def body() -> None:
        async with serving(handle) as url, driving(url) as engine:
            outcome = await engine.one()
            assert (outcome.state, outcome.code) == (FAILED, "connection_lost")

    run(body)


def test_junk_after_an_answer_is_never_taken_for_the_next_one(run: Run) -> None:
    junk = [chunked(stream(3)), b"HTTP/1.1 200 OK\r\n", b"\x00\x01junk", b"0\r\n\r\n"]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await request_of(reader)
        served += 1
        writer.write(GOOD + junk[served % len(junk)])
        await request_of(reader)
        raise AssertionError("the connection was used again")

    async def body() -> None:
        async with serving(handle) as url, driving(url) as engine:
            for _ in range(2 * len(junk)):
                assert (await engine.one()).state == FINISHED
            assert served == 2 * len(junk)

    served = 0
    run(body)


def test_bytes_that_nobody_asked_for_close_the_connection(run: Run) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            writer.write(GOOD)
            assert await reader.read() == b""
            closed.set()
        await answering([GOOD])(reader, writer)

    async def body() -> None:
        nonlocal closed
        closed = asyncio.Event()
        async with serving(handle) as url, driving(url) as engine:
            await closed.wait()
            assert (await engine.one()).state == FINISHED

    connections, closed = 0, asyncio.Event()
    run(body)


def test_headers_without_an_end_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "UNREAD_BYTES_MAX", 10_000)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X-Header: " + b"x" * 500 + b"\r\n")
            await writer.drain()

    async def body() -> None:
        async with serving(handle) as url, driving(url) as engine:
            outcome = await engine.one()
            assert (outcome.state, outcome.code) == (FAILED, "connection_lost")
            assert "headers" in outcome.message

    run(body)


@pytest.mark.parametrize("sent", [b"", GOOD[:20], GOOD[:200]])
def test_out_of_time_and_given_up_close_the_connection(run: Run, sent: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(sent)
        reached.set()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""  # the close cancels the request
        left.release()

    async def body() -> None:
        nonlocal left, reached
        left, reached = asyncio.Semaphore(0), asyncio.Event()
        async with serving(handle) as url, driving(url) as engine:
            outcome = await engine.one(timeout_s=0.05)
            assert (outcome.state, outcome.code) == (TIMED_OUT, "deadline_exceeded")
            await left.acquire()
            reached.clear()
            outcome = engine.send()
            await reached.wait()
            engine.cancel()
            assert outcome.state == INTERRUPTED
            engine.cancel()
            await left.acquire()
            assert len(engine.ends) == 2

    left, reached = asyncio.Semaphore(0), asyncio.Event()
    run(body)


def test_closing_gives_up_what_is_under_way(run: Run) -> None:
    async def body() -> None:
        async with serving(answering([GOOD[:100]])) as url, driving(url, clients=2) as engine:
            outcomes = [engine.send(client=i) for i in range(5)]
            await engine.target.close()
            assert [outcome.state for outcome in outcomes] == [INTERRUPTED] * 5

    run(body)


def test_an_answer_ends_with_done_though_the_response_does_not(run: Run) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await request_of(reader)
            writer.write(GOOD.removesuffix(b"0\r\n\r\n"))
            if connections == 2:
                await more.wait()
                writer.write(b"0\r\n\r\n")

    async def body() -> None:
        nonlocal more
        more = asyncio.Event()
        async with serving(handle) as url, driving(url) as engine:
            assert (await engine.one()).state == FINISHED
            assert (await engine.one()).state == FINISHED  # on another connection: the first one may still receive data
            more.set()
            assert connections == 2

    connections, more = 0, asyncio.Event()
    run(body)


@pytest.mark.parametrize("pauses", range(8))
def test_connections_that_a_server_closes_after_an_answer_cost_a_request_nothing(run: Run, pauses: int) -> None:
    """As llama.cpp's server does after an answer of more than 5 s, in spite of keep-alive."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await request_of(reader)
        requests += 1
        if requests == 1:
            await lost.wait()
            for _ in range(pauses):
                await asyncio.sleep(0)
            writer.write(GOOD)
        elif requests == 2:
            lost.set()
        else:
            writer.write(GOOD)
            await answering([GOOD])(reader, writer)

    async def body() -> None:
        async with serving(handle) as url, driving(url, connections=2) as engine:
            outcomes = [engine.send(), engine.send()]
            await engine.ended(2)
            assert [outcome.state for outcome in outcomes] == [FINISHED] * 2

    requests, lost = 0, asyncio.Event()
    run(body)


def test_a_connection_that_the_server_closed_meanwhile_costs_a_request_nothing(run: Run) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(GOOD)
        await request_of(reader)  # and closes without an answer

    async def body() -> None:
        async with serving(handle) as url, driving(url) as engine:
            for _ in range(4):
                assert (await engine.one()).state == FINISHED

    run(body)


def test_connections_are_made_ahead_and_not_without_end(run: Run) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answering([GOOD])(reader, writer)

    async def body() -> None:
        async with serving(handle) as url, driving(url.replace("127.0.0.1", "localhost"), connections=2) as engine:
            for _ in range(10):
                for _ in range(6):
                    engine.send()
                await engine.ended(len(engine.ends) + 6)
            assert all(end.state == FINISHED for end in engine.ends)

    connections = 0
    run(body)
    assert 6 <= connections <= 8


def test_refusals_keep_the_connection(run: Run) -> None:
    busy = whole("429 Too Many Requests", b'{"error": {"message": "later", "code": 429}}')

    async def body() -> None:
        async with serving(answering([busy])) as url, driving(url) as engine:
            for _ in range(3):
                outcome = await engine.one()
                assert (outcome.state, outcome.code, outcome.message) == (REFUSED, "http_429", "later")
                assert outcome.accepted_s == -1.0

    run(body)


def test_a_server_that_is_gone(run: Run) -> None:
    async def body() -> None:
        async with serving(answering([GOOD], close=True)) as url, driving(url) as engine:
            assert (await engine.one()).state == FINISHED
            gone = url
        target = HttpTarget(HttpOptions(url=gone, model="m"))
        with pytest.raises(Unavailable, match="cannot connect"):
            await target.open()
        outcome = await Engine(target).one()
        assert (outcome.state, outcome.code) == (FAILED, "unavailable")
        await target.close()

    run(body)


def test_the_null_server_at_once_and_at_a_pace(run: Run) -> None:
    async def at_once() -> None:
        async with null_server(HTTP) as url, driving(url, token_ids=True, clients=3) as engine:
            for i in range(100):
                engine.send(1 + i % 5, client=i, followed=True)
            await engine.ended(100)
            assert all(end.state == FINISHED and len(end.tokens) == end.asked_tokens for end in engine.ends)
        async with null_server(HTTP) as url, driving(url, api="chat") as engine:
            outcome = await engine.one(4, text="hello")
            assert (outcome.state, len(outcome.tokens_s), outcome.message) == (FINISHED, 4, "")
            assert (await engine.one(1 << 20, text="hello")).code == "http_400"

    async def at_a_pace() -> None:
        async with null_server(HTTP, 500.0, "--first-ms", "10") as url, driving(url) as engine:
            outcomes = [engine.send(5) for _ in range(20)]
            await engine.ended(20)
        for outcome in outcomes:
            assert (outcome.state, len(outcome.tokens_s), outcome.prompt_tokens) == (FINISHED, 5, 3)
            assert outcome.tokens_s[-1] - outcome.sent_s >= 0.018  # 10 ms, then four times 2 ms, at least

    run(at_once)
    run(at_a_pace)


def test_tls(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run([*command.split(), *names], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate with")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def body() -> None:
        async with serving(answering([GOOD]), ssl=context) as url:
            target = HttpTarget(HttpOptions(url=url.replace("http:", "https:"), model="m"))
            with pytest.raises(Unavailable, match="certificate"):
                await target.open()
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            async with driving(url.replace("http:", "https:")) as engine:
                assert [(await engine.one()).state for _ in range(3)] == [FINISHED] * 3

    run(body)


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://host/v1", "http://", "http://host:99999/v1", "http://me:pw@host/v1", "http://h/v1?a=1"],
)
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        HttpTarget(HttpOptions(url=url, model="m"))


def test_addresses() -> None:
    assert str(http_wire.Address.parse("http://host:8000")) == "http://host:8000/v1"
    assert str(http_wire.Address.parse("https://host/a/v1/")) == "https://host:443/a/v1"
    assert http_wire.Address.parse("http://[::1]:8/v1").head("GET", "/models", "") == (
        b"GET /v1/models HTTP/1.1\r\nHost: [::1]:8\r\n"
    )
    with pytest.raises(InvalidRequest, match="OPENAI_API_KEY"):
        http_wire.Address.parse("http://host").head("GET", "/models", "a\r\nX: y")


def test_without_httptools_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    with pytest.raises(Unavailable, match=re.escape(install_command("loadtest"))):
        HttpTarget(HttpOptions(url="http://host/v1", model="m"))
