"""Response bodies and events, as in OpenAI's reference.

Events are assembled from text, since most of an event in a token stream never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvforge.gateway.generate.generation import Usage
from kvforge.gateway.http.encoding import encode

DONE = b"data: [DONE]\n\n"


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the token counts, with cached and reasoning tokens."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class EventEncoder:
    """Encoder of the events of one response.

    Args:
        name: The id of the response.
        kind: The `object` of each event.
        created: When the response began, in seconds since 1970.
        model: The name of the model.
        usage_null: Whether events have `"usage": null`, because the last one has the counts.
        numbered: Whether events carry the number of tokens so far as their id, so that a client can resume.
        counted: The number of prompt tokens if each event has the counts, else None.
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
        """Encode the common event of chat: a piece of one choice's content.

        Args:
            index: The choice.
            text: The content.
            tokens: The number of the choice's tokens so far.
        """
        return self._event(self._chat % (index, encode(text)), tokens)

    def completion_text(self, index: int, text: str, tokens: int = 0) -> bytes:
        """Encode the common event of completions."""
        return self._event(self._completion % (index, encode(text)), tokens)

    def choice(self, choice: dict[str, Any], tokens: int = 0, prompt_ids: Sequence[int] | None = None) -> bytes:
        """Encode any other event of one choice. `prompt_ids` are the prompt's token ids if requested."""
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
        """Encode the last event: no choice, and the token counts."""
        return b'data: %b],"usage":%b}\n\n' % (self._head, encode(usage_of(usage)))


def error_event(body: dict[str, Any]) -> bytes:
    """Encode an error after the response has begun."""
    return b"data: %b\n\n" % encode(body)
