"""Messages as a chat template reads them.

Templates want plain text as content, and arguments of calls as objects, not as JSON text. A part that a model of text
cannot read is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvforge.gateway.chat.arguments import BROKEN_MAX, object_of, whole_object
from kvforge.protocol.errors import InvalidRequest

TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")


class NotText(InvalidRequest):
    """A part of a message that is no text. `naming` gives the sentence its model."""

    def __init__(self, field: str, kind: str, model: str = "") -> None:
        reader = f"the model {model!r}" if model else "this model"
        super().__init__(field, f"is {kind!r}; {reader} reads text alone")
        self.part = field, kind


@contextmanager
def naming(model: str | None) -> Iterator[None]:
    """Name the model of the request in what is refused inside because it is no text.

    Args:
        model: As the request names it.

    Raises:
        InvalidRequest: A part is no text.
    """
    try:
        yield
    except NotText as error:
        raise NotText(*error.part, model or "") from None


def content_text(content: str | Sequence[Any] | None, field: str) -> str:
    """The text of a message's content: as it is, or its parts put together, a line each. Raises InvalidRequest."""
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
    """The arguments of the calls of one conversation, as objects.

    An answer comes back on the next turn with its calls, also where a call was cut off or is not JSON. The characters
    of such texts are bounded for the conversation, since they are read one token after the other.
    """

    def __init__(self) -> None:
        self._left = BROKEN_MAX

    def read(self, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Return them as an object.

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
