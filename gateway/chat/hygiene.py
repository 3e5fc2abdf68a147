"""What agents put in front of a system prompt and change with each call: left out, or moved behind what stays.

A prefix is found in the cache up to the first token that differs: one line with a hash at the top, and nothing of what
follows is ever found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Such lines are near the beginning; a pattern is not tried on all of a long prompt.
HEAD_CHARACTERS = 4096


class Hygiene:
    """strip, move: regular expressions, where `^` and `$` are ends of lines."""

    def __init__(self, strip: Iterable[str] = (), move: Iterable[str] = ()) -> None:
        self._strip = [re.compile(pattern, re.MULTILINE) for pattern in strip]
        self._move = [re.compile(pattern, re.MULTILINE) for pattern in move]

    def clean(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The conversation with its system prompt cleaned."""
        if not messages or messages[0]["role"] != "system":
            return messages
        first = messages[0]
        content = first["content"]
        cleaned = self._cleaned(content)
        if cleaned == content:
            return messages
        return [*([{**first, "content": cleaned}] if cleaned.strip() else []), *messages[1:]]

    def _cleaned(self, text: str) -> str:
        head, rest = text[:HEAD_CHARACTERS], text[HEAD_CHARACTERS:]
        for pattern in self._strip:
            head = pattern.sub("", head)
        moved: list[str] = []
        for pattern in self._move:
            moved += (found.group().strip("\n") for found in pattern.finditer(head))
            head = pattern.sub("", head)
        return head + rest + "".join(f"\n{line}" for line in moved if line)
