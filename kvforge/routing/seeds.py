"""Seeds that are known before a request is: then whoever computes it draws the same numbers."""

from __future__ import annotations

import hashlib


def seed_of(tenant: str, key: str) -> int:
    """The seed of a request with a key that names none: the same in every process, and after every restart.

    It is no secret, and need not be: it decides between tokens that the model allows anyway.
    """
    digest = hashlib.blake2b(f"{tenant}\n{key}".encode(), digest_size=8, person=b"kvforge seed").digest()
    return int.from_bytes(digest, "little")
