"""A target for any OpenAI-compatible server: streamed completions or chats over HTTP/1.1."""

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
from .http_words import Words
from .outcome import RUNNING, Outcome
from .target import Ask

COMPLETIONS, CHAT = APIS = ("completions", "chat")
TOKENS, TEXT = PROMPTS_AS = ("tokens", "text")
ROLES = ("user", "assistant")
PATHS = {COMPLETIONS: "/completions", CHAT: "/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """url: http(s)://HOST:PORT/v1. model: as the server calls it. api: one of APIS.

    prompt_as: one of PROMPTS_AS; a chat is text. extra: with what OpenAI's API does not know and many servers do:
    ignore_eos, and a count of tokens in each event; without, an answer may end when the model wants. token_ids: asks
    for the ids of an answer (vLLM) where token ids are sent and the session goes on with it. vocab: the load's token
    ids are below it. clients: as in `Ask.client`. connections: so many of each client are made ahead of its next
    requests.
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
        """Raises InvalidRequest."""
        if self.api not in APIS:
            raise InvalidRequest("api", f"is {self.api!r}; it must be one of {', '.join(APIS)}")
        if self.prompt_as not in PROMPTS_AS:
            raise InvalidRequest("prompt_as", f"is {self.prompt_as!r}; it must be one of {', '.join(PROMPTS_AS)}")
        if not self.model:
            raise InvalidRequest("model", "is empty: name what the server serves")
        for name in ("clients", "connections"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"is {getattr(self, name)}; it must be at least 1")


class HttpTarget:
    """A `Target`. The key of the environment's OPENAI_API_KEY is sent, if there is one.

    Raises InvalidRequest; Unavailable without the extra `loadtest`.
    """

    def __init__(self, options: HttpOptions, encode: Encode | None = None) -> None:
        """encode: a tokenizer without special tokens, for answers that are text."""
        httptools()  # known to be missing now, not at the first request
        address, key = Address.parse(options.url), os.environ.get("OPENAI_API_KEY", "")
        head = address.head("POST", PATHS[options.api], key)
        self._head = head + b"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        self._chat, self._text = options.api == CHAT, options.api == CHAT or options.prompt_as == TEXT
        self._words = Words(options.vocab, encode)
        self._address, self._whole, self._ids = address, options.extra, options.token_ids
        usage: dict[str, bool] = {"include_usage": True}
        self._fixed: dict[str, Any] = {"model": options.model, "stream": True, "stream_options": usage}
        if options.extra:
            usage["continuous_usage_stats"] = True
            self._fixed["ignore_eos"] = True
        if not self._text:
            token_ids(np.zeros(1, np.int32))  # which makes its table
        tls = ssl.create_default_context() if address.tls else None
        self._pools = [Pool(address, tls, options.connections) for _ in range(options.clients)]

    async def open(self) -> None:
        """Connects. Raises Unavailable."""
        many_files()
        try:
            for pool in self._pools:
                await pool.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Gives up what is under way, and closes all connections."""
        for pool in self._pools:
            await pool.close()

    def send(self, ask: Ask, outcome: Outcome, start: float, ended: Callable[[Outcome], None]) -> Callable[[], None]:
        """See `Target`."""
        pool = self._pools[ask.client % len(self._pools)]
        outcome.state, outcome.sent_s = RUNNING, monotonic() - start
        outcome.prompt_tokens, outcome.asked_tokens = len(ask.prompt), ask.output_tokens
        answer = Answer(outcome, start, whole=self._whole, held=self._held if ask.followed else None)
        exchange = Exchange(pool, self._request(ask), answer, outcome, start, ended)
        exchange.until(ask.until)
        pool.send(exchange)
        return exchange.give_up

    def _held(self, outcome: Outcome, text: str) -> None:
        """An answer that the next turn of its session holds."""
        outcome.answer = text
        if self._text:
            outcome.tokens = array("i", self._words.of_answer(text))
        elif not outcome.tokens:
            tokens, outcome.stood_in = self._words.ids(text, len(outcome.tokens_s))
            outcome.tokens = array("i", tokens)

    def _request(self, ask: Ask) -> bytes:
        body = self._fixed | {"max_tokens": ask.output_tokens, "temperature": ask.temperature, "seed": ask.seed}
        if not self._text:
            body["prompt"] = token_ids(ask.prompt)
            if self._ids and ask.followed:
                body["return_token_ids"] = True
        else:
            said = [*ask.history, (ask.text, "")] if ask.text else [(self._words.text(ask.prompt), "")]
            if self._chat:
                turns = [(role, words) for pair in said for role, words in zip(ROLES, pair, strict=True)]
                body["messages"] = [{"role": role, "content": words} for role, words in turns[:-1]]
            else:
                body["prompt"] = "".join(words for pair in said for words in pair)
        content = encode(body)
        return b"%b%d\r\n\r\n%b" % (self._head, len(content), content)
