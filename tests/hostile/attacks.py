"""Attacks of hostile peers: seeded, bounded generators of the bytes that a connection sends next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import msgpack
import numpy as np

from kvforge.coordinator.transport import zmtp
from kvforge.protocol import codec
from kvforge.protocol.messages import (
    Append,
    GetBlock,
    GetHealth,
    GetStats,
    Goodbye,
    Hello,
    Message,
    Submit,
    WorkerHello,
)
from tests.hostile.raw import frames, part

Attack = Callable[[Random], Iterator[bytes]]
HELLO = frames(Hello(rid=1))
GOOD: tuple[Message, ...] = (
    GetStats(rid=2),
    GetHealth(rid=3),
    GetBlock(rid=4, block_id=1),
    Goodbye(),
    Append(rid=5, sequence_ids=np.array([1]), counts=np.array([1], np.int32), tokens=np.array([1], np.int32)),
    Submit(rid=6, prompt=np.arange(40, dtype=np.int32), max_tokens=4),
)


def garbage(random: Random) -> Iterator[bytes]:
    """Yield bytes that are not ZMTP, after a valid greeting."""
    while True:
        yield random.randbytes(random.randrange(1, 4000))


def no_messages(random: Random) -> Iterator[bytes]:
    """Yield valid frames with random contents."""
    while True:
        yield part(random.randbytes(random.randrange(0, 200)), more=False)


def mutated(random: Random) -> Iterator[bytes]:
    """Yield valid frames of messages with some bytes changed."""
    yield HELLO
    while True:
        body = [bytearray(frame) for frame in codec.encode(random.choice(GOOD))]
        for _ in range(random.randrange(1, 4)):
            frame = random.choice(body)
            if frame:
                frame[random.randrange(len(frame))] = random.randrange(256)
        yield b"".join(zmtp.message([bytes(frame) for frame in body]))


def truncated(random: Random) -> Iterator[bytes]:
    """Yield a part of a message, then nothing."""
    yield HELLO
    data = frames(GOOD[5])
    yield data[: random.randrange(1, len(data))]
    while True:
        yield b""


def endless_parts(random: Random) -> Iterator[bytes]:
    """Yield a message with infinitely many parts."""
    yield HELLO
    while True:
        yield part(random.randbytes(8192))


def oversized(random: Random) -> Iterator[bytes]:
    """Yield a frame that announces more than the limit, or less and withholds the rest."""
    yield HELLO
    yield b"\x02" + random.choice([1 << 20, 1 << 26, 1 << 40, (1 << 64) - 1]).to_bytes(8, "big")
    while True:
        yield random.randbytes(4096)


def nested(_random: Random) -> Iterator[bytes]:
    """Yield deeply nested bodies, and bodies that claim to be large."""
    yield HELLO
    while True:
        yield part(b"\x91" * 3000, more=False)
        yield part(b"\xdf\xff\xff\xff\xff", more=False)
        yield part(msgpack.packb({"t": "append", "rid": 1, "n": [1 << 40]}), more=False)


def busy(random: Random) -> Iterator[bytes]:
    """Yield valid commands without end, never reading an answer."""
    yield HELLO
    while True:
        yield frames(random.choice(GOOD[:3])) * 16


def pings(_random: Random) -> Iterator[bytes]:
    """Yield heartbeats without end."""
    yield HELLO
    while True:
        yield b"\x04\x07\x04PING\x00\x64" * 64


def ghosts(random: Random) -> Iterator[bytes]:
    """Yield the handshake of a worker again and again."""
    hello = WorkerHello(rid=1, name=f"ghost-{random.randrange(1000)}", pid=random.randrange(2, 1 << 22))
    while True:
        yield frames(hello) * 9


CLIENTS: tuple[Attack, ...] = (
    garbage, no_messages, mutated, truncated, endless_parts, oversized, nested, busy, pings
)  # fmt: skip
WORKERS: tuple[Attack, ...] = (garbage, no_messages, mutated, endless_parts, oversized, ghosts)
