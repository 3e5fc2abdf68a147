"""Messages for chat templates.

Templates expect plain text as content, and arguments of calls as objects rather than JSON text. A part that a text
model cannot read is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvforge.gateway.chat.arguments import BROKEN_MAX, object_of, whole_object
from kvforge.protocol.errors import InvalidRequest

TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")


class NotText(InvalidRequest):
    """A part of a message that is not text. `naming` adds the name of the model."""

    def __init__(self, field: str, kind: str, model: str = "") -> None:
        reader = f"the model {model!r}" if model else "this model"
        super().__init__(field, f"is {kind!r}; {reader} reads text only")
        self.part = field, kind


@contextmanager
def naming(model: str | None) -> Iterator[None]:
    """Add the name of the model to a NotText error within the block.

    Args:
        model: The name in the request.

    Raises:
        InvalidRequest: A part is not text.
    """
    try:
        yield
    except NotText as error:
        raise NotText(*error.part, model or "") from None


def content_text(content: str | Sequence[Any] | None, field: str) -> str:
    """Return the text of a message's content, with its parts joined by line breaks.

    Raises:
        InvalidRequest: A part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for at, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in TEXTS or text is None:
            raise NotText(f"{field}[{at}].type", part.type)
        texts.append(text)
    return "\n".join(texts)


class CalledArguments:
    """Reads the arguments of all calls in one conversation as objects.

    An answer returns in the next turn with its calls, even if a call was truncated or is invalid JSON. Such text is
    parsed token by token, so its total length per conversation is bounded.
    """

    def __init__(self) -> None:
        self._left = BROKEN_MAX

    def read(self, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as an object.

        Args:
            arguments: An object, or the text that a model wrote.
        """
        if isinstance(arguments, Mapping):
            return dict(arguments)
        if (whole := whole_object(arguments)) is not None:
            return whole
        found = object_of(arguments, self._left)
        self._left = max(0, self._left - len(arguments))
        return found
