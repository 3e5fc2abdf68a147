"""`cache_control` with a time to live: the beginning of the prompt stays cached for that long.

A breakpoint stands on a tool, on a block of the system prompt or of a message, or on the request itself (the whole
prompt). What it covers is found by rendering the conversation as far as the breakpoint: the tokens that this text and
the whole prompt begin with. Of several breakpoints with one time to live, the last one covers the others.

A breakpoint without `ttl` pins nothing: what was computed stays cached without it, as long as nothing else needs the
blocks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvforge.protocol.errors import InvalidRequest, KvforgeError
from kvforge.protocol.messages import Ended, Int32Array

from .request_body import Block, Conversation, Message

TTLS_S = {"5m": 300.0, "1h": 3600.0}
Pins = tuple[tuple[int, float], ...]  # (leading tokens, seconds)
Render = Callable[[Conversation], Awaitable[Int32Array]]  # up to the end of the last message
FIRST = -1  # in place of a message: the tools and the system prompt


def _breakpoints(asked: Conversation) -> Iterator[tuple[float, Conversation | None]]:
    """Yield the seconds of each breakpoint, and the conversation up to it; None: the whole prompt."""
    for at, tool in enumerate(asked.tools or ()):
        yield _seconds(tool.cache_control, f"tools[{at}].cache_control"), _beginning(asked)
    for at, block in enumerate(asked.system if isinstance(asked.system, list) else ()):
        yield _seconds(block.cache_control, f"system[{at}].cache_control"), _beginning(asked)
    for at, message in enumerate(asked.messages):
        blocks: Sequence[Block] = message.content if isinstance(message.content, list) else ()
        for place, block in enumerate(blocks):
            seconds = _seconds(block.cache_control, f"messages[{at}].content[{place}].cache_control")
            last = at == len(asked.messages) - 1 and place == len(blocks) - 1
            part = None if last else _until(asked, at, blocks[: place + 1])
            yield seconds, part
    yield _seconds(asked.cache_control, "cache_control"), None


def _until(asked: Conversation, at: int, blocks: Sequence[Block]) -> Conversation:
    cut = Message(asked.messages[at].role, list(blocks))
    return replace(asked, messages=[*asked.messages[:at], cut])


def _beginning(asked: Conversation) -> Conversation:
    """Return the tools and the system prompt with another first message than the conversation has."""
    first = asked.messages[0].content
    text = first if isinstance(first, str) else next((block.text or "" for block in first), "")
    return replace(asked, messages=[Message("user", "." if not text.startswith(".") else "-")])


def _seconds(control: dict[str, Any] | None, field: str) -> float:
    """Return the time to live of a breakpoint, 0 without one.

    Raises:
        InvalidRequest: Names the field.
    """
    ttl = control.get("ttl") if control is not None else None
    if ttl is None:
        return 0.0
    if not isinstance(ttl, str) or ttl not in TTLS_S:
        raise InvalidRequest(f"{field}.ttl", f'must be "5m" or "1h", not {str(ttl)[:80]!r}')
    return TTLS_S[ttl]


async def pins_of(asked: Conversation, prompt: Int32Array, render: Render) -> Pins:
    """Return what to pin of a prompt, the longest time to live first.

    Args:
        asked: The request.
        prompt: Its prompt, [prompt_tokens].
        render: Tokenises a conversation up to the end of its last message.

    Raises:
        InvalidRequest: Names a time to live that Anthropic's API does not have.
    """
    last = {seconds: part for seconds, part in _breakpoints(asked) if seconds}
    pins: list[tuple[int, float]] = []
    for seconds in sorted(last, reverse=True):
        tokens = await _covered(last[seconds], prompt, render)
        if tokens:
            pins.append((tokens, seconds))
    return tuple(pins)


async def _covered(part: Conversation | None, prompt: Int32Array, render: Render) -> int:
    """Return how many tokens of the prompt a part of its conversation begins with; 0 if it cannot be rendered alone."""
    if part is None:
        return len(prompt)
    try:
        ids = (await render(part))[: len(prompt)]
    except KvforgeError:
        return 0  # a template that needs what follows
    differ = np.flatnonzero(ids != prompt[: len(ids)])
    return int(differ[0]) if differ.size else len(ids)


def cache_creation(pins: Pins, ended: Ended | None) -> dict[str, int]:
    """Return the prompt tokens that were computed and pinned, by time to live, as Anthropic's `usage` has them."""
    counts = {f"ephemeral_{ttl}_input_tokens": 0 for ttl in TTLS_S}
    if ended is None:
        return counts
    names = {seconds: f"ephemeral_{ttl}_input_tokens" for ttl, seconds in TTLS_S.items()}
    known = ended.cached_tokens
    for (_, seconds), tokens in zip(pins, ended.pinned, strict=False):
        counts[names[seconds]] += max(0, tokens - known)
        known = max(known, tokens)
    return counts


def outcomes(ended: Ended | None) -> tuple[int, int]:
    """Return how many prefixes were pinned, shortened ones included, and how many were not."""
    pinned = ended.pinned if ended is not None else ()
    return sum(tokens > 0 for tokens in pinned), sum(not tokens for tokens in pinned)
