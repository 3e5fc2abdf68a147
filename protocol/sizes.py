"""Parses numbers of bytes as people write them: 4G, 512MiB, 2GB."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i?b)?|b)?", re.IGNORECASE)
_POWERS = "kmgtp"
EXAMPLES = "a number of bytes like 4G, 512MiB or 536870912"


def parse_size(text: str) -> int:
    """Read a number of bytes.

    Args:
        text: digits and a unit. K, M, G, T, P and KiB, MiB, ... are powers of 1024, KB, MB, ... are powers of 1000.

    Raises:
        ValueError: the text is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not {EXAMPLES}")
    number, prefix, unit = found.groups()
    base = 1000 if (unit or "").lower() == "b" else 1024
    factor = base ** (_POWERS.index(prefix.lower()) + 1) if prefix else 1
    return int(number) * factor if number.isdigit() else round(float(number) * factor)
