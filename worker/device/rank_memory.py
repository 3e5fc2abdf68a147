"""Memory of one host that all ranks map: they gather numbers through it, without a library.

Each rank writes its part into its own memory and sends one byte to each other rank; after a byte from each of them it
reads their parts. The memory has two halves in turn. A rank that sends the byte of one exchange has read the previous
one, so a half may be written again when all bytes of the other half have come.

For a small part on a CPU, gloo makes about 40 system calls a rank, most of them to wake its threads, and this makes two
for each other rank. A rank that ends closes its sockets, and the others see that at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

HALF_BYTES = 1 << 22  # larger parts take several exchanges
CONNECT_S = 20.0


def host() -> str:
    """Return an id of this machine, which changes at each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class RankMemory:
    """This rank's memory, that of the other ranks, and a socket to each of them."""

    def __init__(self, rank: int, count: int, place: Path, wait_s: float = CONNECT_S) -> None:
        """Allocate this rank's memory and listen; `connect` maps the memory of the others.

        Args:
            rank: This rank.
            count: Number of ranks.
            place: An unused path in a folder that all ranks see. Each rank has a socket beside it until it is
                connected or closed.
            wait_s: Seconds for one operation with another rank while it connects.

        Raises:
            OSError: The memory or the socket is not available.
        """
        self.rank, self.count = rank, count
        self._place, self._wait_s, self._exchanges = place, wait_s, 0
        self._peers: list[socket.socket] = []
        self._memory: dict[int, torch.Tensor] = {}  # by rank: [2, HALF_BYTES] uint8
        self._file = -1
        self._bound = False
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._file = os.memfd_create(f"kvforge-rank-{rank}")
            os.ftruncate(self._file, 2 * HALF_BYTES)
            self._memory[rank] = _mapped(self._file)
            self._listener.settimeout(wait_s)
            with _short(place.parent) as folder:
                self._listener.bind(f"{folder}/{self._name(rank)}")
            self._bound = True
            (place.parent / self._name(rank)).chmod(0o600)
            self._listener.listen(count)
        except OSError:
            self.close()
            raise

    def connect(self) -> None:
        """Exchange the memory with all ranks, after all of them listen.

        Raises:
            OSError: A rank cannot be reached, or does not answer in time.
        """
        try:
            for rank in range(self.rank):
                peer = self._keep(socket.socket(socket.AF_UNIX))
                with _short(self._place.parent) as folder:
                    peer.connect(f"{folder}/{self._name(rank)}")
                self._exchange_memory(peer)
            for _ in range(self.rank + 1, self.count):
                self._exchange_memory(self._keep(self._listener.accept()[0]))
        finally:
            self._stop_listening()
        if sorted(self._memory) != list(range(self.count)):
            raise ConnectionError(f"memory of ranks {sorted(self._memory)}, not of all {self.count}")

    def _keep(self, peer: socket.socket) -> socket.socket:
        self._peers.append(peer)
        peer.settimeout(self._wait_s)
        return peer

    def _exchange_memory(self, peer: socket.socket) -> None:
        """Send this rank's number and memory, and map the other's."""
        socket.send_fds(peer, [bytes([self.rank])], [self._file])
        sent, files, _, _ = socket.recv_fds(peer, 1, 1)
        try:
            if len(sent) != 1 or len(files) != 1:
                raise ConnectionError("another rank ended while it connected")
            self._memory[sent[0]] = _mapped(files[0])
        finally:
            for file in files:
                os.close(file)

    def _name(self, rank: int) -> str:
        return f"{self._place.name}.{rank}"

    def _stop_listening(self) -> None:
        self._listener.close()
        if self._bound:
            (self._place.parent / self._name(self.rank)).unlink(missing_ok=True)
            self._bound = False

    def set_timeout(self, wait_s: float) -> None:
        """Limit the wait for one other rank, in seconds, in `gather`."""
        for peer in self._peers:
            peer.settimeout(None)  # the kernel's own limit takes no second system call
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6)))

    def gather(self, part: torch.Tensor, found: torch.Tensor) -> None:
        """Gather a tensor from all ranks.

        Args:
            part: [n] uint8 on the CPU, this rank's part; n is the same on all ranks.
            found: [count, n] uint8 on the CPU: receives all parts, in the order of ranks.

        Raises:
            OSError: A rank has ended, or has not answered in time.
        """
        for start in range(0, max(1, len(part)), HALF_BYTES):
            stop = min(start + HALF_BYTES, len(part))
            half = self._exchanges % 2
            self._memory[self.rank][half, : stop - start] = part[start:stop]
            self._meet()
            for rank in range(self.count):
                found[rank, start:stop] = self._memory[rank][half, : stop - start]

    def _meet(self) -> None:
        """Wait until all ranks have written this exchange."""
        number = bytes([self._exchanges % 256])
        for peer in self._peers:
            peer.send(number)
        for peer in self._peers:
            came = peer.recv(1)
            if not came:
                raise ConnectionResetError("it has closed its connection")
            assert came == number, "ranks exchange in one order"
        self._exchanges += 1

    def close(self) -> None:
        """Close the sockets, which ends the exchanges of the other ranks, and release the memory."""
        self._stop_listening()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self._memory.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _mapped(file: int) -> torch.Tensor:
    """Return a file of two halves as a tensor, which keeps it mapped."""
    return torch.frombuffer(mmap.mmap(file, 2 * HALF_BYTES), dtype=torch.uint8).view(2, HALF_BYTES)


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder: a socket's path has at most 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
