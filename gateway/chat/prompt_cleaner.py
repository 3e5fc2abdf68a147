"""Prompt hygiene: removes or moves text that agents prepend to a system prompt and change with each call.

The prefix cache matches a prompt up to the first token that differs. A changing line at the top would prevent every
hit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Such lines are near the beginning, so patterns are not matched against all of a long prompt.
HEAD_CHARACTERS = 4096


class PromptCleaner:
    """Cleans system prompts. In the regular expressions `strip` and `move`, `^` and `$` match at line breaks."""

    def __init__(self, strip: Iterable[str] = (), move: Iterable[str] = ()) -> None:
        self._strip = [re.compile(pattern, re.MULTILINE) for pattern in strip]
        self._move = [re.compile(pattern, re.MULTILINE) for pattern in move]

    def clean(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the conversation with a cleaned system prompt."""
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
