"""Suggests the known name that a misspelt one probably meant."""

from __future__ import annotations

from collections.abc import Iterable

CUTOFF = 0.6


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for the nearest known name, "" where none is near."""
    found = nearest(word, known)
    return f"; did you mean {found}?" if found else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name most similar to the word, "" where none is similar."""
    from difflib import get_close_matches  # slow to import, and needed for misspelt names only

    names = list(known)
    exact = [name for name in names if name.replace("-", "_").lower() == word.replace("-", "_").lower()]
    return (exact or get_close_matches(word, names, 1, CUTOFF) or [""])[0]
