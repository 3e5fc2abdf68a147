"""What is answered, as OpenAI's reference has it: whole bodies and single events.

Events are put together from text: of a stream of tokens, one event is nine parts that never change and one that does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.generate.generation import Usage

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
    """The events of one response. kind: their `object`. numbered: each says how many tokens were read by then, so
    that a client can go on from there."""

    def __init__(self, name: str, kind: str, created: int, model: str, *, usage_null: bool, numbered: bool) -> None:
        head = {"id": name, "object": kind, "created": created, "model": model}
        self._head = encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage_null else b"]}\n\n"
        self._numbered = numbered

    def start(self, tokens: int) -> bytes:
        """What comes before `data:`."""
        return b"id: %d\n" % tokens if self._numbered else b""

    def text(self, index: int, text: str, tokens: int = 0) -> bytes:
        """The usual one of chat: content of one choice, and nothing else."""
        return b'%bdata: %b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
            self.start(tokens),
            self._head,
            index,
            encode(text),
            self._tail,
        )

    def completion_text(self, index: int, text: str, tokens: int = 0) -> bytes:
        """The usual one of completions."""
        return b'%bdata: %b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b' % (
            self.start(tokens),
            self._head,
            index,
            encode(text),
            self._tail,
        )

    def choice(self, choice: dict[str, Any], tokens: int = 0) -> bytes:
        """Any other of one choice."""
        return b"%bdata: %b%b%b" % (self.start(tokens), self._head, encode(choice), self._tail)

    def usage(self, usage: Usage) -> bytes:
        """The last one: no choice, and the counts."""
        return b'data: %b],"usage":%b}\n\n' % (self._head, encode(usage_of(usage)))


def error_event(body: dict[str, Any]) -> bytes:
    """An error after the response has begun."""
    return b"data: %b\n\n" % encode(body)
