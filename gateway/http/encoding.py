"""JSON for readers that take lines.

JSON allows three line breaks of Unicode within a string: U+0085, U+2028 and U+2029. `str.splitlines`, and clients that
read events or JSON lines with it, would cut the text there.
"""

from __future__ import annotations

from typing import Any

import msgspec

_ESCAPES = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))


def encode(value: Any) -> bytes:
    """Encode a value as JSON without any line break.

    Args:
        value: What msgspec can encode; `msgspec.Raw` for JSON that is encoded already.

    Returns:
        UTF-8. Line breaks of Unicode are escaped, and everything else is as msgspec writes it.

    Raises:
        TypeError: msgspec cannot encode it.
    """
    body = msgspec.json.encode(value)
    for character, escape in _ESCAPES:
        if character in body:
            body = body.replace(character, escape)
    return body
