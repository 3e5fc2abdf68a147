"""The worker token: proves that a worker can read the coordinator's own file.

The file lies in the runtime folder, readable by the coordinator's user alone (0600), and is new at each boot. Over a
network, the worker's key replaces the token.
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
    """Create a new token and write its file.

    The caller must be the only coordinator in the folder: unfinished files that a killed one left are removed.

    Raises:
        OSError: The file cannot be written.
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
    """Return the token of the coordinator in this runtime folder; "" if there is none or it cannot be read."""
    try:
        with (runtime / TOKEN_FILE).open(encoding="ascii") as file:
            return file.read(TOKEN_LENGTH_MAX)
    except (OSError, UnicodeDecodeError):
        return ""


def same(first: str, second: str) -> bool:
    """Compare two tokens in constant time."""
    return secrets.compare_digest(first.encode(), second.encode())
