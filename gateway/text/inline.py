"""The calls of a `TextPool` without processes and without limits of time and memory, for tests and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Grammar, Int32Array
from kvforge.text.grammar import validated
from kvforge.text.tokenizer import Tokenizer

from .jobs import Decode, Encode, Render, Result, TextLimits
from .work import TextWork


class Texts(Protocol):
    """The interface of renderers and tokenisers."""

    async def encode(self, text: str, *, special: bool = True, field: str = "prompt") -> Int32Array:
        """Tokenise a text.

        Returns:
            [tokens] int32.

        Raises:
            InvalidRequest: It is too long or not valid Unicode; names `field`.
        """

    async def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, whole: bool = False
    ) -> tuple[Int32Array, str]:
        """Render a conversation and tokenise it.

        Args:
            messages: As the chat template reads them.
            options: Further variables of the template.
            whole: Return the complete text without tokens, instead of tokens and the end of the text.

        Returns:
            [tokens] int32, and the text.

        Raises:
            InvalidRequest: The template refuses it or does not end, or the text is too long.
        """

    async def decode(self, ids: Int32Array) -> str:
        """Return the text of token ids."""

    async def check(self, grammar: Grammar, field: str) -> None:
        """Validate a shape and cache the verdict for `kvforge.text.grammar.check`.

        Raises:
            InvalidRequest: Its validation takes too much time or memory; names `field`.
        """

    async def close(self) -> None:
        """Release all resources."""


def ids_of(result: Result) -> Int32Array:
    """Return the token ids, [tokens] int32."""
    return np.frombuffer(result.ids, "<i4").astype(np.int32)


class NoTexts:
    """Refuses every text, for a model without a tokenizer."""

    async def encode(self, text: str, *, special: bool = True, field: str = "prompt") -> Int32Array:  # noqa: ARG002
        """See `Texts.encode`."""
        raise InvalidRequest(field, "there is no tokenizer")

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],  # noqa: ARG002
        options: Mapping[str, Any],  # noqa: ARG002
        *,
        whole: bool = False,  # noqa: ARG002
    ) -> tuple[Int32Array, str]:
        """See `Texts.render`."""
        raise InvalidRequest("messages", "there is no tokenizer")

    async def decode(self, ids: Int32Array) -> str:  # noqa: ARG002
        """See `Texts.decode`."""
        raise InvalidRequest("tokens", "there is no tokenizer")

    async def check(self, grammar: Grammar, field: str) -> None:
        """See `Texts.check`."""
        with suppress(InvalidRequest):
            validated(grammar, field)

    async def close(self) -> None:
        """See `Texts.close`."""


class InlineText:
    """Does each job immediately, in the calling process."""

    def __init__(self, tokenizer: Tokenizer, limits: TextLimits | None = None) -> None:
        self._work = TextWork(tokenizer, limits or TextLimits())

    async def encode(self, text: str, *, special: bool = True, field: str = "prompt") -> Int32Array:
        """See `Texts.encode`."""
        return ids_of(self._work.do(Encode(text=text, special=special, field=field)))

    async def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, whole: bool = False
    ) -> tuple[Int32Array, str]:
        """See `Texts.render`."""
        result = self._work.do(Render(messages=[*messages], options={**options}, tokens=not whole, whole=whole))
        return ids_of(result), result.text

    async def decode(self, ids: Int32Array) -> str:
        """See `Texts.decode`."""
        return self._work.do(Decode(ids=ids.astype("<i4").tobytes())).text

    async def check(self, grammar: Grammar, field: str) -> None:
        """See `Texts.check`."""
        with suppress(InvalidRequest):
            validated(grammar, field)

    async def close(self) -> None:
        """See `Texts.close`."""
