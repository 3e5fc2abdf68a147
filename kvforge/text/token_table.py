"""The tokens of a model as a table of texts: what answers need of a tokenizer, without the libraries that made it.

Reading a large tokenizer and importing transformers takes seconds and hundreds of MB. A process that only turns tokens
into text is sent this table by one that has loaded the tokenizer; it takes milliseconds and a few MB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from .stream import Pieces, TextStream

# Bytes of a table as it is sent. One of 262 thousand tokens has 4 MB.
TABLE_BYTES_MAX = 64 << 20
TOO_LARGE = f"a table of its tokens has more than {TABLE_BYTES_MAX} bytes"
_INDEX_BYTES = 4


class NotTabularError(Exception):
    """A tokenizer has no table. The text is the reason."""


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """A table as it is sent.

    Args:
        decoder: The decoder of the library `tokenizers`, in its JSON form.
        special: The spelling of each special token, by its id.
        template: The chat template; "" where there is none.
        texts: The spellings of all tokens in the order of their ids, in UTF-8. An id without a token has none.
        ends: Where the spelling of each id ends in `texts`: [ids] uint32, in the byte order of this machine.
    """

    decoder: str
    special: dict[int, str]
    template: str
    texts: bytes
    ends: bytes


_DECODER = msgspec.msgpack.Decoder(_Fields)


class TokenTable:
    """The part of a `Tokenizer` that turns tokens into text. Made by `table_of` or `from_bytes`."""

    def __init__(self, fields: _Fields) -> None:
        self._fields = fields
        self._ends = memoryview(fields.ends).cast("I")
        self._pieces: dict[frozenset[str], Pieces] = {}
        self.special_tokens: Mapping[str, int] = {text: token for token, text in fields.special.items()}

    @classmethod
    def from_bytes(cls, body: bytes) -> TokenTable:
        """Return the table that `to_bytes` wrote, on the same machine.

        Raises:
            ValueError: It is none.
        """
        fields = _DECODER.decode(body)
        if len(fields.ends) % _INDEX_BYTES:
            raise ValueError("a token table ends within a number")
        return cls(fields)

    def to_bytes(self) -> bytes:
        """Return it as MessagePack.

        Raises:
            NotTabularError: It is too large.
        """
        body = msgspec.msgpack.encode(self._fields)
        if len(body) > TABLE_BYTES_MAX:
            raise NotTabularError(TOO_LARGE)
        return body

    @property
    def chat_template(self) -> str:
        """See `Tokenizer.chat_template`."""
        return self._fields.template

    def spelled(self, token_id: int) -> str:
        """See `Tokenizer.spelled`."""
        if not 0 <= token_id < len(self._ends):
            return ""
        start = self._ends[token_id - 1] if token_id else 0
        return self._fields.texts[start : self._ends[token_id]].decode()

    def pieces_of(self, keep: frozenset[str] = frozenset()) -> Pieces:
        """See `Tokenizer.pieces_of`; each token of a table has bytes of its own.

        Raises:
            ValueError: The decoder is of another family, for which `table_of` makes no table.
        """
        there = keep.intersection(self.special_tokens) if keep else keep
        if there not in self._pieces:
            self._pieces[there] = Pieces(self._spelling, self._fields.special, self._fields.decoder, there)
        return self._pieces[there]

    def decode(self, token_ids: Iterable[int], *, keep: frozenset[str] = frozenset()) -> str:
        """Return the text that a stream gives for these tokens. See `Tokenizer.decode`."""
        stream = self.stream(keep=keep)
        return stream.push(token_ids) + stream.finish()

    def stream(self, *, continues: bool = False, keep: frozenset[str] = frozenset()) -> TextStream:
        """See `Tokenizer.stream`."""
        return TextStream(self, continues=continues, keep=keep)

    def _spelling(self, token_id: int) -> str | None:
        return self.spelled(token_id) or None


def table_of(tokenizer: Any, template: str) -> TokenTable:
    """Return the table of a tokenizer of transformers.

    Args:
        tokenizer: The tokenizer.
        template: Its chat template, or "".

    Raises:
        NotTabularError: A table does not hold all that turns its tokens into text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NotTabularError("its tokenizer is not one of the library `tokenizers`")
    if Pieces.of(tokenizer) is None:
        raise NotTabularError("the text of its tokens depends on the tokens beside them")
    texts, ends = bytearray(), array("I")
    for token in range(max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1):
        texts += (backend.id_to_token(token) or "").encode()
        ends.append(len(texts))
        if len(texts) + _INDEX_BYTES * len(ends) > TABLE_BYTES_MAX:
            raise NotTabularError(TOO_LARGE)
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    decoder = backend.decoder.__getstate__().decode()
    return TokenTable(
        _Fields(decoder=decoder, special=special, template=template, texts=bytes(texts), ends=ends.tobytes())
    )
