"""`python -m tools.prose.list PATH...`: the sentences that the gate counts, by file."""

from __future__ import annotations

import sys
from pathlib import Path

from .measure import OPENERS, SENTENCE_END, WORDS, prose_of


def offences(text: str) -> list[str]:
    """Return the counted sentences of a text, each on one line."""
    found = []
    for part in SENTENCE_END.split(text):
        sentence = " ".join(part.split())
        opens = len(sentence.split()) > 2 and OPENERS.match(sentence)
        if opens or any(pattern.search(sentence) for pattern, _ in WORDS.values()):
            found.append(sentence)
    return found


def main(arguments: list[str]) -> int:
    """List the sentences of files, and of the files in folders."""
    for argument in map(Path, arguments):
        paths = [argument] if argument.is_file() else sorted([*argument.rglob("*.py"), *argument.rglob("*.md")])
        for path in paths:
            for sentence in offences(prose_of(path)):
                print(f"{path}: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
