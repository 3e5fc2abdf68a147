"""The parts of a `RouterSocket` around connections over socket pairs, with a manual time."""

from __future__ import annotations

import socket
from pathlib import Path

from kvforge.coordinator.transport import zmtp
from kvforge.coordinator.transport.acceptor import Acceptor
from kvforge.coordinator.transport.connection import Connection, ConnectionLimits
from kvforge.coordinator.transport.connections import ConnectionTable
from kvforge.coordinator.transport.fairness import AbuseBackoff
from kvforge.coordinator.transport.listener import Endpoint
from kvforge.coordinator.transport.poll_set import PollSet
from kvforge.coordinator.transport.receive_queue import ReceiveQueue
from kvforge.coordinator.transport.receiver import InputReader, Receiver
from kvforge.coordinator.transport.sender import Sender
from tests.hostile.raw import READY

NOW_NS = 1_000_000_000
HANDSHAKE = zmtp.GREETING + READY
ENDPOINT = Endpoint("ipc://unused")


class Parts:
    """All parts of one side.

    Attributes:
        peers: The peer's end of each connection, by identity.
    """

    def __init__(self, batch: bool = False, partial_bytes_max: int = 1 << 20) -> None:
        self.backoff, self.poll_set = AbuseBackoff(), PollSet()
        self.table = ConnectionTable("client", self.poll_set, self.backoff, NOW_NS)
        self.queue = ReceiveQueue(1000, self.backoff)
        self.acceptor = Acceptor(self.table, self.poll_set, self.backoff, ConnectionLimits(), 2)
        self.sender = Sender(self.table, self.poll_set, self.queue, batch)
        self.reader = InputReader(self.table, self.poll_set, self.queue, self.sender, self.acceptor, partial_bytes_max)
        self.receiver = Receiver(self.table, self.poll_set, self.queue, self.reader, self.acceptor, 1_000_000)
        self.peers: dict[bytes, socket.socket] = {}

    def connect(self, number: int = 0, limits: ConnectionLimits | None = None) -> Connection:
        """Add a connection and send the handshake of its peer; with a number, it is admitted and trusted."""
        ours, peer = socket.socketpair()
        ours.setblocking(False)
        peer.setblocking(False)
        connection = Connection(
            ours, b"%d" % (len(self.peers) + 1), ENDPOINT, limits or ConnectionLimits(), self.table.now_ns
        )
        self.peers[connection.identity] = peer
        peer.send(HANDSHAKE)
        self.table.add(connection)
        if number:
            self.table.admit(connection, number)
            connection.trusted = True
        self.poll_set.update(connection)
        return connection

    def listen(self, folder: Path) -> str:
        """Listen in a folder. Return the path of the socket."""
        path = f"{folder}/s"
        self.acceptor.listen((Endpoint(f"ipc://{path}"),))
        return path

    def close(self) -> None:
        """Close everything."""
        for peer in self.peers.values():
            peer.close()
        self.table.close()
        self.acceptor.close()
        self.poll_set.close()
