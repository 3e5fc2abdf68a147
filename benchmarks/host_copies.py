"""Where the time of the host tier's copies goes: rates of ways that differ in one thing each.

    python -m benchmarks.host_copies [--megabytes 1024] [--kv bfloat16] [--json FILE]    one GPU, about 30 s
    python -m benchmarks.host_copies --cpu                                               a tiny pool, to try it

Each way copies as many bytes between the GPU and the host, in both directions:

- pinned: one copy, memory that the driver allocated. The others are compared with it.
- huge: copies of 32 MiB, registered memory of the process that asks for huge pages.
- small: the same without huge pages.
- file: copies of 32 MiB, a registered file in memory, as the tier has it.
- file, blocks: a copy for each block, in random order.
- tier, in order: the tier's own copies, neighbouring blocks: one copy for each buffer of 16 MiB.
- tier, runs: the same at the places that the coordinator gives in a file that was written ten times over.
- tier: the same in random order, a copy for each block.
- tier, 64 MiB: buffers of 64 MiB.

It also shows how fast the driver page-locks a file in huge and in small pages.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvforge.worker.attention.pool import KvGeometry, KvPool, LayerShape
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.host_memory import PIECE_BYTES, LockedPieces, registrar_of
from kvforge.worker.host_file import HostFile
from kvforge.worker.step import host_transfers
from kvforge.worker.step.host_transfers import HostTransfers

from .host_runs import aged_places
from .host_tier import HEAD, HEADS, LAYERS, best, copies_of, host_folder, plain_rates, rates_at
from .report import report
from .step_plan import BLOCK_SIZE

Rates = dict[str, float]
LARGE_BUFFER = 64 << 20
LOCKING = "page-locking"


@contextmanager
def locked(device: Device, octets: Any, block_bytes: int) -> Iterator[LockedPieces]:
    """Yield memory that is page-locked as a whole."""
    pieces = LockedPieces(registrar_of(device), octets, block_bytes, PIECE_BYTES)
    while pieces.lock_next():
        pass
    try:
        yield pieces
    finally:
        pieces.close()


def rates_of(device: Device, host: torch.Tensor, parts: list[slice]) -> Rates:
    """Return GB/s of copies between parts of memory of the host, [bytes], and the same parts on the device."""
    ours = torch.empty(host.numel(), dtype=torch.uint8, device=device.torch_device)

    def copied(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            for part in parts:
                target[part].copy_(source[part], non_blocking=True)
            device.synchronize()

        return run

    pairs = {"to host": (host, ours), "from host": (ours, host)}
    return {way: host.numel() / best(copied(*pair)) / 1e9 for way, pair in pairs.items()}


def anonymous(device: Device, size: int, block_bytes: int, advice: int | None) -> Rates:
    """Return the rates with memory of the process."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice is not None:
        area.madvise(advice)
    octets = np.frombuffer(area, np.uint8)
    octets[:: mmap.PAGESIZE] = 1
    with locked(device, octets, block_bytes):
        return rates_of(device, torch.from_numpy(octets), pieces_of(size, piece_bytes(block_bytes)))


def piece_bytes(block_bytes: int) -> int:
    """Return the bytes of a locked piece."""
    step: int = mmap.PAGESIZE // np.gcd(block_bytes, mmap.PAGESIZE).item() * block_bytes
    return -(-PIECE_BYTES // step) * step


def pieces_of(size: int, each: int) -> list[slice]:
    """Return the parts of so many bytes."""
    return [slice(at, min(at + each, size)) for at in range(0, size, each)]


def tier_rates(
    device: Device, geometry: KvGeometry, count: int, file: Path, places: list[int] | None, buffer: int = 0
) -> Rates:
    """Return the rates of the tier's own copies, at these places of a file of twice the blocks, or at random ones."""
    before = host_transfers.BUFFER_BYTES
    host_transfers.BUFFER_BYTES = buffer or before
    pool = KvPool(geometry, count, device)
    host = HostTransfers(pool, HostFile(file, "benchmark", 2 * count, geometry.bytes_per_block))
    rng = np.random.default_rng(0)
    copies = copies_of(rng.permutation(count).tolist(), places or rng.permutation(2 * count)[:count].tolist())
    rates = rates_at(device, host, copies, count * geometry.bytes_per_block)
    host.close()
    pool.close()
    host_transfers.BUFFER_BYTES = before
    return rates


def lock_rates(device: Device, folder: Path, count: int, each: int) -> Rates:
    """Return how many GB of a new file are page-locked in a second, by the kind of its pages."""
    found = {}
    for name, huge in (("huge pages", True), ("small pages", False)):
        file = HostFile(folder / name.replace(" ", "-"), "benchmark", count, each, huge=huge)
        began = time.perf_counter()
        with locked(device, file.memory, each):
            found[name] = file.memory.nbytes / (time.perf_counter() - began) / 1e9
        file.close()
    return found


def measure(device: Device, geometry: KvGeometry, size: int) -> dict[str, Rates]:
    """Return the rates of all ways."""
    each = geometry.bytes_per_block
    count = max(2, size // each)
    size = count * each
    found = {"pinned": plain_rates(device, size)}
    found["huge"] = anonymous(device, size, each, getattr(mmap, "MADV_HUGEPAGE", None))
    found["small"] = anonymous(device, size, each, getattr(mmap, "MADV_NOHUGEPAGE", None))
    with host_folder(5 * size) as folder:
        path = Path(folder) / "file"
        file = HostFile(path, "benchmark", count, each)
        blocks = np.random.default_rng(0).permutation(count)
        with locked(device, file.memory, each):
            octets = torch.from_numpy(file.memory)
            found["file"] = rates_of(device, octets, pieces_of(size, piece_bytes(each)))
            found["file, blocks"] = rates_of(
                device, octets, [slice(at * each, (at + 1) * each) for at in blocks.tolist()]
            )
            del octets
        file.close()
        found[LOCKING] = lock_rates(device, Path(folder), count, each)
        found["tier, in order"] = tier_rates(device, geometry, count, path, list(range(count)))
        found["tier, runs"] = tier_rates(device, geometry, count, path, aged_places(count))
        found["tier"] = tier_rates(device, geometry, count, path, None)
        found["tier, 64 MiB"] = tier_rates(device, geometry, count, path, None, LARGE_BUFFER)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny pool on a CPU")
    parser.add_argument("--kv", default="bfloat16", help="dtype of K and V")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    device = open_device("cpu" if options.cpu else "auto")
    shape = LayerShape(2, 16) if options.cpu else LayerShape(HEADS, HEAD)
    geometry = KvGeometry((shape,) * (2 if options.cpu else LAYERS), BLOCK_SIZE, options.kv)
    found = measure(device, geometry, (8 if options.cpu else options.megabytes) << 20)
    plain = found["pinned"]
    rows = [
        [name, *(f"{rates[way]:.1f} ({rates[way] / plain[way]:.2f})" for way in ("to host", "from host"))]
        for name, rates in found.items()
        if name != LOCKING
    ]
    rows += [[f"{LOCKING}, {pages}", f"{rate:.1f}", ""] for pages, rate in found[LOCKING].items()]
    header = ["way", "to the host, GB/s (share)", "from the host"]
    results = {"device": device.name, "bytes_per_block": geometry.bytes_per_block, "rates": found}
    report(f"copies of the host tier, {device.name}, {options.kv}", header, rows, results, options.json)


if __name__ == "__main__":
    main()
