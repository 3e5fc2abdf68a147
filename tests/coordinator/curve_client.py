"""A hand-written CURVE client, so that tests can corrupt any part of the handshake; libzmq's client is tested too."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from nacl.bindings import crypto_box_easy, crypto_box_keypair, crypto_box_open_easy

from kvforge.coordinator.transport import curve, zmtp
from kvforge.protocol import keys

SERVER, CLIENT = keys.make(), keys.make()


def raw(key: str) -> bytes:
    return keys.bytes_of(key, "key")


def server_keys(*allowed: keys.KeyPair) -> curve.ServerKeys:
    """Return the keys of a server with this allow-list."""
    return curve.ServerKeys(raw(SERVER.public), raw(SERVER.secret), {raw(pair.public) for pair in allowed or (CLIENT,)})


def command(body: bytes) -> bytes:
    """Return the frame of a command of any size."""
    return bytes((zmtp.COMMAND, len(body))) + body if len(body) < 256 else zmtp.LONG_HEADER.pack(6, len(body)) + body


@dataclass
class CurveClient:
    """A handshake and the connection after it.

    Attributes:
        pair: the client's key pair.
        server: the public key that the client expects of the server.
    """

    pair: keys.KeyPair = CLIENT
    server: bytes = raw(SERVER.public)
    transient: tuple[bytes, bytes] = field(default_factory=crypto_box_keypair)
    nonce: int = 0
    cookie: bytes = b""
    server_transient: bytes = b""

    def next_nonce(self) -> bytes:
        self.nonce += 1
        return self.nonce.to_bytes(8, "big")

    def hello(self) -> bytes:
        public, secret = self.transient
        nonce = self.next_nonce()
        box = crypto_box_easy(bytes(64), b"CurveZMQHELLO---" + nonce, self.server, secret)
        return command(b"\x05HELLO\x01\x00" + bytes(72) + public + nonce + box)

    def take_welcome(self, frame: bytes) -> None:
        body = frame[2:]
        assert body.startswith(b"\x07WELCOME")
        said = crypto_box_open_easy(body[24:], b"WELCOME-" + body[8:24], self.server, self.transient[1])
        self.server_transient, self.cookie = said[:32], said[32:]

    def vouch(self) -> bytes:
        nonce = secrets.token_bytes(16)
        said = self.transient[0] + self.server
        return nonce + crypto_box_easy(said, b"VOUCH---" + nonce, self.server_transient, raw(self.pair.secret))

    def initiate(self, vouch: bytes | None = None, metadata: bytes | None = None, cookie: bytes | None = None) -> bytes:
        metadata = zmtp.METADATA.replace(b"ROUTER", b"DEALER") if metadata is None else metadata
        said = raw(self.pair.public) + (self.vouch() if vouch is None else vouch) + metadata
        nonce = self.next_nonce()
        box = crypto_box_easy(said, b"CurveZMQINITIATE" + nonce, self.server_transient, self.transient[1])
        return command(b"\x08INITIATE" + (self.cookie if cookie is None else cookie) + nonce + box)

    def message(self, body: bytes, flags: int = 0, nonce: int | None = None) -> bytes:
        """Return the encrypted frame that carries a frame."""
        number = self.next_nonce() if nonce is None else nonce.to_bytes(8, "big")
        box = crypto_box_easy(
            bytes((flags,)) + body, b"CurveZMQMESSAGEC" + number, self.server_transient, self.transient[1]
        )
        sealed = b"\x07MESSAGE" + number + box
        head = bytes((0, len(sealed))) if len(sealed) < 256 else zmtp.LONG_HEADER.pack(zmtp.LONG, len(sealed))
        return head + sealed

    def opened(self, data: bytes) -> list[tuple[int, bytes]]:
        """Decrypt the server's frames; return (flags, body) of each."""
        found, at = [], 0
        while at < len(data):
            start = at + (9 if data[at] & zmtp.LONG else 2)
            size = int.from_bytes(data[at + 1 : start], "big")
            sealed = data[start : start + size]
            assert sealed.startswith(b"\x07MESSAGE")
            nonce = b"CurveZMQMESSAGES" + sealed[8:16]
            said = crypto_box_open_easy(sealed[16:], nonce, self.server_transient, self.transient[1])
            found.append((said[0], said[1:]))
            at = start + size
        return found
