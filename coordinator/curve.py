"""CurveZMQ (https://rfc.zeromq.org/spec/26/), the accepting side: whoever connects over a network proves who it is.

Both sides have a long-term pair of keys, and know the other's public key before: the client was told the server's, the
server has the client's in its allow-list. For each connection both make a pair that nobody has afterwards.

    HELLO      client: that it knows the server's key (a box that only this server opens)
    WELCOME    server: its key for this connection, and a cookie
    INITIATE   client: the cookie again, its own key, and a vouch that its key for this connection is its own
    READY      server; from here on each frame is the box of a MESSAGE

Somebody who knows nothing costs one multiplication of points, and only once on a connection; who connects again and
again is paced by `Peers` like every other stranger. A cookie here is random bytes that the connection keeps until they
come back: it is good on this connection alone, and no longer than a stranger may stay. Numbers used once only grow, so
that nothing can be sent twice, by whoever listens neither. Whether bytes are right is checked by libsodium, in constant
time.
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
SEALED_MESSAGE_BYTES_MAX = 8 << 20  # two million tokens: to open it takes 15 ms, in which nobody else is served
UNKNOWN_KEY = zmtp.command(b"\x05ERROR\x03400")  # libzmq gives up and says so; without it, it would try for ever


class ServerKeys(NamedTuple):
    """The server's own pair, and the public keys of whom it lets in. 32 bytes each."""

    public: bytes
    secret: bytes
    allowed: Collection[bytes]


class SealedReader(zmtp.Reader):
    """What one peer sends, and how what is sent to it is sealed: zmtp.Reader with CURVE."""

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
            raise Violation("its first frame is not HELLO")
        self._transient = body[80:112]
        shared = _shared(self._transient, self._keys.secret)
        _open(body[120:], b"CurveZMQHELLO---" + body[112:120], shared, "its HELLO is not for this coordinator's key")
        public, self._transient_secret = crypto_box_keypair()
        self._cookie = secrets.token_bytes(COOKIE_BYTES)
        nonce = secrets.token_bytes(LONG_NONCE_BYTES)
        box = crypto_box_easy_afternm(public + self._cookie, b"WELCOME-" + nonce, shared)
        self.reply = zmtp.command(b"\x07WELCOME" + nonce + box)

    def _initiate(self, body: bytes) -> None:
        if len(body) < INITIATE_BYTES_MIN or not body.startswith(b"\x08INITIATE"):
            raise Violation("its second frame is not INITIATE")
        if not sodium_memcmp(body[9 : 9 + COOKIE_BYTES], self._cookie):
            raise Violation("its INITIATE brings another cookie than it was given")
        at = 9 + COOKIE_BYTES
        nonce, box = body[at : at + NONCE_BYTES], body[at + NONCE_BYTES :]
        self._open_key = _shared(self._transient, self._transient_secret)
        said = _open(box, b"CurveZMQINITIATE" + nonce, self._open_key, "its INITIATE is not sealed for this connection")
        key, vouch, metadata = said[:KEY_BYTES], said[KEY_BYTES:][:VOUCH_BYTES], said[KEY_BYTES + VOUCH_BYTES :]
        vouched = _open(
            vouch[LONG_NONCE_BYTES:],
            b"VOUCH---" + vouch[:LONG_NONCE_BYTES],
            _shared(key, self._transient_secret),
            "it does not have the secret of the key that it names",
        )
        if not sodium_memcmp(vouched, self._transient + self._keys.public):
            raise Violation("its vouch is for another connection")
        if key not in self._keys.allowed:  # asked last: only who has the secret of a key learns whether it is there
            raise Violation(f"its key '{text_of(key)}' is not in the allow-list", UNKNOWN_KEY)
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
            raise Violation("it sent what is not sealed")
        start = len(MESSAGE) + NONCE_BYTES
        nonce = bytes(body[len(MESSAGE) : start])
        if int.from_bytes(nonce, "big") <= self._peer_nonce:
            raise Violation("it sent a message again")
        words = "what it sent was changed on its way, or is not sealed for this connection"
        opened = _open(bytes(body[start:]), b"CurveZMQMESSAGEC" + nonce, self._open_key, words)
        self._peer_nonce = int.from_bytes(nonce, "big")
        if opened[0] > (MORE | 2):
            raise Violation(f"it sent a frame with flags {opened[0]:#04x}")
        if not opened[0] & 2:
            return opened[0] & MORE, opened[1:]  # a copy: numbers in it are read fastest where bytes objects begin
        if len(opened) > COMMAND_BYTES_MAX:
            raise Violation(f"a command is at most {COMMAND_BYTES_MAX} bytes, this one has {len(opened) - 1}")
        if not flags & COMMAND:
            self.held -= size  # it is no part of a message
        return COMMAND, opened[1:]

    def sealed(self, command: bytes) -> bytes:
        return b"".join(self._seal(2, command[2:]))

    def message(self, frames: Sequence[Frame]) -> list[Frame]:
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
        """A frame of ours, in two parts: what stands before the box, and the box."""
        nonce = self._next_nonce()
        box = crypto_box_easy_afternm(bytes((flags,)) + body, b"CurveZMQMESSAGES" + nonce, self._open_key)
        size = len(MESSAGE) + NONCE_BYTES + len(box)
        header = bytes((0, size)) if size < 256 else LONG_HEADER.pack(LONG, size)
        return header + MESSAGE + nonce, box

    def _next_nonce(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(NONCE_BYTES, "big")


def _shared(public: bytes, secret: bytes) -> bytes:
    """The secret that only the owners of both pairs know. Raises Violation."""
    try:
        shared: bytes = crypto_box_beforenm(public, secret)
    except CryptoError:
        raise Violation("its key is none") from None
    return shared


def _open(box: bytes, nonce: bytes, shared: bytes, problem: str) -> bytes:
    """What a box says. Raises Violation with `problem`."""
    try:
        said: bytes = crypto_box_open_easy_afternm(box, nonce, shared)
    except CryptoError:
        raise Violation(problem) from None
    return said
