"""Reads of the disk tier: by how many processes, past the page cache or through it.

    python -m benchmarks.disk_copies [--mib 256] [--turns 3] [--folder DIR] [--json FILE]

The copying process of a worker fills a host file in memory from segments on a disk, all blocks ordered at once. Before
each turn the segments leave the page cache. One process through the page cache is how the tier read before it had
several. The sizes of a block are those of 16 tokens of SmolLM2-135M in float32, and of an 8B model in 16 bits.
"""

from __future__ import annotations

import argparse
import select
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from kvforge.protocol.messages import DISK_DONE, DISK_READ, DISK_WRITE, DiskOrders
from kvforge.worker.checksums import checksums, weights_of
from kvforge.worker.disk.copier import DiskCopier
from kvforge.worker.disk.copying import CopyingSettings
from kvforge.worker.disk.folder import DiskFolder
from kvforge.worker.disk.segments import Geometry
from kvforge.worker.host_file import HostFile

from .disk_tier import forget_pages
from .host_tier import host_folder
from .report import report

SIZES = {"720 KiB": 30 * 2 * 3 * 64 * 4 * 16, "2 MiB": 32 * 2 * 8 * 128 * 2 * 16}
WAYS = [(1, False), (1, True), (2, True), (4, False), (4, True)]  # readers, direct
TOKENS, EPOCH, MIB = 16, 1, 1 << 20


class Rig:
    """A copier between a host file and a folder, with as many blocks in both.

    Args:
        memory: A folder in memory.
        disk: A folder on the disk.
        block_bytes: Bytes of a block.
        count: Blocks.
        readers: Processes that read.
        direct: Whether they read past the page cache.
    """

    def __init__(self, memory: str, disk: str, block_bytes: int, count: int, readers: int, *, direct: bool) -> None:
        self._block_bytes, self._count, self._number = block_bytes, count, 0
        path = Path(memory) / f"host-{block_bytes}"
        self.host = HostFile(path, "layout", count, block_bytes)
        self._folder, geometry = DiskFolder(Path(disk), "bench"), Geometry(block_bytes, TOKENS)
        bytes_max = (count // geometry.slots + 1) * geometry.size
        segments = self._folder.open("layout", geometry, 2 * bytes_max)
        settings = CopyingSettings(
            socket=-1,
            host=-1,
            host_blocks=count,
            around=str(self._folder.path),
            folder=str(segments.folder),
            identity=segments.identity.hex(),
            block_bytes=block_bytes,
            block_tokens=TOKENS,
            segment_bytes=geometry.segment_bytes,
            segments_max=bytes_max // geometry.size,
            bytes_max=2 * bytes_max,
            key_file="",
            readers=readers,
            direct=direct,
        )
        segments.close()
        self.copier = DiskCopier(settings, self.host.fileno(), (self._folder.fileno(),))

    def fill(self) -> None:
        """Put blocks into the host file."""
        weights, draw = weights_of(self._block_bytes), np.random.default_rng(1)
        for block in range(self._count):
            self.host.data[block] = draw.integers(0, 256, self._block_bytes, np.uint8)
            self.host.sums[block] = checksums(self.host.data[block].reshape(1, -1), weights)[0]
            self.host.tags[block] = 1001 + block

    def copy(self, kind: int) -> float:
        """Copy all blocks to the disk or from it. Return the seconds that this takes."""
        rows = np.zeros((self._count, 9), np.int32)
        blocks = np.arange(self._count)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = self._number + 1 + blocks, kind, blocks, blocks
        rows[:, 4:8] = np.stack([1001 + blocks, np.full(self._count, 77)], 1).astype("<u8").view("<i4")
        rows[:, 8] = 1
        self._number += self._count
        writes = kind == DISK_WRITE
        tokens, owners = np.zeros(self._count * TOKENS * writes, np.int32), np.zeros(2 * self._count * writes, np.int32)
        begun, left = time.perf_counter(), self._count
        self.copier.take(DiskOrders(EPOCH, rows.reshape(-1), tokens, owners))
        while left:
            select.select([self.copier.fileno()], [], [])
            message = self.copier.results(EPOCH)
            if message is not None:
                outcomes = message.results.reshape(-1, 3)[:, 1]
                if (outcomes != DISK_DONE).any():
                    raise RuntimeError(f"a copy ended with outcome {outcomes.max()}: see the log")
                left -= len(outcomes)
        return time.perf_counter() - begun

    def close(self) -> None:
        """End the processes."""
        self.copier.close()
        self.host.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB of all blocks")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for name, block_bytes in SIZES.items():
        count = max(8, options.mib * MIB // block_bytes)
        found = results[name] = {}
        with (
            tempfile.TemporaryDirectory(prefix="kvf-bench-", dir=options.folder) as disk,
            host_folder(2 * count * block_bytes) as memory,
        ):
            for turn in range(options.turns + 1):
                for readers, direct in WAYS:  # in turns: other load of the machine hits each
                    rig = Rig(memory, disk, block_bytes, count, readers, direct=direct)
                    if not turn and not found:
                        rig.fill()
                        rig.copy(DISK_WRITE)
                    forget_pages(Path(disk))
                    way = f"{readers} {'past' if direct else 'through'} the page cache"
                    rate = count * block_bytes / rig.copy(DISK_READ) / MIB
                    found.setdefault(way, []).extend([rate] if turn else [])
                    rig.close()
    rows = [
        [name, way, f"{median(rates):.0f}", f"{median(rates) / median(next(iter(found.values()))):.2f}"]
        for name, found in results.items()
        for way, rates in found.items()
    ]
    header = ["block", "processes that read", "MiB/s (median)", "of the first"]
    report("reads of the disk tier", header, rows, {"mib_per_s": results}, options.json)


if __name__ == "__main__":
    main()
