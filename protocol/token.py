"""The token by which a worker proves that it belongs to a coordinator: it can read the coordinator's own file.

The file lies in the runtime folder, for the coordinator's user alone (0600), and is another one at each boot. Over a
network a worker's key proves as much.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

TOKEN_FILE = "worker.token"  # noqa: S105 - the name of a file
TOKEN_BYTES = 32
TOKEN_LENGTH_MAX = 2 * TOKEN_BYTES


def make(runtime: Path) -> str:
    """A new token, in its file. Raises OSError.

    Nobody else may be making one there: what one that was killed right here has left is removed.
    """
    token = secrets.token_hex(TOKEN_BYTES)
    for unfinished in runtime.glob(f"{TOKEN_FILE}.*"):
        unfinished.unlink(missing_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=runtime, prefix=TOKEN_FILE + ".")  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token)
        Path(temporary).replace(runtime / TOKEN_FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return token


def read(runtime: Path) -> str:
    """The token of the coordinator that serves there; "" where there is none, or it cannot be read."""
    try:
        with (runtime / TOKEN_FILE).open(encoding="ascii") as file:
            return file.read(TOKEN_LENGTH_MAX)
    except (OSError, UnicodeDecodeError):
        return ""


def same(first: str, second: str) -> bool:
    """Compares in a time that says nothing about where they differ."""
    return secrets.compare_digest(first.encode(), second.encode())
