"""Decode attention on a CPU over a common prefix: read once for all rows, beside read by each row.

    python -m benchmarks.cpu_shared_reads [--prefix 4096] [--own 64] [--rows 1 2 5 16 64 256] [--json FILE]

Rows have a common prefix and some tokens of their own. Both sides call the same kernel with the same blocks; on one
side its plan does not look for common prefixes. Calls alternate, and the median of each side counts. Results must have
the same bits. Shapes: attention of SmolLM2-135M (9 heads, 3 for KV, of 64) and of Llama-3.1-8B (32 heads, 8 for KV, of
128), one layer, in the KV dtypes float32 and bfloat16.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from unittest.mock import patch

import numpy as np
import torch

from kvforge.worker.attention import AttentionOptions, KvLayer, PagedBatch, cpu_attention
from kvforge.worker.attention.cpu_attention import CpuAttention
from kvforge.worker.device.device import open_device

from .report import report

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}
BLOCK_SIZE = 16


def tables_of(rows: int, prefix: int, own: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Return block tables [rows, width] that have their first `prefix` tokens in common."""
    common, further = prefix // BLOCK_SIZE, -(-own // BLOCK_SIZE)
    tables = np.zeros((rows, common + further), np.int32)
    tables[:, :common] = np.arange(common)
    tables[:, common:] = common + np.arange(rows * further).reshape(rows, further)
    return tables


def measure(shape: tuple[int, int, int], dtype: torch.dtype, rows: int, options: argparse.Namespace) -> list[float]:
    """Return the median microseconds of a call that reads each row by itself, and of one that does not."""
    heads, kv_heads, size = shape
    tables = tables_of(rows, options.prefix, options.own)
    blocks = int(tables.max()) + 1
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn((blocks, BLOCK_SIZE, kv_heads, size), generator=generator).to(dtype) for _ in range(2))
    query = torch.randn((rows, heads, size), generator=generator).to(dtype)
    starts = np.full(rows, options.prefix + options.own - 1, np.int32)
    device, attend_options = open_device("cpu"), AttentionOptions(size**-0.5)
    attention, layer = CpuAttention(), KvLayer(keys, values)
    took: list[list[float]] = [[], []]
    batches = [PagedBatch.build(tables, starts, np.ones(rows, np.int32), BLOCK_SIZE, device) for _ in took]
    found = [torch.empty(0)] * 2
    with patch.object(cpu_attention, "shared_prefixes", lambda *_: []):
        found[0] = attention.attend(query, layer, batches[0], attend_options)  # makes the plan
    for number in range(2 * options.repeats + 4):
        side = number % 2
        begin = perf_counter()
        found[side] = attention.attend(query, layer, batches[side], attend_options)
        if number >= 4:
            took[side].append(1e6 * (perf_counter() - begin))
    assert torch.equal(*found), "the bits differ"
    return [median(each) for each in took]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_shared_reads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prefix", type=int, default=4096, help="common tokens, a multiple of 16 [4096]")
    parser.add_argument("--own", type=int, default=64, help="further tokens of each row [64]")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    if options.prefix % BLOCK_SIZE:
        parser.error(f"--prefix {options.prefix} is no multiple of {BLOCK_SIZE}")
    rows, results = list[list[object]](), list[dict[str, object]]()
    for name, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for count in options.rows:
                alone, shared = measure(shape, dtype, count, options)
                kind = str(dtype).removeprefix("torch.")
                rows.append([name, kind, count, f"{alone:.0f}", f"{shared:.0f}", f"{alone / shared:.2f} x"])
                results.append({"shape": name, "dtype": kind, "rows": count, "alone_us": alone, "shared_us": shared})
    header = ["shape", "K and V", "rows", "each by itself, us", "prefix read once, us", "ratio"]
    title = (
        f"decode attention of one layer, {options.prefix} common tokens and {options.own} of each row, "
        f"{torch.get_num_threads()} threads"
    )
    report(title, header, rows, results, options.json)


if __name__ == "__main__":
    main()
