"""Seeds that are known before a request is placed, so that any replica draws the same numbers."""

from __future__ import annotations

import hashlib


def seed_of(tenant: str, key: str) -> int:
    """Return the seed of a request that has a key but no seed. It is the same in every process and after every restart.

    It is not secret and need not be: it only decides between tokens that the model allows.
    """
    digest = hashlib.blake2b(f"{tenant}\n{key}".encode(), digest_size=8, person=b"kvforge seed").digest()
    return int.from_bytes(digest, "little")
