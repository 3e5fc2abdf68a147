"""The storage process: it reads calls from a socket, does all that wait in one transaction, and answers.

Invariant: an answer is sent after the commit. The process has one thread and no state beside the database, so it may be
killed at any moment. It ends when its socket closes, after the calls that it has received.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from kvforge.protocol.errors import InternalError, KvforgeError
from kvforge.protocol.readiness import readable
from kvforge.protocol.steady_clock import monotonic

from .database import Database
from .engine import Engine, Outcome
from .frames import ASKED, HEAD_BYTES, OPENED, Call, Done, Failed, Opened, framed
from .sqlite import SqliteDatabase

GROUP_MAX, GROUP_BYTES_MAX = 256, 16 << 20
PIECE_BYTES = 1 << 20
TIDY_S, UNTIDY_MAX_S = 0.5, 2.0  # after a deletion: when idle for this long, and at the latest


def main(descriptor: int) -> None:
    """Serve one gateway process until its socket closes.

    Args:
        descriptor: The descriptor of a stream socket to the gateway.
    """
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the gateway closes the socket after its streams have ended
    with socket.socket(fileno=descriptor) as peer, suppress(BrokenPipeError, ConnectionResetError):
        _serve(peer)


def database_of(url: str) -> Database:
    """Return the database that a URL names, not yet opened.

    Args:
        url: `sqlite:PATH` or `postgresql://...`.
    """
    if url.startswith("sqlite:"):
        return SqliteDatabase(Path(url.removeprefix("sqlite:")))
    from .postgres import PostgresDatabase

    return PostgresDatabase(url)


def _serve(peer: socket.socket) -> None:
    frames = _Frames(peer)
    first = frames.next_group(1)
    if not first:
        return
    opened: Opened = OPENED.decode(first[0])
    engine = Engine(database_of(opened.url), opened.tenant_bytes_max)
    untidy_since = monotonic()
    try:
        while True:
            if not engine.untidy:
                untidy_since = monotonic()
            elif monotonic() - untidy_since > UNTIDY_MAX_S:
                engine.tidy()
                untidy_since = monotonic()
            elif not frames.waiting and not readable([peer], TIDY_S):
                engine.tidy()
                continue
            group = frames.next_group(GROUP_MAX)
            if not group:
                return
            asked = [ASKED.decode(frame) for frame in group]
            answers = [_answer(one, outcome) for one, outcome in zip(asked, _run(engine, asked), strict=True)]
            peer.sendall(b"".join(map(framed, answers)))
    finally:
        engine.close()


def _run(engine: Engine, asked: list[Call]) -> list[Outcome]:
    try:
        return engine.run([one.operations for one in asked])
    except Exception as error:  # noqa: BLE001 - reported to the gateway as an internal error
        engine.close()
        failed = InternalError(f"the storage process failed: {type(error).__name__}: {error}")
        return [failed for _ in asked]


def _answer(asked: Call, outcome: Outcome) -> Done | Failed:
    if isinstance(outcome, KvforgeError):
        return Failed(asked.number, outcome.code, outcome.message, outcome.fields)
    return Done(asked.number, outcome)


class _Frames:
    """Reads whole frames: at least one, and with it those that have arrived already."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._held = peer, bytearray()

    @property
    def waiting(self) -> bool:
        """Whether a whole frame has arrived."""
        return len(self._held) >= HEAD_BYTES and len(self._held) - HEAD_BYTES >= self._size

    @property
    def _size(self) -> int:
        return int.from_bytes(self._held[:HEAD_BYTES], "little")

    def next_group(self, count_max: int) -> list[bytes]:
        """Return frames, at most `count_max`; none once the gateway has closed the socket."""
        while not self.waiting:
            if not self._receive(0):
                return []
        if count_max > 1:
            while len(self._held) < GROUP_BYTES_MAX and self._receive(socket.MSG_DONTWAIT):
                pass
        frames: list[bytes] = []
        at = 0
        view = memoryview(self._held)
        while len(frames) < count_max and len(view) - at >= HEAD_BYTES:
            size = int.from_bytes(view[at : at + HEAD_BYTES], "little")
            if len(view) - at - HEAD_BYTES < size:
                break
            frames.append(bytes(view[at + HEAD_BYTES : at + HEAD_BYTES + size]))
            at += HEAD_BYTES + size
        view.release()
        del self._held[:at]
        return frames

    def _receive(self, flags: int) -> bool:
        try:
            piece = self._peer.recv(PIECE_BYTES, flags)
        except BlockingIOError:
            return False
        self._held += piece
        return bool(piece)
