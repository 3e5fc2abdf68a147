"""The host file of a worker: KV blocks in memory that belongs to the host and outlives the process.

The file lies in a folder in memory (`/dev/shm` by default). It is mapped, and locked for the process's whole life: a
successor can open it only once no process can write it any more. Its layout, in native byte order:

| bytes | content |
|---|---|
| 0 to 4,096 | head: magic, random id, digest of the layout, number of blocks, bytes of a block |
| `blocks` x 8, up to a multiple of 4,096 | the tag of each block, unsigned 64 bit; 0: not whole |
| likewise | the checksum of each block, unsigned 64 bit (`device/block_buffers.py`) |
| from 64 MiB of blocks on: up to a multiple of 2 MiB | unused: blocks and file then begin and end with a huge page |
| `blocks` x `block_bytes` | the blocks |
| from 64 MiB of blocks on, and on hugetlbfs: up to a multiple of a huge page | unused |

A tag is cleared before its block is written, and stored after the block and its checksum: a process that is killed in
the middle leaves no tag.
A file of another layout, size or boot of the host is emptied and gets another id. The coordinator, which owns the
blocks, knows them by this id, and then misses.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import InvalidConfiguration, WorkerError
from kvforge.protocol.steady_clock import monotonic
from kvforge.worker import huge_pages
from kvforge.worker.huge_pages import HUGE_BYTES, AlignedMap

MAGIC = b"kvfHost3"
PAGE = 4096
LARGE_BYTES = 32 * HUGE_BYTES  # of blocks: the unused bytes are then a sixteenth at most
LOCK_WAIT_S, LOCK_POLL_S = 30.0, 0.05
IDENTITY_BYTES = 16
_HEAD = struct.Struct("=8s16s32sQQ")
_HOST_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Layout:
    """Where the parts of a host file begin, in bytes, and where it ends.

    Attributes:
        sums: The checksums. The tags begin at `PAGE`.
        data: The blocks.
        size: The bytes of the file.
    """

    sums: int
    data: int
    size: int

    @classmethod
    def of(cls, blocks: int, block_bytes: int, unit: int = 1) -> Layout:
        """Return the layout of a file.

        Args:
            blocks: Number of blocks.
            block_bytes: Bytes of a block.
            unit: The size of the file is a multiple of this: of a huge page, on hugetlbfs.
        """
        numbers, total = _up_to(PAGE, 8 * blocks), blocks * block_bytes
        large = HUGE_BYTES if total >= LARGE_BYTES else 1
        data = _up_to(large, PAGE + 2 * numbers)
        return cls(PAGE + numbers, data, _up_to(unit, _up_to(large, data + total)))


class MappedBlocks:
    """The parts of a mapped host file.

    Args:
        fd: Its descriptor.
        blocks: Number of blocks.
        block_bytes: Bytes of a block.

    Attributes:
        map: The mapping.
        tags: As in `HostFile`, like the others.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, blocks: int, block_bytes: int) -> None:
        layout = Layout.of(blocks, block_bytes, huge_pages.page_bytes(fd))
        self.map = AlignedMap(fd, layout.size)
        whole = self.map.octets
        self.tags: npt.NDArray[np.uint64] = whole[PAGE : PAGE + 8 * blocks].view(np.uint64)
        self.sums: npt.NDArray[np.uint64] = whole[layout.sums : layout.sums + 8 * blocks].view(np.uint64)
        self.memory: npt.NDArray[np.uint8] = whole[layout.data : layout.data + blocks * block_bytes]
        self.data = self.memory.reshape(blocks, block_bytes)

    def write_head(self, head: bytes) -> None:
        """Write the head, through the mapping: hugetlbfs has no other way."""
        self.map.octets[: len(head)] = np.frombuffer(head, np.uint8)

    def close(self) -> None:
        """Unmap the file.

        Raises:
            BufferError: Another object has a view.
        """
        self.tags = self.sums = np.zeros(0, np.uint64)
        self.data, self.memory = np.zeros((0, 0), np.uint8), np.zeros(0, np.uint8)
        self.map.close()


class FoundFile:
    """The mapped and locked file of an earlier process, whatever its layout.

    Attributes:
        fd: Its descriptor, which holds the lock.
        blocks: Number of blocks.
        block_bytes: Bytes of a block.
        mapped: Its parts.
    """

    def __init__(self, fd: int, head: bytes) -> None:
        self.fd, self._head = fd, head
        *_, self.blocks, self.block_bytes = _HEAD.unpack(head)
        self.mapped = MappedBlocks(fd, self.blocks, self.block_bytes)

    def fits(self, layout: str, blocks: int, block_bytes: int) -> bool:
        """Return whether a `HostFile` with these arguments finds the content of this one."""
        return _id_of(self._head, _digest_of(layout), blocks, block_bytes) is not None

    def close(self) -> None:
        """Unmap and unlock the file. No other object has a view."""
        self.mapped.close()
        os.close(self.fd)


def find_file(path: Path) -> FoundFile | None:
    """Map and lock the file of an earlier process; None if there is none, or if a process has it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        head, found = os.pread(fd, _HEAD.size, 0), os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and len(head) == _HEAD.size:
            magic, *_, blocks, block_bytes = _HEAD.unpack(head)
            layout = Layout.of(blocks, block_bytes, huge_pages.page_bytes(fd))
            if magic == MAGIC and blocks and block_bytes and layout.size == found.st_size:
                return FoundFile(fd, head)
    except OSError:
        pass
    os.close(fd)
    return None


class HostFile:
    """A mapped and locked file.

    Args:
        path: The file, which is made if there is none.
        layout: All that determines what the bytes of a block mean, apart from its tokens.
        blocks: Number of blocks.
        block_bytes: Bytes of a block.
        lock_wait_s: How long to wait for an earlier process.
        place: Called with the mapping of the file, [bytes] uint8, and whether an earlier process has filled it. The
            memory of a new file is allocated after that.
        opened: The file at this path, if it was opened before and fits. It must not be closed then, and is not placed.
        huge: Whether a new file asks for huge pages.

    Attributes:
        identity: Equal for two processes if the second finds what the first has written: 32 hex digits.
        found: Whether the file was there, with this layout.
        tags: The tag of each block, [blocks] uint64.
        sums: The checksum of each block, [blocks] uint64.
        data: The blocks, [blocks, block_bytes] uint8.
        memory: The memory of `data`, [bytes] uint8, on whole pages.
        whole: The file's memory, [bytes] uint8.
        refused: Why a new file may not be in huge pages, with the remedy; "" if nothing was refused.

    Raises:
        InvalidConfiguration: There is not enough memory for the file, or it cannot be made.
        WorkerError: Another process has the file.
    """

    def __init__(
        self,
        path: Path,
        layout: str,
        blocks: int,
        block_bytes: int,
        lock_wait_s: float = LOCK_WAIT_S,
        opened: FoundFile | None = None,
        place: Callable[[npt.NDArray[np.uint8], bool], None] | None = None,
        huge: bool = True,
    ) -> None:
        assert opened is None or opened.fits(layout, blocks, block_bytes)
        self.path, self.blocks, self.refused = path, blocks, ""
        digest = _digest_of(layout)
        self._fd = _open(path) if opened is None else opened.fd
        try:
            if opened is None:
                _lock(self._fd, path, lock_wait_s)
            size = Layout.of(blocks, block_bytes, huge_pages.page_bytes(self._fd)).size
            head = os.pread(self._fd, _HEAD.size, 0)
            file_id = _id_of(head, digest, blocks, block_bytes) if os.fstat(self._fd).st_size == size else None
            self.found = file_id is not None
            if opened is None and not self.found:
                _empty(self._fd, path, size)
            self._mapped = _map(self._fd, path, blocks, block_bytes) if opened is None else opened.mapped
            if opened is None and place is not None:
                place(self._mapped.map.octets, self.found)
            if file_id is None:
                file_id = os.urandom(16)
                self.refused = _fill(self._fd, path, self._mapped.map, huge)
                self._mapped.write_head(_HEAD.pack(MAGIC, file_id, digest, blocks, block_bytes))
        except BaseException:
            os.close(self._fd)
            raise
        self.identity = hashlib.blake2b(file_id + digest, digest_size=IDENTITY_BYTES).hexdigest()
        self.tags, self.sums = self._mapped.tags, self._mapped.sums
        self.memory, self.data, self.whole = self._mapped.memory, self._mapped.data, self._mapped.map.octets

    def fileno(self) -> int:
        """Return the descriptor, which holds the lock. A process that inherits it holds the lock too."""
        return self._fd

    def close(self) -> None:
        """Unlock the file, which stays. The caller has dropped all views of it."""
        self.tags = self.sums = np.zeros(0, np.uint64)
        self.data, self.memory = np.zeros((0, 0), np.uint8), np.zeros(0, np.uint8)
        self.whole = self.memory
        try:
            self._mapped.close()
        except BufferError:  # a view is left: the end of the process unmaps the file
            return
        os.close(self._fd)


def _digest_of(layout: str) -> bytes:
    """Return the digest of a layout and the host's boot."""
    return hashlib.blake2b(f"{layout} {_host_boot()}".encode(), digest_size=32).digest()


def _up_to(unit: int, size: int) -> int:
    """Round a size up to a multiple of a unit."""
    return -(-size // unit) * unit


def host_path(folder: str, runtime: Path, name: str) -> Path:
    """Return the file of a worker: one for each runtime folder and name.

    Args:
        folder: The configured folder; "": the system's folder in memory.
        runtime: The coordinator's runtime folder.
        name: The worker's name; of one of several ranks, with its rank.

    Raises:
        InvalidConfiguration: There is no such folder.
    """
    place = Path(folder).expanduser() if folder else Path("/dev/shm")  # noqa: S108 - the file is only the owner's
    if not place.is_dir():
        raise InvalidConfiguration("host_dir", f"{str(place)!r} is no folder: name one in memory (tmpfs or hugetlbfs)")
    ours = hashlib.blake2b(f"{os.getuid()}\n{runtime}\n{name}".encode(), digest_size=12).hexdigest()
    return place / f"kvforge-host-{ours}"


def _host_boot() -> str:
    try:
        return _HOST_BOOT.read_text().strip()
    except OSError:
        return ""


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InvalidConfiguration("host_dir", f"{str(path)!r} cannot be opened: {error.strerror}") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(fd)
        raise InvalidConfiguration("host_dir", f"{str(path)!r} is no file of this user: remove it")
    return fd


def _lock(fd: int, path: Path, wait_s: float) -> None:
    deadline = monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if monotonic() >= deadline:
                problem = f"another process still has the host file {path}: end it, or give this worker another name"
                raise WorkerError(problem) from None
        time.sleep(LOCK_POLL_S)


def _id_of(head: bytes, digest: bytes, blocks: int, block_bytes: int) -> bytes | None:
    """Return the id of a file with this layout; None for any other content."""
    if len(head) < _HEAD.size:
        return None
    magic, file_id, *layout = _HEAD.unpack(head)
    return file_id if magic == MAGIC and layout == [digest, blocks, block_bytes] else None


def _empty(fd: int, path: Path, size: int) -> None:
    """Empty the file, and give it its size."""
    os.ftruncate(fd, 0)
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise _no_room(fd, path, size, error) from None


def _map(fd: int, path: Path, blocks: int, block_bytes: int) -> MappedBlocks:
    try:
        return MappedBlocks(fd, blocks, block_bytes)
    except OSError as error:
        raise _no_room(fd, path, os.fstat(fd).st_size, error) from None


def _fill(fd: int, path: Path, mapped: AlignedMap, huge: bool) -> str:
    """Reserve the memory of an empty file, so that no later write finds none. Return as `huge_pages.fill`."""
    try:
        return huge_pages.fill(fd, mapped, huge)
    except OSError as error:
        raise _no_room(fd, path, mapped.octets.nbytes, error) from None


def _no_room(fd: int, path: Path, size: int, error: OSError) -> InvalidConfiguration:
    """Give the memory of the file back, and return what to raise."""
    unit = huge_pages.page_bytes(fd)
    os.ftruncate(fd, 0)
    remedy = "lower it"
    if unit > 1:
        remedy = f"raise vm.nr_hugepages by {size // unit} pages of {unit} bytes, or lower it"
    return InvalidConfiguration(
        "host_bytes", f"{size} bytes cannot be reserved in {path.parent}: {error.strerror}; {remedy}"
    )
