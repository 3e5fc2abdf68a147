"""Messages as a chat template reads them.

Templates want plain text as content, and arguments of calls as objects, not as JSON text. A part that a model of text
cannot read is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvforge.protocol.errors import InvalidRequest

TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")


def content_text(content: str | Sequence[Any] | None, field: str) -> str:
    """The text of a message's content: as it is, or its parts put together, a line each. Raises InvalidRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for at, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in TEXTS or text is None:
            raise InvalidRequest(f"{field}[{at}].type", f"is {part.type!r}; this model reads text alone")
        texts.append(text)
    return "\n".join(texts)


def arguments_of(text: str | Mapping[str, Any], field: str) -> dict[str, Any]:
    """The arguments of a call that was made before. Raises InvalidRequest naming `field`."""
    if isinstance(text, Mapping):
        return dict(text)
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(field, f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "is no JSON object")
    return value
