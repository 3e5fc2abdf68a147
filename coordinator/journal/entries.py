"""Entries: serialised events, several to a record. A message is kept as its original frames.

An entry has its kind, a flag, the number of its frames, the number of its peer, the time, a further number that depends
on the kind, and the length of each frame; then the frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvforge.protocol import codec
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import CLIENT_MESSAGES, CLIENT_REPLIES, WORKER_MESSAGES, Stream

from ..core.events import (
    BeginDrain,
    Boot,
    ClientCame,
    ClientFull,
    ClientGone,
    CommandRefused,
    Event,
    FromClient,
    FromWorker,
    Restarted,
    Turn,
    WorkerGone,
)
from ..core.rights import Access

# Raised whenever the same events lead to another state than before, or the declared format changes (`declared.py`).
# Records are only valid for the version that wrote them; a snapshot is valid for that version and the next.
STATE_VERSION = 28
SNAPSHOTS_SINCE = 12  # before that, snapshots were objects of the interpreter
Frame = bytes | memoryview
HEAD = struct.Struct("<BBHQqQ")  # kind, flag, frames, peer, time in microseconds, one more number
_LENGTH = struct.Struct("<I")
_HEADS = [struct.Struct(f"{HEAD.format}{count}I") for count in range(codec.FRAMES_MAX + 1)]  # and lengths of frames
FROM_CLIENT, FROM_WORKER, CLIENT_GONE, CLIENT_FULL, WORKER_GONE, BEGIN_DRAIN, TURN, BOOT, RESTARTED, CAME, REFUSED = (
    range(1, 12)
)
AWAY = 2  # in the flag of WORKER_GONE, next to 1 for a goodbye
RESULT_BYTES_MAX = 16 << 20  # a result may have an error for each of thousands of rows


class Entry(NamedTuple):
    """An event and its time, in microseconds."""

    event: Event | Boot
    now_us: int


def pack(event: Event | Boot, now_us: int, frames: Sequence[Frame] = ()) -> list[Frame]:
    """Return the parts of an entry. `frames` are those of the message if the event is one."""
    if isinstance(event, Turn):  # with a result, one of these comes in every turn
        return [HEAD.pack(TURN, 0, 0, 0, now_us, 0)]
    kind, flag, peer, more = 0, 0, 0, 0
    if isinstance(event, FromWorker):
        kind, peer = FROM_WORKER, event.worker
    elif isinstance(event, FromClient):
        kind, peer, more = FROM_CLIENT, event.client, event.entropy
    elif isinstance(event, CommandRefused):
        kind, flag, peer = REFUSED, event.submit, event.client
    elif isinstance(event, ClientGone):
        kind, flag, peer = CLIENT_GONE, event.goodbye, event.client
    elif isinstance(event, WorkerGone):
        kind, flag, peer = WORKER_GONE, event.goodbye + AWAY * event.away, event.worker
    elif isinstance(event, ClientFull):
        kind, peer, frames = CLIENT_FULL, event.client, codec.encode(event.lost)
    elif isinstance(event, BeginDrain):
        kind, more = BEGIN_DRAIN, event.deadline_us
    elif isinstance(event, Restarted):
        kind = RESTARTED
    elif isinstance(event, ClientCame):
        kind, peer = CAME, event.client
        frames = (event.session.encode(), msgspec.msgpack.encode(event.access))
    else:
        kind, more, frames = BOOT, STATE_VERSION, (msgspec.msgpack.encode(event),)
    head = _HEADS[len(frames)].pack(kind, flag, len(frames), peer, now_us, more, *map(len, frames))
    return [head, *frames]


def raw_entries(payload: memoryview) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the kind and the undecoded frames of each entry of a record."""
    at = 0
    while at < len(payload):
        kind, _, count, *_ = HEAD.unpack_from(payload, at)
        at += HEAD.size
        ends = at + count * _LENGTH.size
        frames = []
        for (length,) in _LENGTH.iter_unpack(payload[at:ends]):
            frames.append(bytes(payload[ends : ends + length]))
            ends += length
        at = ends
        yield kind, frames


class Reader:
    """Decodes entries to events."""

    def __init__(self) -> None:
        self._clients = codec.Decoder(CLIENT_MESSAGES)
        self._workers = codec.Decoder(WORKER_MESSAGES, body_bytes_max=RESULT_BYTES_MAX)
        self._replies = codec.Decoder(CLIENT_REPLIES)

    def entries(self, payload: memoryview) -> Iterator[Entry]:
        """Yield the entries of one record."""
        at = 0
        while at < len(payload):
            kind, flag, count, peer, now_us, more = HEAD.unpack_from(payload, at)
            at += HEAD.size
            ends = at + count * _LENGTH.size
            frames = []
            for (length,) in _LENGTH.iter_unpack(payload[at:ends]):
                # Copied, because the core may keep parts of a message, which must not keep the whole journal in memory.
                frames.append(bytes(payload[ends : ends + length]))
                ends += length
            at = ends
            yield Entry(self._event(kind, flag, peer, more, frames), now_us)

    def _event(self, kind: int, flag: int, peer: int, more: int, frames: list[bytes]) -> Event | Boot:
        if kind == TURN:
            return Turn()
        if kind == FROM_WORKER:
            return FromWorker(peer, self._workers.decode(frames))
        if kind == FROM_CLIENT:
            return FromClient(peer, self._clients.decode(frames), more)
        if kind == REFUSED:
            return CommandRefused(peer, bool(flag))
        if kind == CLIENT_GONE:
            return ClientGone(peer, bool(flag))
        if kind == WORKER_GONE:
            return WorkerGone(peer, bool(flag & 1), bool(flag & AWAY))
        if kind == CLIENT_FULL:
            lost = self._replies.decode(frames)
            assert isinstance(lost, Stream)
            return ClientFull(peer, lost)
        if kind == BEGIN_DRAIN:
            return BeginDrain(more)
        if kind == RESTARTED:
            return Restarted()
        if kind == CAME:
            return ClientCame(peer, frames[0].decode(), msgspec.msgpack.decode(frames[1], type=Access))
        assert kind == BOOT, f"an entry of kind {kind}"
        check_version("its first record", more)
        return msgspec.msgpack.decode(frames[0], type=Boot)


def check_version(what: str, version: int) -> None:
    """Check that records belong to this version of the state.

    Raises:
        InvalidConfiguration: They belong to another version.
    """
    if version != STATE_VERSION:
        raise InvalidConfiguration(
            "state_dir",
            f"{what} holds records of state version {version}, this kvforge has {STATE_VERSION}: start the kvforge "
            'that wrote them with on_stop = "keep" and stop it, which leaves a snapshot that the next version reads; '
            "or start with --fresh, which discards them",
        )


def check_snapshot_version(what: str, version: int) -> None:
    """Check that a snapshot belongs to this version of the state or the previous one.

    Raises:
        InvalidConfiguration: It does not.
    """
    if not STATE_VERSION - 1 <= version <= STATE_VERSION or version < SNAPSHOTS_SINCE:
        raise InvalidConfiguration(
            "state_dir",
            f"{what} is a snapshot of state version {version}, this kvforge reads {STATE_VERSION} and the one before: "
            "start the kvforge that wrote it, or the versions between one after the other; or start with --fresh, "
            "which discards it",
        )
