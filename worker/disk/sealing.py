"""Encryption of the disk tier: XChaCha20-Poly1305 of libsodium. Its nonces are long enough to be drawn at random."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from kvforge.protocol.errors import InvalidConfiguration

NONCE_BYTES, TAG_BYTES, KEY_BYTES = 24, 16, 32
NO_NONCE, NO_TAG = bytes(NONCE_BYTES), bytes(TAG_BYTES)


class Unsealed(Exception):
    """Bytes were not sealed with this key, at this place."""


class Sealer:
    """Seals bytes with a key.

    Args:
        key: 32 secret bytes; b"": nothing is encrypted.

    Attributes:
        key_id: Tells keys apart, without revealing them; b"" without a key.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self.key_id = hashlib.blake2b(key, digest_size=16, person=b"kvforge-disk-id").digest() if key else b""

    def seal(self, plain: bytes | memoryview, place: bytes) -> tuple[bytes, bytes, bytes | memoryview]:
        """Return nonce, tag and the sealed bytes, which are as many as the plain ones.

        Args:
            plain: What to seal.
            place: Authenticated with it: sealed bytes that were moved elsewhere are refused.
        """
        if not self._key:
            return NO_NONCE, NO_TAG, plain
        from nacl import bindings

        nonce = os.urandom(NONCE_BYTES)
        sealed = bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(bytes(plain), place, nonce, self._key)
        return nonce, sealed[-TAG_BYTES:], memoryview(sealed)[:-TAG_BYTES]

    def unseal(self, nonce: bytes, tag: bytes, sealed: bytes | bytearray | memoryview, place: bytes) -> bytes:
        """Return the plain bytes.

        Raises:
            Unsealed: The bytes, their place or the key differ.
        """
        if not self._key:
            return bytes(sealed)
        from nacl import bindings, exceptions

        try:
            plain = bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(bytes(sealed) + tag, place, nonce, self._key)
        except exceptions.CryptoError as error:
            raise Unsealed(str(error)) from None
        return plain


def read_key(path: str) -> bytes:
    """Return the key in a file: 32 bytes, as 64 hexadecimal digits.

    Args:
        path: The file; "": none.

    Raises:
        InvalidConfiguration: Names `disk_key_file`, what is wrong with it, and the remedy.
    """
    if not path:
        return b""
    remedy = f"write a key with `(umask 077; openssl rand -hex {KEY_BYTES} > {path})`"
    try:
        import nacl  # noqa: F401
    except ImportError:
        raise InvalidConfiguration("disk_key_file", "needs PyNaCl: install kvforge[tcp]") from None
    try:
        with Path(path).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4 * KEY_BYTES).strip()
    except OSError as error:
        raise InvalidConfiguration("disk_key_file", f"{path!r} cannot be read ({error.strerror}): {remedy}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        problem = f"{path!r} can be read by others (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
        raise InvalidConfiguration("disk_key_file", problem)
    try:
        key = bytes.fromhex(text.decode())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidConfiguration("disk_key_file", f"{path!r} does not hold {2 * KEY_BYTES} hex digits: {remedy}")
    return key
