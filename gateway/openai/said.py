"""What is answered, as OpenAI's reference has it: whole bodies and single events.

Events are put together from text: of a stream of tokens, one event is nine parts that never change and one that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvforge.gateway.generate.generation import Usage

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def usage_of(usage: Usage) -> dict[str, Any]:
    """Counts, with what came from the cache and what was reasoning."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class Events:
    """The events of one response. kind: their `object`. usage_null: they say `"usage": null`, since the last one has
    it. counted: of a prompt of so many tokens; each event has the counts. numbered: each says how many tokens were
    read by then, so that a client can go on from there.

    tokens: of the choice, with this event.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        created: int,
        model: str,
        *,
        usage_null: bool,
        numbered: bool = False,
        counted: int | None = None,
    ) -> None:
        head = {"id": name, "object": kind, "created": created, "model": model}
        self._head = encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage_null else b"]}\n\n"
        self._numbered, self._prompt_tokens = numbered, counted
        self._chat = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
        self._completion = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'

    def text(self, index: int, text: str, tokens: int = 0) -> bytes:
        """The usual one of chat: content of one choice, and nothing else."""
        return self._event(self._chat % (index, encode(text)), tokens)

    def completion_text(self, index: int, text: str, tokens: int = 0) -> bytes:
        """The usual one of completions."""
        return self._event(self._completion % (index, encode(text)), tokens)

    def choice(self, choice: dict[str, Any], tokens: int = 0, prompt_ids: Sequence[int] | None = None) -> bytes:
        """Any other of one choice. prompt_ids: those of the prompt, where they were asked for."""
        head = self._head if prompt_ids is None else b'{"prompt_token_ids":%b,%b' % (encode(prompt_ids), self._head[1:])
        return self._event(encode(choice), tokens, head)

    def _event(self, choice: bytes, tokens: int, head: bytes = b"") -> bytes:
        tail = self._tail
        if self._prompt_tokens is not None:
            prompt = self._prompt_tokens
            tail = b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
                prompt,
                tokens,
                prompt + tokens,
            )
        event = b"data: %b%b%b" % (head or self._head, choice, tail)
        return b"id: %d\n%b" % (tokens, event) if self._numbered else event

    def usage(self, usage: Usage) -> bytes:
        """The last one: no choice, and the counts."""
        return b'data: %b],"usage":%b}\n\n' % (self._head, encode(usage_of(usage)))


def error_event(body: dict[str, Any]) -> bytes:
    """An error after the response has begun."""
    return b"data: %b\n\n" % encode(body)
