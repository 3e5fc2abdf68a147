"""Incremental decoding of tokens to text: `TextStream`, and `Pieces`, the bytes of each token."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from kvforge.protocol.errors import InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Decoder(Protocol):
    """A tokenizer as a stream needs it."""

    def pieces_of(self, keep: frozenset[str]) -> Pieces | None:
        """Return the bytes of each token, including the special tokens in `keep`.

        Returns:
            None if the pieces of a text depend on each other.
        """

    def decode(self, token_ids: Iterable[int], *, keep: frozenset[str] = frozenset()) -> str:
        """Return the text of all these tokens, including the special tokens in `keep`."""


class TextStream:
    """Turns the tokens of one answer into text as they arrive.

    The concatenated results of `push` and `finish` equal `decode` of all tokens. A character that spans several tokens
    is returned once it is complete. The cost of a token does not depend on the length of the answer.

    The one difference from `decode`: if a byte-fallback vocabulary (sentencepiece) is made to emit invalid UTF-8,
    `decode` also drops valid characters beside the invalid bytes; here they were already returned.

    Args:
        tokenizer: The tokenizer.
        continues: The text continues a prompt: keep a leading space that sentencepiece vocabularies drop.
        keep: Special tokens, as spelled in the vocabulary, that are part of the text; all others are dropped.
    """

    def __init__(self, tokenizer: Decoder, *, continues: bool = False, keep: frozenset[str] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._keep = keep
        self._pieces = tokenizer.pieces_of(keep)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: list[int] = []
        self._at_start = not continues
        self._strip = 0 if continues or self._pieces is None else self._pieces.strip
        self._finished = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is now certain and was not returned before; may be empty.

        Raises:
            InvalidRequest: The stream is finished, or a token id is invalid.
        """
        if self._finished:
            raise InvalidRequest("token_ids", "the stream is finished")
        ids = checked_ids(token_ids)
        if self._pieces is None:  # the pieces depend on each other, so only the whole text is certain
            self._held += ids
            return ""
        return self._utf8.decode(b"".join(self._piece(token) for token in ids))

    def finish(self) -> str:
        """Return the text held back, and end the stream. An incomplete character becomes U+FFFD."""
        self._finished = True
        if self._pieces is None:
            return self._tokenizer.decode(self._held, keep=self._keep)
        return self._utf8.decode(b"", final=True)

    def _piece(self, token: int) -> bytes:
        assert self._pieces is not None
        piece = self._pieces.bytes_of(token)
        if not piece:
            return piece
        if self._at_start:
            self._at_start = False
            piece = self._pieces.first(piece)
        while self._strip and piece:
            if not piece.startswith(b" "):
                self._strip = 0
                break
            piece = piece[1:]
            self._strip -= 1
        return piece


class Pieces:
    """The bytes of each token, derived from the description of the tokenizer's decoder.

    Two families are supported, which cover the vocabularies of generating models: byte-level (GPT-2's alphabet, one
    character per byte) and sentencepiece (a replaced space, byte fallback, a dropped first space).

    Args:
        token_of: Returns the spelling of a token id; None where there is no such token.
        special: The spelling of each special token, by its id.
        decoder: The decoder of the library `tokenizers`, in its JSON form.
        keep: Special tokens that have bytes nevertheless.

    Attributes:
        strip: The number of leading spaces that the decoder drops from the whole text.

    Raises:
        ValueError: The decoder is of another family.
    """

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        special: Mapping[int, str],
        decoder: str | bytes,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        self._token_of = token_of
        self._kept: dict[int, bytes] = {token: text.encode() for token, text in special.items() if text in keep}
        self._special = special.keys() - self._kept.keys()
        self._alphabet: dict[str, int] | None = None
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._cache: dict[int, bytes] = {}
        self._first_bare = False
        self.strip = 0
        fused = False
        state = json.loads(decoder)
        try:
            for step in state["decoders"] if state["type"] == "Sequence" else [state]:
                fused = self._understand(step, fused)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the decoder is of another family ({error!r})") from error

    @classmethod
    def of(cls, tokenizer: Any, keep: frozenset[str] = frozenset()) -> Pieces | None:
        """Return the pieces of a tokenizer, None if its decoder is of another family."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or backend.decoder is None:
            return None
        special = {token: added.content for token, added in backend.get_added_tokens_decoder().items() if added.special}
        try:
            return cls(backend.id_to_token, special, backend.decoder.__getstate__(), keep)
        except ValueError:
            return None

    def _understand(self, step: dict[str, Any], fused: bool) -> bool:
        kind = step["type"]
        if kind == "ByteLevel":
            self._alphabet = byte_alphabet()
        elif kind == "Replace" and not fused:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and not fused:
            self._replacements.append((step["replacement"], " "))
            self._first_bare = step["prepend_scheme"] != "never"
        elif kind == "ByteFallback" and not fused:
            self._byte_fallback = True
        elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0:
            self.strip = step["start"]
        elif kind != "Fuse":
            raise ValueError(kind)
        return fused or kind == "Fuse"

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        piece = self._cache.get(token)
        if piece is None:
            piece = self._cache[token] = self._spell(token)
        return piece

    def first(self, piece: bytes) -> bytes:
        """Return the bytes of the first piece of a text: the Metaspace decoder drops all its spaces."""
        return piece.replace(b" ", b"") if self._first_bare else piece

    def _spell(self, token: int) -> bytes:
        if token in self._kept:
            return self._kept[token]
        text = None if token in self._special else self._token_of(token)
        if text is None:
            return b""
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[character] for character in text])
            except KeyError:  # an added token, spelled as plain text
                return text.encode()
        for old, new in self._replacements:
            text = text.replace(old, new)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return text.encode()


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet.

    Printable bytes of Latin-1 are their own characters; the others are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def checked_ids(token_ids: Iterable[int]) -> list[int]:
    """Convert token ids to a list of int.

    Raises:
        InvalidRequest: A number is out of range.
    """
    ids = [int(token) for token in token_ids]
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise InvalidRequest("token_ids", f"a token id is between 0 and 2^31 - 1; got {min(ids)} to {max(ids)}")
    return ids
