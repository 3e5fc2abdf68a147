"""CurveZMQ (https://rfc.zeromq.org/spec/26/), the accepting side: authentication and encryption for network peers.

Both sides have a long-term key pair, and know the other's public key: the client is configured with the server's, the
server has the client's in its allow-list. For each connection, both generate an ephemeral pair.

    HELLO      client: proves that it knows the server's key (a box that only this server opens)
    WELCOME    server: its key for this connection, and a cookie
    INITIATE   client: the cookie, its long-term key, and a vouch for its key for this connection
    READY      server; from here on each frame is the box of a MESSAGE

An unauthenticated peer costs one scalar multiplication for each connection, and `RouterSocket` throttles peers that
reconnect repeatedly. The cookie is random data kept with the connection: it is valid only there, and no longer than a
pending handshake. Nonces only increase, which prevents replay, also by an eavesdropper. libsodium verifies all data in
constant time.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
from nacl.bindings import (
    crypto_box_beforenm,
    crypto_box_easy_afternm,
    crypto_box_keypair,
    crypto_box_open_easy_afternm,
    sodium_memcmp,
)
from nacl.exceptions import CryptoError

from kvforge.protocol.keys import KEY_BYTES, text_of

from . import zmtp
from .oversized import Skipped
from .zmtp import COMMAND, COMMAND_BYTES_MAX, LARGE_BYTES, LONG, LONG_HEADER, MORE, Frame, Violation

CURVE = b"CURVE"
NONCE_BYTES, LONG_NONCE_BYTES, MAC_BYTES, COOKIE_BYTES = 8, 16, 16, 96
HELLO_BYTES = 200
VOUCH_BYTES = LONG_NONCE_BYTES + 2 * KEY_BYTES + MAC_BYTES
INITIATE_BYTES_MIN = 9 + COOKIE_BYTES + NONCE_BYTES + KEY_BYTES + VOUCH_BYTES + MAC_BYTES
MESSAGE = b"\x07MESSAGE"
MESSAGE_BYTES_MIN = len(MESSAGE) + NONCE_BYTES + MAC_BYTES + 1
SEALED_MESSAGE_BYTES_MAX = 8 << 20  # two million tokens: decryption takes 15 ms, which blocks all other peers
UNKNOWN_KEY = zmtp.command(b"\x05ERROR\x03400")  # makes libzmq give up; without it, it would retry forever


class ServerKeys(NamedTuple):
    """The server's key pair, and the public keys that it accepts. 32 bytes each."""

    public: bytes
    secret: bytes
    allowed: Collection[bytes]


class SealedReader(zmtp.Reader):
    """The reader of one peer with CURVE: it decrypts what arrives, and encrypts what is sent."""

    MECHANISM = CURVE

    __slots__ = ("_cookie", "_keys", "_open_key", "_peer_nonce", "_sent", "_transient", "_transient_secret")

    def __init__(self, bounds: zmtp.Bounds, keys: ServerKeys) -> None:
        bytes_max = min(bounds.message_bytes_max, SEALED_MESSAGE_BYTES_MAX)
        super().__init__(msgspec.structs.replace(bounds, message_bytes_max=bytes_max))
        self._keys = keys
        self._cookie = self._transient = self._transient_secret = self._open_key = b""
        self._peer_nonce = self._sent = 0

    @property
    def greeting(self) -> bytes:
        """The server's greeting."""
        return zmtp.greeting(CURVE)

    # ------------------------------------------------------------------------------------------------------- handshake

    def _introduced(self, body: bytes) -> bool:
        if not self._cookie:
            self._hello(body)
            return False
        self._initiate(body)
        return True

    def _hello(self, body: bytes) -> None:
        if len(body) != HELLO_BYTES or not body.startswith(b"\x05HELLO\x01\x00"):
            raise Violation("the first frame is not HELLO")
        self._transient = body[80:112]
        shared = _shared(self._transient, self._keys.secret)
        _open(body[120:], b"CurveZMQHELLO---" + body[112:120], shared, "HELLO is not for this coordinator's key")
        public, self._transient_secret = crypto_box_keypair()
        self._cookie = secrets.token_bytes(COOKIE_BYTES)
        nonce = secrets.token_bytes(LONG_NONCE_BYTES)
        box = crypto_box_easy_afternm(public + self._cookie, b"WELCOME-" + nonce, shared)
        self.reply = zmtp.command(b"\x07WELCOME" + nonce + box)

    def _initiate(self, body: bytes) -> None:
        if len(body) < INITIATE_BYTES_MIN or not body.startswith(b"\x08INITIATE"):
            raise Violation("the second frame is not INITIATE")
        if not sodium_memcmp(body[9 : 9 + COOKIE_BYTES], self._cookie):
            raise Violation("INITIATE has a wrong cookie")
        at = 9 + COOKIE_BYTES
        nonce, box = body[at : at + NONCE_BYTES], body[at + NONCE_BYTES :]
        self._open_key = _shared(self._transient, self._transient_secret)
        plain = _open(box, b"CurveZMQINITIATE" + nonce, self._open_key, "INITIATE is not encrypted for this connection")
        key, vouch, metadata = plain[:KEY_BYTES], plain[KEY_BYTES:][:VOUCH_BYTES], plain[KEY_BYTES + VOUCH_BYTES :]
        vouched = _open(
            vouch[LONG_NONCE_BYTES:],
            b"VOUCH---" + vouch[:LONG_NONCE_BYTES],
            _shared(key, self._transient_secret),
            "the peer cannot prove its key",
        )
        if not sodium_memcmp(vouched, self._transient + self._keys.public):
            raise Violation("the vouch is for another connection")
        if key not in self._keys.allowed:  # checked last, so that only owners of a key learn whether it is listed
            raise Violation(f"key '{text_of(key)}' is not in the allow-list", UNKNOWN_KEY)
        zmtp.check_type(metadata)
        self.key, self._peer_nonce = key, int.from_bytes(nonce, "big")
        self._transient_secret = b""
        number = self._next_nonce()
        box = crypto_box_easy_afternm(zmtp.METADATA, b"CurveZMQREADY---" + number, self._open_key)
        self.reply = zmtp.command(b"\x05READY" + number + box)

    # -------------------------------------------------------------------------------------------------------- messages

    def _frame(self, admitted: bool) -> tuple[int, Frame] | None:
        frame = super()._frame(admitted)
        if frame is None or not self._ready or isinstance(frame[1], Skipped):
            return frame
        return self._opened(*frame)

    def _opened(self, flags: int, body: Frame) -> tuple[int, Frame]:
        size = len(body)
        if size < MESSAGE_BYTES_MIN or body[: len(MESSAGE)] != MESSAGE or flags & MORE:
            raise Violation("unencrypted frame")
        start = len(MESSAGE) + NONCE_BYTES
        nonce = bytes(body[len(MESSAGE) : start])
        if int.from_bytes(nonce, "big") <= self._peer_nonce:
            raise Violation("replayed message")
        words = "message was modified in transit, or is not encrypted for this connection"
        opened = _open(bytes(body[start:]), b"CurveZMQMESSAGEC" + nonce, self._open_key, words)
        self._peer_nonce = int.from_bytes(nonce, "big")
        if opened[0] > (MORE | 2):
            raise Violation(f"frame with invalid flags {opened[0]:#04x}")
        if not opened[0] & 2:
            return opened[0] & MORE, opened[1:]  # a copy: numbers are read fastest from aligned bytes objects
        if len(opened) > COMMAND_BYTES_MAX:
            raise Violation(f"a command is at most {COMMAND_BYTES_MAX} bytes, this one has {len(opened) - 1}")
        if not flags & COMMAND:
            self.held -= size  # a command is not part of a message
        return COMMAND, opened[1:]

    def sealed(self, command: bytes) -> bytes:
        """Encrypt a command frame."""
        return b"".join(self._seal(2, command[2:]))

    def message(self, frames: Sequence[Frame]) -> list[Frame]:
        """Encrypt a message. Return the pieces to write."""
        last = len(frames) - 1
        pieces: list[Frame] = []
        small: list[Frame] = []
        for i, frame in enumerate(frames):
            header, sealed = self._seal(MORE if i < last else 0, bytes(frame))
            small.append(header)
            if len(sealed) <= LARGE_BYTES:
                small.append(sealed)
                continue
            pieces += (b"".join(small), sealed)
            small = []
        if small:
            pieces.append(b"".join(small))
        return pieces

    def _seal(self, flags: int, body: bytes) -> tuple[bytes, bytes]:
        """Encrypt a frame. Return its header and the box."""
        nonce = self._next_nonce()
        box = crypto_box_easy_afternm(bytes((flags,)) + body, b"CurveZMQMESSAGES" + nonce, self._open_key)
        size = len(MESSAGE) + NONCE_BYTES + len(box)
        header = bytes((0, size)) if size < 256 else LONG_HEADER.pack(LONG, size)
        return header + MESSAGE + nonce, box

    def _next_nonce(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(NONCE_BYTES, "big")


def _shared(public: bytes, secret: bytes) -> bytes:
    """Return the secret shared by the owners of both pairs. Raise Violation for an invalid key."""
    try:
        shared: bytes = crypto_box_beforenm(public, secret)
    except CryptoError:
        raise Violation("invalid public key") from None
    return shared


def _open(box: bytes, nonce: bytes, shared: bytes, problem: str) -> bytes:
    """Decrypt a box. Raise Violation with `problem` if it is not authentic."""
    try:
        opened: bytes = crypto_box_open_easy_afternm(box, nonce, shared)
    except CryptoError:
        raise Violation(problem) from None
    return opened
