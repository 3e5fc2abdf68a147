"""Between text and token ids, for a server that takes or gives the other of the two than a load has.

A session's next prompt holds the answer that really came, as token ids. A server that gives none is answered for in one
of two ways:
- where token ids are sent: by a tokenizer, where there is one; else by stand-ins, as many as tokens came, that follow
  from the words of the answer. Prompts are then as long as they should be, but what the server has cached of the answer
  is not hit;
- where text is sent, each id is a word: the load's are common ones, the same for the same id, and those of answers are
  the answer's own, letter by letter. What is shared is then the same text, and about as long; the server's usage says
  how long.
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
    """Words that every tokenizer knows."""
    found = {word for _, line in sample_lines(COMMON) for word in re.findall(r"[a-z]+", line.lower())}
    return tuple(sorted(found))


class Words:
    """Of one target. vocab: stand-ins are below it. encode: a tokenizer without special tokens, or None."""

    def __init__(self, vocab: int, encode: Encode | None = None) -> None:
        self._vocab, self._encode = vocab, encode
        self._word: dict[int, str] = {}  # of answers; their ids are below 0

    def text(self, ids: Int32Array) -> str:
        """What a prompt of ids, [tokens] int32, is to a server that takes text."""
        words = common_words()
        pieces = (f" {words[i % len(words)]}" if i >= 0 else self._word[i] for i in ids.tolist())
        return "".join(pieces).removeprefix(" ")

    def of_answer(self, text: str) -> list[int]:
        """An answer as `text` reads it back: an id below 0 for each word with the white space before it."""
        return [self._known(word) for word in re.findall(r"\s*\S+|\s+", text)]

    def ids(self, text: str, count: int) -> tuple[list[int], bool]:
        """An answer of `count` tokens as token ids, and whether they are stand-ins."""
        if self._encode is not None:
            return self._encode(text), False
        hashes = [zlib.crc32(word.encode()) % self._vocab for word in text.split()] or [0]
        return np.resize(np.array(hashes, np.int32), count).tolist(), True

    def _known(self, word: str) -> int:
        # The same one in every driver process, but for two words in thousands of millions.
        number = zlib.crc32(word.encode()) >> 1
        while self._word.setdefault(-1 - number, word) != word:
            number = (number + 1) % IDS
        return -1 - number
