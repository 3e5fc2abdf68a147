"""Rates of words and sentence openings that make prose hard to read, in Python and Markdown files.

The patterns come from a comparison with well-written projects of the field (httpx, uvicorn, h11), where the rates are
close to zero.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Uses per 1,000 words that a folder may have.
WORDS = {
    "persons": (re.compile(r"\b(nobody|somebody|whoever|whom|whomever|whose)\b", re.IGNORECASE), 0.2),
    "said": (re.compile(r"\b(told|said|tell|tells|says)\b", re.IGNORECASE), 0.8),
    "of-which": (re.compile(r"\bof (which|whom|it|them)\b", re.IGNORECASE), 0.5),
}
# Sentences that begin with one of these words, in percent.
OPENERS, OPENERS_PERCENT_MAX = re.compile(r"(what|who|whoever|those|so|of)\b", re.IGNORECASE), 2.0
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n")
STRING_MARKS = re.compile(r"^[a-zA-Z]*(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$")


class Excess(NamedTuple):
    """A rate above its limit."""

    folder: str
    kind: str
    rate: float
    limit: float


def prose_of(path: Path) -> str:
    """Return the prose of a file: Markdown without code, or the comments and the strings with a space.

    Args:
        path: A `.md` or `.py` file in UTF-8.

    Raises:
        SyntaxError: The file is not valid Python.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
        return re.sub(r"^ {4}.*$|`[^`]*`", " ", text, flags=re.MULTILINE)
    parts: list[str] = []
    before = tokenize.ENCODING
    for kind, string in _tokens(text):
        if kind == tokenize.COMMENT:
            parts.append(string.lstrip("# "))
        elif kind == tokenize.STRING and " " in string.strip("\"'"):
            # Adjacent strings are one sentence, others are sentences of their own.
            parts.append(STRING_MARKS.sub("", string) + (" " if before == tokenize.STRING else ".\n"))
        before = kind
    return re.sub(r"`[^`]*`", " ", "\n".join(parts))


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Return the types and texts of tokens, each f-string as one string: from Python 3.12 on it is several tokens."""
    lines, depth, start = text.splitlines(keepends=True), 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":
            start = token.start if not depth else start
            depth += 1
        elif name == "FSTRING_END":
            depth -= 1
            if not depth:
                (first, column), (last, end) = start, token.end
                rows = [*lines[first - 1 : last - 1], lines[last - 1][:end]]
                yield tokenize.STRING, "".join(rows)[column:]
        elif not depth:
            yield token.type, token.string


def count(text: str) -> Counter[str]:
    """Count words, sentences, and the uses of each kind in a text."""
    sentences = [each for part in SENTENCE_END.split(text) if len((each := part.strip()).split()) > 2]
    found = Counter({name: len(pattern.findall(text)) for name, (pattern, _) in WORDS.items()})
    found["words"], found["sentences"] = len(re.findall(r"[A-Za-z']+", text)), len(sentences)
    found["openers"] = sum(1 for each in sentences if OPENERS.match(each))
    return found


def excesses(folder: str, paths: Iterable[Path]) -> list[Excess]:
    """Return the rates of a folder's files that are above their limits.

    Args:
        folder: The folder's name, for the report.
        paths: Its files.

    Returns:
        One entry for each kind above its limit; empty for a folder within all of them.
    """
    total: Counter[str] = Counter()
    for path in paths:
        total.update(count(prose_of(path)))
    rates = [(kind, 1000 * total[kind] / max(total["words"], 1), limit) for kind, (_, limit) in WORDS.items()]
    rates.append(("openers", 100 * total["openers"] / max(total["sentences"], 1), OPENERS_PERCENT_MAX))
    return [Excess(folder, kind, rate, limit) for kind, rate, limit in rates if rate > limit]
