"""The gateway's application on a real socket, with scripted answers and a record of every request.

The server runs in a thread of the test's process, so that a test sets the answers and reads the record directly.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvforge.gateway.config import Settings
from kvforge.gateway.serve.protocol import protocol_of
from kvforge.gateway.storage.inline import InlineStorage
from kvforge.launch.listener import listening, url_of
from tests.gateway.scripted import Script, application

CONTEXT = 1 << 20  # a token is a byte here, and the system prompt of a coding agent has 100 KB
START_S, END_S = 20.0, 20.0
RESULT = "<|im_start|>tool\n"
IGNORED_HEADER = "x-kvforge-ignored"
# The answer to an agent's side requests: a title for the session, a summary.
ASIDE = "A greeting"
# Prepended to an answer if the prompt ends within the reasoning.
THOUGHT = "I think about it."
# The exchange that the running code belongs to, also what it leaves running.
_current: ContextVar[Exchange] = ContextVar("exchange")
# A text, or a function from the prompt to the text.
Answer = str | Callable[[str], str]


@dataclass
class Exchange:
    """A request, and the response to it. answers: the texts that the model gave."""

    method: str
    path: str
    query: str = ""
    asked_headers: dict[str, str] = field(default_factory=dict)
    asked: Any = None
    answers: list[str] = field(default_factory=list)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answered: bytes = b""

    @property
    def streamed(self) -> bool:
        """Return whether the response was a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def __str__(self) -> str:
        return f"{self.method} {self.path}: {self.status} {self.answered[:400].decode(errors='replace')}"


class Recorder:
    """An application that records its exchanges."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward and record everything."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = {name.decode(): value.decode() for name, value in scope["headers"]}
        exchange = Exchange(scope["method"], scope["path"], scope["query_string"].decode(), asked)
        self.exchanges.append(exchange)
        _current.set(exchange)
        body = bytearray()

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    exchange.asked = json.loads(body) if body else None
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                exchange.answered += message.get("body", b"")
            await send(message)

        await self._app(scope, received, sent)


class Play:
    """Writes the answer to each prompt.

    scenes: the answers by task text, in turn: the first to the task itself, the next to the prompt with one more tool
    result. The last task in a prompt counts. A prompt without a task is answered by `ASIDE`. result: prefix of a tool
    result in a prompt.
    """

    def __init__(self, scenes: Mapping[str, Sequence[Answer]], result: str = RESULT) -> None:
        self._scenes, self._result = scenes, result
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        """The answer."""
        text = self._answer(prompt)
        _current.get().answers.append(text)
        return text

    def _answer(self, prompt: str) -> str:
        self.prompts.append(prompt)
        at, task = max((prompt.rfind(task), task) for task in self._scenes)
        if at < 0:
            return ASIDE
        answers = self._scenes[task]
        answer = answers[min(prompt.count(self._result, at), len(answers) - 1)]
        text = answer if isinstance(answer, str) else answer(prompt)
        return f"{THOUGHT}\n</think>\n{text}" if prompt.endswith("<think>\n") else text

    def results(self, pattern: str) -> bool:
        """Return whether a matching tool result was in a prompt."""
        return any(re.search(pattern, text) for prompt in self.prompts for text in prompt.split(self._result)[1:])


class Stage:
    """The server; it ends with the `with` block.

    Attributes:
        script: The model's answers.
        url: The gateway's address.
        proxy: A proxy that refuses everything, which keeps clients from the network.
        outside: Requests of clients to the proxy since `play`.
    """

    def __init__(self) -> None:
        self.script = Script()
        self._folder = tempfile.TemporaryDirectory(prefix="kvforge-stage-")
        self._storage = InlineStorage(f"sqlite:{self._folder.name}/stored.sqlite")
        app = application(self.script, Settings(), context=CONTEXT, storage=self._storage)
        self._recorder = Recorder(app)
        self._socket = listening("127.0.0.1", 0)
        self._refusing = listening("127.0.0.1", 0)
        self.url, self.proxy = url_of("127.0.0.1", self._socket), url_of("127.0.0.1", self._refusing)
        self.outside: list[str] = []
        config = uvicorn.Config(
            self._recorder,
            http=protocol_of(Settings()),
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="stage", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(START_S), "the scripted gateway did not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join(END_S)
        self._socket.close()
        self._refusing.close()
        self._folder.cleanup()
        assert not self._thread.is_alive(), "the scripted gateway did not end"

    def play(self, scenes: Mapping[str, Sequence[Answer]], result: str = RESULT) -> Play:
        """Answer by these scenes from now on (see `Play`), and clear the record."""
        play = Play(scenes, result)
        self.script.reply = play
        self.script.asked.clear()
        self._recorder.exchanges.clear()
        self.outside.clear()
        return play

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchanges since `play`."""
        return self._recorder.exchanges

    def refused(self, *, but: Sequence[str] = ()) -> list[str]:
        """Return the exchanges with an error status. but: `METHOD PATH` of expected ones."""
        return [
            str(exchange)
            for exchange in self.exchanges
            if exchange.status >= 400 and f"{exchange.method} {exchange.path}" not in but
        ]

    def _serve(self) -> None:
        async def main() -> None:
            serving = asyncio.ensure_future(self._server.serve([self._socket]))
            async with await asyncio.start_server(self._refuse, sock=self._refusing):
                while not self._server.started and not serving.done():
                    await asyncio.sleep(0.01)
                self._started.set()
                await serving
            await self._storage.close()

        asyncio.run(main())

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ValueError):
            self.outside.append((await reader.readline()).decode(errors="replace").strip())
            writer.write(b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        writer.close()


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
