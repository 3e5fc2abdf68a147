"""A host file in small and in huge pages, on a CPU: its start, and copies of its blocks.

    python -m benchmarks.host_pages [--megabytes 2048] [--block 1048576] [--rounds 5] [--json FILE]    about 30 s

Small pages are those of a process that opted out of huge ones (PR_SET_THP_DISABLE) while it makes the file. Both kinds
take turns, and each figure is the median of the rounds:

- made: seconds until a new file has all its memory.
- made again: the same at once after that file was removed. On a virtual machine the first one may wait for memory of
  the host, which has got free memory of the guest back.
- touched: seconds in which a successor writes a byte of each page of 4 KiB.
- first: GB/s at which a successor copies all blocks in random order into the file, which it has just mapped.
- to the file, from the file: GB/s of such copies, when all is mapped.
- spread: reads of 8 bytes a microsecond, at random places of the file.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from kvforge.worker.device.file_pages import huge_bytes
from kvforge.worker.host_file import PAGE, HostFile

from .host_tier import host_folder
from .report import report

PR_SET_THP_DISABLE = 41
COPY_BLOCKS = 16  # of the buffer beside the file: it stays in a cache, so that the file's side decides
READS = 4_000_000
Figures = dict[str, float]
Octets = npt.NDArray[np.uint8]


@contextmanager
def small_pages(wanted: bool) -> Iterator[None]:
    """Have this process get no huge pages meanwhile, if that is wanted."""
    control = ctypes.CDLL(None).prctl
    assert control(PR_SET_THP_DISABLE, int(wanted), 0, 0, 0) == 0
    try:
        yield
    finally:
        assert control(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(path: Path, blocks: int, block_bytes: int, small: bool) -> Figures:
    """Return the figures of one file, which is removed."""
    opened: list[HostFile] = []

    def open_file() -> None:
        opened.append(HostFile(path, "benchmark", blocks, block_bytes))

    rng = np.random.default_rng(0)
    order, gb = rng.permutation(blocks).tolist(), blocks * block_bytes / 1e9
    buffer = rng.integers(0, 256, (COPY_BLOCKS, block_bytes), np.uint8)

    def copy_in(data: Octets) -> None:
        for at, block in enumerate(order):
            data[block] = buffer[at % COPY_BLOCKS]

    def copy_out(data: Octets) -> None:
        for at, block in enumerate(order):
            buffer[at % COPY_BLOCKS] = data[block]

    def touch(memory: Octets) -> None:
        memory[::PAGE] = 1

    found: Figures = {}
    with small_pages(small):
        for name in ("made", "made again"):
            path.unlink(missing_ok=True)
            found[name] = seconds(open_file)
            opened.pop().close()
    open_file()
    assert opened[0].found
    found["touched"] = seconds(lambda: touch(opened[0].memory))
    found["huge MiB"] = huge_bytes(opened[0].whole.ctypes.data, opened[0].whole.nbytes) >> 20
    opened.pop().close()
    open_file()
    file = opened.pop()
    found["first"] = gb / seconds(lambda: copy_in(file.data))
    found["to the file"] = gb / seconds(lambda: copy_in(file.data))
    found["from the file"] = gb / seconds(lambda: copy_out(file.data))
    places = rng.integers(0, file.memory.size // 8, READS)
    found["spread"] = READS / 1e6 / seconds(lambda: file.memory.view(np.uint64)[places].sum())
    file.close()
    path.unlink()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes of a block, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    blocks = (options.megabytes << 20) // options.block
    rounds: dict[str, list[Figures]] = {"small": [], "huge": []}
    with host_folder(options.megabytes << 20) as folder:
        for _ in range(options.rounds):
            for name, each in rounds.items():
                each.append(measure(Path(folder) / "file", blocks, options.block, name == "small"))
    names = list(rounds["small"][0])
    found = {kind: {name: median(each[name] for each in runs) for name in names} for kind, runs in rounds.items()}
    rows = [[name, *(f"{found[kind][name]:.3g}" for kind in rounds)] for name in names]
    results = {"blocks": blocks, "block_bytes": options.block, "medians": found, "rounds": rounds}
    report("a host file in small and in huge pages", ["", *rounds], rows, results, options.json)


if __name__ == "__main__":
    main()
