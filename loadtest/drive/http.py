"""The target for any OpenAI-compatible server: streamed completions or chats over HTTP/1.1."""

from __future__ import annotations

import os
import ssl
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from kvforge.loadtest.load.texts import Encode
from kvforge.protocol.errors import InvalidRequest

from .http_answer import Answer
from .http_pool import Exchange, Pool
from .http_wire import Address, encode, httptools, many_files, token_ids
from .http_word_map import WordMap
from .outcome import RUNNING, Outcome
from .target import TargetRequest

COMPLETIONS, CHAT = APIS = ("completions", "chat")
TOKENS, TEXT = PROMPTS_AS = ("tokens", "text")
ROLES = ("user", "assistant")
PATHS = {COMPLETIONS: "/completions", CHAT: "/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How to talk to the server.

    Attributes:
        url: http(s)://HOST:PORT/v1.
        model: The server's name of the model.
        api: One of APIS.
        prompt_as: One of PROMPTS_AS; a chat is always text.
        extra: Use common extensions of OpenAI's API: ignore_eos, and token counts in each event. Without them an answer
            may end early.
        token_ids: Request the token ids of an answer (vLLM) if prompts are token ids and the session continues with it.
        vocab: The token ids of the load are below it.
        clients: As in `TargetRequest.client`.
        connections: How many spare connections each client keeps open.
    """

    url: str
    model: str
    api: str = COMPLETIONS
    prompt_as: str = TOKENS
    extra: bool = True
    token_ids: bool = False
    vocab: int = 32_000
    clients: int = 1
    connections: int = 4

    def __post_init__(self) -> None:
        """Validate the options. Raises InvalidRequest."""
        if self.api not in APIS:
            raise InvalidRequest("api", f"is {self.api!r}; it must be one of {', '.join(APIS)}")
        if self.prompt_as not in PROMPTS_AS:
            raise InvalidRequest("prompt_as", f"is {self.prompt_as!r}; it must be one of {', '.join(PROMPTS_AS)}")
        if not self.model:
            raise InvalidRequest("model", "is empty: name the server's model")
        for name in ("clients", "connections"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"is {getattr(self, name)}; it must be at least 1")


class HttpTarget:
    """A `Target` for a server over HTTP. The API key comes from the environment variable OPENAI_API_KEY, if set.

    Args:
        options: How to talk to the server.
        encode: A tokenizer without special tokens, for answers that are text.

    Raises:
        InvalidRequest: An option is invalid.
        Unavailable: The extra `loadtest` is not installed.
    """

    def __init__(self, options: HttpOptions, encode: Encode | None = None) -> None:

        httptools()  # fail now if it is missing, not at the first request
        address, key = Address.parse(options.url), os.environ.get("OPENAI_API_KEY", "")
        head = address.head("POST", PATHS[options.api], key)
        self._head = head + b"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        self._chat, self._text = options.api == CHAT, options.api == CHAT or options.prompt_as == TEXT
        self._words = WordMap(options.vocab, encode)
        self._address, self._whole, self._ids = address, options.extra, options.token_ids
        usage: dict[str, bool] = {"include_usage": True}
        self._fixed: dict[str, Any] = {"model": options.model, "stream": True, "stream_options": usage}
        if options.extra:
            usage["continuous_usage_stats"] = True
            self._fixed["ignore_eos"] = True
        if not self._text:
            token_ids(np.zeros(1, np.int32))  # builds its table
        tls = ssl.create_default_context() if address.tls else None
        self._pools = [Pool(address, tls, options.connections) for _ in range(options.clients)]

    async def open(self) -> None:
        """Open the spare connections. Raises Unavailable."""
        many_files()
        try:
            for pool in self._pools:
                await pool.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Cancel what is in flight and close all connections."""
        for pool in self._pools:
            await pool.close()

    def send(
        self, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
    ) -> Callable[[], None]:
        """Send a request; see `Target`."""
        pool = self._pools[ask.client % len(self._pools)]
        outcome.state, outcome.sent_s = RUNNING, monotonic() - start
        outcome.prompt_tokens, outcome.asked_tokens = len(ask.prompt), ask.output_tokens
        answer = Answer(outcome, start, whole=self._whole, held=self._held if ask.followed else None)
        exchange = Exchange(pool, self._request(ask), answer, outcome, start, ended)
        exchange.until(ask.until)
        pool.send(exchange)
        return exchange.give_up

    def _held(self, outcome: Outcome, text: str) -> None:
        """Keep an answer for the next turn of its session."""
        outcome.answer = text
        if self._text:
            outcome.tokens = array("i", self._words.of_answer(text))
        elif not outcome.tokens:
            tokens, outcome.stood_in = self._words.ids(text, len(outcome.tokens_s))
            outcome.tokens = array("i", tokens)

    def _request(self, ask: TargetRequest) -> bytes:
        body = self._fixed | {"max_tokens": ask.output_tokens, "temperature": ask.temperature, "seed": ask.seed}
        if not self._text:
            body["prompt"] = token_ids(ask.prompt)
            if self._ids and ask.followed:
                body["return_token_ids"] = True
        else:
            pairs = [*ask.history, (ask.text, "")] if ask.text else [(self._words.text(ask.prompt), "")]
            if self._chat:
                turns = [(role, words) for pair in pairs for role, words in zip(ROLES, pair, strict=True)]
                body["messages"] = [{"role": role, "content": words} for role, words in turns[:-1]]
            else:
                body["prompt"] = "".join(words for pair in pairs for words in pair)
        content = encode(body)
        return b"%b%d\r\n\r\n%b" % (self._head, len(content), content)
