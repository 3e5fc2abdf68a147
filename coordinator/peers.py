"""One ROUTER socket and who is behind it: numbers for connections, noticing those that end.

ROUTER names connections by random identities and does not tell when one ends. ZeroMQ's own monitor does, by file
descriptor, and every received frame knows the descriptor it came through: the two together give exact ends, a killed
process within milliseconds and a silent one within the ZMTP heartbeat timeout. Descriptors are reused, so events are
always read before a connection is bound to its descriptor; a hello that outlived its connection is not bound at all.

Asking a ZeroMQ socket whether it holds something costs more than a system call. Once a loop watches the descriptors by
which ZeroMQ signals (`watch`), a socket is asked only where it may hold something: it was signalled, or used since by
ourselves (whatever is done with a socket may take in its signal).
"""

from __future__ import annotations

import errno
import select
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.transport import SEND_MESSAGES_MAX, router

from .outbox import Frames, Sent

LAST_WORDS_MS = 500
# Plain integers: operations on the enumerations of pyzmq cost more than the calls that they are for.
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
NOBLOCK, PART = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
# What a ROUTER that must not drop says when a peer's queue is full, and when it knows no such peer.
OUTCOMES = {errno.EAGAIN: Sent.FULL, errno.EHOSTUNREACH: Sent.GONE}


class Peers:
    """The connections of one socket. A connection has a number once `admit` gave it one."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        numbers: Callable[[], int],
        send_messages_max: int = SEND_MESSAGES_MAX,
    ) -> None:
        """Binds. send_messages_max: how many messages wait for each peer. Raises zmq.ZMQError."""
        self.socket = router(context, send_messages_max)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._numbers = numbers
        self._number_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}
        self._by_fd: dict[int, set[int]] = {}
        self._fd_of: dict[int, int] = {}
        self._open: set[int] = set()
        self._gone: list[int] = []
        self._watched, self._stirred, self._monitor_stirred = False, True, True
        self._taken = 0  # messages since connections were last looked at
        self.socket.bind(endpoint)

    def __len__(self) -> int:
        return len(self._number_of)

    def watch(self, epoll: select.epoll) -> dict[int, Callable[[], None]]:
        """From now on what `epoll` reports is passed on: by descriptor, what to call."""
        self._watched = True
        calls = {int(self.socket.fileno()): self._stir, int(self.monitor.fileno()): self._stir_monitor}
        for descriptor in calls:
            epoll.register(descriptor, select.EPOLLIN)
        return calls

    def _stir(self) -> None:
        self._stirred = True

    def _stir_monitor(self) -> None:
        self._monitor_stirred = True

    @property
    def waiting(self) -> bool:
        """Whether a message, or the end of a connection, is there to be received."""
        return ((self._stirred or not self._watched) and self._holds()) or (self._watched and self._monitor_stirred)

    def _holds(self) -> bool:
        """Asks ZeroMQ."""
        self._stirred = bool(int(self.socket.get(EVENTS)) & READABLE)
        return self._stirred

    def receive(self) -> tuple[bytes, int, list[memoryview | bytes]] | None:
        """The next message: (identity, descriptor, frames); None where none is waiting. The descriptor is that of a
        connection which is not admitted yet, else -1."""
        if self._watched and not self._stirred:
            return None
        self._taken += 1
        if self._taken == 2 and not self._holds():  # one message a turn is common, and asking is cheaper than an error
            return None
        try:
            identity = self.socket.recv(NOBLOCK)
        except zmq.Again:
            self._stirred = False
            return None
        part = self.socket.recv(NOBLOCK, copy=False)  # the parts of a message are there together
        descriptor = -1 if identity in self._number_of else int(part.get(zmq.SRCFD))
        frames: list[memoryview | bytes] = [part.buffer]
        while part.more:  # a frame knows this; asking the socket takes longer
            part = self.socket.recv(NOBLOCK, copy=False)
            frames.append(part.bytes)  # a copy: arrays are kept, and would keep all that ZeroMQ read together with them
        return identity, descriptor, frames

    def number(self, identity: bytes) -> int | None:
        """The number of an admitted connection."""
        return self._number_of.get(identity)

    def admit(self, identity: bytes, descriptor: int) -> int | None:
        """Gives a connection its number; None where it has ended already."""
        self._monitor_stirred = True  # whatever the loop has seen so far
        self.note_ends()
        if descriptor not in self._open:
            return None
        number = self._numbers()
        self._number_of[identity] = number
        self._identity_of[number] = identity
        self._fd_of[number] = descriptor
        self._by_fd.setdefault(descriptor, set()).add(number)
        return number

    def note_ends(self) -> None:
        """Reads the monitor: connections that ended are forgotten here and reported by `take_gone`."""
        self._taken = 0
        if self._watched and not self._monitor_stirred:
            return
        self._monitor_stirred = False
        while int(self.monitor.get(EVENTS)) & READABLE:
            event = parse_monitor_message(self.monitor.recv_multipart())
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
                continue
            self._open.discard(descriptor)
            for number in list(self._by_fd.get(descriptor, ())):
                self.forget(number)
                self._gone.append(number)

    def take_gone(self) -> list[int]:
        """Numbers of the connections that ended since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def forget(self, number: int) -> None:
        """The connection is no longer ours to talk to. Idempotent."""
        identity = self._identity_of.pop(number, None)
        if identity is None:
            return
        del self._number_of[identity]
        descriptor = self._fd_of.pop(number)
        self._by_fd[descriptor].discard(number)
        if not self._by_fd[descriptor]:
            del self._by_fd[descriptor]

    def send(self, number: int, frames: Frames) -> Sent:
        """Sends without waiting. A peer that is found to be gone is forgotten and reported by `take_gone`."""
        identity = self._identity_of.get(number)
        if identity is None:
            return Sent.GONE
        sent = self.send_to(identity, frames)
        if sent is Sent.GONE:
            self.forget(number)
            self._gone.append(number)
        return sent

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        """Sends to a connection that has no number (yet), without waiting."""
        self._stirred = True
        try:
            last = len(frames) - 1
            self.socket.send(identity, PART)
            for i, frame in enumerate(frames):
                self.socket.send(frame, NOBLOCK if i == last else PART)
        except zmq.ZMQError as error:
            if error.errno not in OUTCOMES:
                raise
            return OUTCOMES[error.errno]
        return Sent.DONE

    def close(self) -> None:
        """Closes the socket; `ipc` files are removed by the server. What was sent last has a moment to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(LAST_WORDS_MS)
