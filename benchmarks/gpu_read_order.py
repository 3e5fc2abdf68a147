"""How fast tiles of a weight in codes are read from a GPU's memory in the order it is kept in, and in others.

    python -m benchmarks.gpu_read_order [--rows 28672] [--columns 4096] [--json FILE]

Each program reads 64 rows, 128 bytes of each at a time, as the products of few tokens do (`kernels.stored`), and adds
the words. Orders: "units", as kept: 32 bytes of each row of the weight, then the next 32 of each; "tiles": the same
within 64 rows, so that a program reads one piece of memory; "rows": a row after the other, as weights of 16 bits are
kept. "in turn": every 256 rows begin at other columns, as in the products. Several weights are read one after the
other, so that none is in the cache.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import triton
import triton.language as tl

from kvforge.worker.device.device import open_device

from .gpu_roof import read_bandwidth
from .gpu_timing import measure_us
from .report import report

ROWS, UNIT, UNITS = 64, 16, 4  # rows of a tile, words of 16 bits in a unit, units of a step
TURNED = 256
WEIGHTS_BYTES = 2 << 30  # of all weights together
STAGES, WARPS = 4, 4


@triton.jit  # type: ignore[untyped-decorator]
def _read_tile(  # type: ignore[no-untyped-def]
    words,
    sums,
    tile_stride,
    row_stride,
    unit_stride,
    STEPS: tl.constexpr,  # noqa: N803
    TURNS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
    UNITS: tl.constexpr,  # noqa: N803
    TURNED: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, UNIT * UNITS)
    at = words + tl.program_id(0).to(tl.int64) * tile_stride + rows[:, None].to(tl.int64) * row_stride
    at += (columns // UNIT).to(tl.int64)[None, :] * unit_stride + (columns % UNIT)[None, :]
    step_stride = unit_stride.to(tl.int64) * UNITS
    turn = tl.program_id(0) * ROWS // TURNED if TURNS else 0
    total = tl.zeros([ROWS, UNIT * UNITS], tl.int32)
    for index in tl.range(0, STEPS, num_stages=STAGES):
        total += tl.load(at + (index + turn) % STEPS * step_stride, eviction_policy="evict_first").to(tl.int32)
    tl.store(sums + tl.program_id(0) * ROWS + rows, tl.sum(total, axis=1))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=28672)
    parser.add_argument("--columns", type=int, default=4096, help="codes of 8 bits in a row")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = open_device("auto")
    bandwidth = read_bandwidth(device)
    n, k = arguments.rows, arguments.columns
    units, size = k // 32, n * k
    ways = max(1, WEIGHTS_BYTES // size)
    words = torch.randint(-100, 100, (ways, size // 2), dtype=torch.int16, device=device.torch_device)
    sums = torch.empty(n, dtype=torch.int32, device=device.torch_device)
    # Words from tile to tile, row to row, and unit to unit.
    orders = {
        "units": (ROWS * UNIT, UNIT, n * UNIT),
        "tiles": (ROWS * UNIT * units, UNIT, ROWS * UNIT),
        "rows": (ROWS * UNIT * units, UNIT * units, UNIT),
    }

    def read(strides: tuple[int, int, int], turns: bool) -> None:
        for weight in words:
            _read_tile[(n // ROWS,)](
                *(weight, sums, *strides),
                STEPS=units // UNITS,
                TURNS=turns,
                ROWS=ROWS,
                UNIT=UNIT,
                UNITS=UNITS,
                TURNED=TURNED,
                STAGES=STAGES,
                num_warps=WARPS,
            )

    rows: list[list[object]] = []
    results: list[dict[str, object]] = []
    for name, strides in orders.items():
        for turns in (False, True):
            us = measure_us(device, partial(read, strides, turns), ways)
            what, share = f"{name}, in turn" if turns else name, size / bandwidth * 1e6 / us
            rows.append([what, f"{us:.1f}", f"{share:.0%}"])
            results.append({"order": what, "us": us, "share": share})
            print(*rows[-1], flush=True)
    title = f"{n} x {k} bytes on {device.name}: read {bandwidth / 1e12:.2f} TB/s; microseconds of a weight"
    report(title, ["order", "us", "share"], rows, {"device": device.name, "measured": results}, arguments.json)


if __name__ == "__main__":
    main()
