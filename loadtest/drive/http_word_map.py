"""Converts between text and token ids, for servers that take or return the other form than the load has.

A session's next prompt contains the actual answer as token ids. If the server returns none, there are two substitutes:

- Prompts as token ids: the ids come from a tokenizer if there is one. Otherwise stand-ins, derived from the words of
  the answer, match the number of tokens. Prompts then have the right length, but the answer misses the server's prefix
  cache.
- Prompts as text: each id is a word. Ids of the load map to common words, always the same; those of an answer map back
  to its exact text. Shared prefixes are then shared text of about the same length; the server's usage reports the
  length.
"""

from __future__ import annotations

import re
import zlib
from functools import cache

import numpy as np

from kvforge.loadtest.load.files import sample_lines
from kvforge.loadtest.load.texts import Encode
from kvforge.protocol.messages import Int32Array

COMMON = "sonnet.txt"
IDS = 1 << 31


@cache
def common_words() -> tuple[str, ...]:
    """Return common English words, which every tokenizer knows."""
    found = {word for _, line in sample_lines(COMMON) for word in re.findall(r"[a-z]+", line.lower())}
    return tuple(sorted(found))


class WordMap:
    """The word mapping of one target.

    Args:
        vocab: Stand-ins are below it.
        encode: A tokenizer without special tokens, or None.
    """

    def __init__(self, vocab: int, encode: Encode | None = None) -> None:
        self._vocab, self._encode = vocab, encode
        self._word: dict[int, str] = {}  # words of answers, with negative ids

    def text(self, ids: Int32Array) -> str:
        """Return the text of a prompt, [tokens] int32."""
        words = common_words()
        pieces = (f" {words[i % len(words)]}" if i >= 0 else self._word[i] for i in ids.tolist())
        return "".join(pieces).removeprefix(" ")

    def of_answer(self, text: str) -> list[int]:
        """Return ids for an answer's text: a negative id for each word with its preceding white space."""
        return [self._known(word) for word in re.findall(r"\s*\S+|\s+", text)]

    def ids(self, text: str, count: int) -> tuple[list[int], bool]:
        """Return an answer of `count` tokens as token ids, and whether they are stand-ins."""
        if self._encode is not None:
            return self._encode(text), False
        hashes = [zlib.crc32(word.encode()) % self._vocab for word in text.split()] or [0]
        return np.resize(np.array(hashes, np.int32), count).tolist(), True

    def _known(self, word: str) -> int:
        # All driver processes agree on the id, except after a rare hash collision.
        number = zlib.crc32(word.encode()) >> 1
        while self._word.setdefault(-1 - number, word) != word:
            number = (number + 1) % IDS
        return -1 - number
