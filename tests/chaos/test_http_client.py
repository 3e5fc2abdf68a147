"""The HTTP clients of a chaos run detect a gateway's errors, and resume after the last event that arrived."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.chaos.cases import Answer, Case, Known
from tools.chaos.http_client import RandomHttpClient
from tools.chaos.notes import LOST, ClientNotes, Notes
from tools.chaos.tokenizer import decode, write

TOKENS = (40, 70, 201, 71)
KNOWN = Known(Case(0, (5,), {"temperature": 0.0}, 4, (), 9), (Answer(TOKENS, "length"),), Answer((), "length"))
Handler = Callable[[httpx.Request], httpx.Response]


class Broken(httpx.AsyncByteStream):
    """A response body that breaks the connection at its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body
        raise httpx.ReadError("reset")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def event(model: Path, start: int, end: int, tokens: tuple[int, ...] = TOKENS) -> bytes:
    """Return the gateway's event for tokens [start, end): complete text, and a finish reason at the end."""
    text = decode(model, tokens[:end]).removeprefix(decode(model, tokens[:start]))
    reason = "length" if end == len(TOKENS) else None
    choice = {"token_ids": tokens[start:end], "text": text, "finish_reason": reason}
    return b"id: %d\ndata: %b\n\n" % (end, json.dumps({"choices": [choice]}).encode())


def story(model: Path, handler: Handler, *, key: bool = True) -> ClientNotes:
    """Return the notes of a client for one request."""
    notes = Notes(model / "notes")

    async def ask() -> None:
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as http:
            options: dict[str, Any] = {"notes": notes, "model": str(model), "wait_s": 5.0}
            web = RandomHttpClient(http, options, [KNOWN], "h0-0")
            if key:
                web._ask(KNOWN, "a", "key")
                await web._with_key(KNOWN, "a", stream=True)
            else:
                await web._without_key(KNOWN, "a")

    asyncio.run(ask())
    notes.close()
    return ClientNotes.of("h0", model / "notes")


def answers(*bodies: bytes | httpx.AsyncByteStream, asked: list[str] | None = None) -> Handler:
    """Return a handler that gives one answer after the other; `asked` collects the resume position of each."""
    left = list(bodies)

    def answer(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(request.headers.get("last-event-id", ""))
        body = left.pop(0)
        given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"stream": body}
        return httpx.Response(200, headers={"x-request-id": "7"}, **given)

    return answer


def test_an_answer_that_breaks_off_is_gone_on_with_behind_its_last_whole_event(model: Path) -> None:
    asked: list[str] = []
    broken = Broken(event(model, 0, 2) + event(model, 2, 3)[:-1])
    told = story(model, answers(broken, event(model, 2, 4), asked=asked))
    assert asked == ["", "2"]
    assert (told.faults, told.broken) == ([], [])
    assert (told.ended[7]["reason"], told.ended[7]["tokens"]) == ("length", 4)


@pytest.mark.parametrize(
    ("second", "words"),
    [(slice(1, 4), "expected"), (slice(3, 4), "expected")],
    ids=["a duplicate token", "a missing token"],
)
def test_what_comes_twice_or_not_is_a_fault(model: Path, second: slice, words: str) -> None:
    told = story(model, answers(Broken(event(model, 0, 2)), event(model, second.start, second.stop)))
    assert told.faults and words in told.faults[0]


def test_another_text_is_a_fault(model: Path) -> None:
    wrong = event(model, 0, 4).replace(decode(model, TOKENS[:1]).encode(), b"~", 1)
    assert ["reads" in fault for fault in story(model, answers(wrong)).faults] == [True]


def test_without_a_key_a_lost_connection_is_the_end(model: Path) -> None:
    told = story(model, answers(Broken(event(model, 0, 2))), key=False)
    assert [(note["code"], note["id"]) for note in told.broken] == [(LOST, 7)]
    assert (told.faults, told.ended) == ([], {})
