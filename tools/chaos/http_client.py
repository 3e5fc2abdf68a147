"""A process with several HTTP clients: `python -m tools.chaos.http_client FILE`, the counterpart of `client` (ZeroMQ).

FILE also has `url`. A client repeats a request with a key until its answer is complete, whichever process was killed.
The answer must come from one request, with each token and each piece of text once and in order. A request without a key
ends with its connection.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from .cases import Known
from .notes import ACCEPTED, ASKED, BROKEN, ENDED, FAULT, HTTP, LOST, REFUSED, Notes
from .tokenizer import decode

THINK_S = 0.3  # mean pause between two requests
AGAIN_S = 0.1
BUSY = (429, 503)
UNAVAILABLE = ("coordinator_unavailable", "unavailable", "deadline_exceeded")


@dataclass
class Received:
    """The received part of an answer.

    Attributes:
        tokens: received tokens.
        text: received text.
        reason: the finish reason, or "".
        at: token offset of the last event with text.
        broken: whether the answer violates the protocol.
        request_id: the request, once known.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    at: int = 0
    broken: bool = False
    request_id: int = 0


class RandomHttpClient:
    """A client, identified by its name."""

    def __init__(self, http: httpx.AsyncClient, options: dict[str, Any], known: Sequence[Known], name: str) -> None:
        self._http, self._known, self._name = http, known, name
        self._notes: Notes = options["notes"]
        self._model, self._wait_s = Path(options["model"]), options["wait_s"]
        self._rng = random.Random(name)
        self._asked = 0

    async def run(self, over: Callable[[], bool]) -> None:
        """Send requests until `over()` returns True; finish the current one first."""
        while not over():
            known = self._rng.choice(self._known)
            self._asked += 1
            name = f"{self._name}-{self._asked}"
            if self._rng.random() < 0.2:
                await self._without_key(known, name)
            else:
                self._ask(known, name, "key")
                await self._with_key(known, name, stream=self._rng.random() < 0.8)
            await asyncio.sleep(self._rng.expovariate(1 / THINK_S))

    async def resume_intents(self, before: Sequence[dict[str, Any]]) -> None:
        """Repeat the unfinished requests of a killed process from their start, because its received tokens are lost."""
        for intent in before:
            known = self._known[intent["case"]]
            self._ask(known, intent["name"], "key")
            await self._with_key(known, intent["name"], stream=True)

    def _ask(self, known: Known, name: str, how: str) -> None:
        self._notes.write(ASKED, name=name, case=known.case.number, turn=1, count=1, how=how)

    async def _with_key(self, known: Known, name: str, *, stream: bool) -> None:
        """Repeat a request until its answer is complete."""
        came, deadline = Received(), monotonic() + self._wait_s
        while not (came.reason or came.broken):
            if monotonic() > deadline:
                self._fault(f"{name} has not ended within {self._wait_s:g} s: received {len(came.tokens)} tokens")
                return
            headers = {"idempotency-key": name} | ({"last-event-id": str(came.at)} if came.at else {})
            try:
                await self._once(known, name, came, headers, stream=stream)
            except httpx.TransportError:
                await asyncio.sleep(AGAIN_S)
        self._compare(known, name, came)

    async def _without_key(self, known: Known, name: str) -> None:
        self._ask(known, name, HTTP)
        came = Received()
        try:
            await self._once(known, name, came, {}, stream=True)
        except httpx.TransportError as error:
            self._lost(came, str(error))
            return
        if not came.reason and not came.broken:
            self._lost(came, "gateway busy or without a coordinator")
            return
        self._compare(known, name, came)

    def _lost(self, came: Received, message: str) -> None:
        which = {"id": came.request_id} if came.request_id else {}
        self._notes.write(BROKEN, code=LOST, message=message, **which)

    async def _once(self, known: Known, name: str, came: Received, headers: dict[str, str], *, stream: bool) -> None:
        """Make one call; raise httpx.TransportError if the connection breaks."""
        case = known.case
        body = {
            **case.sampling,
            "prompt": case.prompt,
            "max_tokens": case.max_tokens,
            "stream": stream,
            "return_token_ids": True,
        }
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code in BUSY:
                await response.aread()
                await asyncio.sleep(AGAIN_S)
                return
            if response.status_code != httpx.codes.OK:
                error = json.loads(await response.aread())["error"]
                self._notes.write(REFUSED, name=name, code=error["code"], message=error["message"])
                came.broken = True
                return
            came.request_id = int(response.headers["x-request-id"])
            self._notes.write(ACCEPTED, name=name, ids=[came.request_id])
            if not stream:
                self._receive(known, name, came, json.loads(await response.aread()))
                return
            async for at, event in _events(response):
                if "error" in event:
                    if event["error"]["code"] not in UNAVAILABLE:
                        self._notes.write(BROKEN, id=came.request_id, **_error_facts(event["error"]))
                        came.broken = True
                    return
                self._receive(known, name, came, event)
                came.at = at

    def _receive(self, known: Known, name: str, came: Received, document: dict[str, Any]) -> None:
        for choice in document["choices"]:
            came.tokens += choice["token_ids"]
            came.text += choice["text"]
            came.reason = choice["finish_reason"] or ""
        due = known.answers[0].tokens[: len(came.tokens)]
        if tuple(came.tokens) != due:
            self._fault(f"{name} (request {came.request_id}) has {came.tokens}, expected {due}")

    def _compare(self, known: Known, name: str, came: Received) -> None:
        if came.broken:
            return
        answer = known.answers[0]
        if tuple(came.tokens) != answer.tokens:
            self._fault(f"{name} (request {came.request_id}) ended with {came.tokens}, expected {answer.tokens}")
        if came.text != (due := decode(self._model, answer.tokens)):
            self._fault(f"{name} (request {came.request_id}) reads {came.text!r}, expected {due!r}")
        if (came.reason == "length") != (answer.reason == "length"):
            self._fault(f"{name} (request {came.request_id}) ended by {came.reason}, expected {answer.reason}")
        self._notes.write(ENDED, id=came.request_id, reason=answer.reason, tokens=len(came.tokens))

    def _fault(self, what: str) -> None:
        self._notes.write(FAULT, what=f"{self._name}: {what}")


def _error_facts(error: dict[str, Any]) -> dict[str, Any]:
    return {"code": error["code"], "message": error["message"]}


async def _events(response: httpx.Response) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Yield the events of a stream: the answer's token count after the event, and its document.

    Incomplete events are dropped.
    """
    at, data = 0, ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            at = int(line[4:])
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            if data != "[DONE]":
                yield at, json.loads(data)
            data = ""


async def run(options: dict[str, Any]) -> None:
    """Run all clients until standard input closes."""
    known = [Known.of_json(value) for value in json.loads(Path(options["cases"]).read_text())]
    options["notes"] = Notes(Path(options["notes"]))
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _end, over)
    async with httpx.AsyncClient(base_url=options["url"], timeout=options["wait_s"]) as http:
        clients = [
            RandomHttpClient(http, options, known, f"{options['name']}-{at}") for at in range(options["clients"])
        ]
        await clients[0].resume_intents(options["before"])
        await asyncio.gather(*(client.run(over.is_set) for client in clients))


def _end(over: asyncio.Event) -> None:
    over.set()
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))
