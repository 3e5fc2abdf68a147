"""Decode attention on a GPU over what rows have in common: read once for several rows, beside read by each row.

    python -m benchmarks.gpu_shared_reads [--repeats 20] [--variants] [--json FILE]

The attention of one Llama-3.1-8B layer: 32 query heads, 8 KV heads of 128, blocks of 16 tokens. Cases: forks of a long
prompt, samples of one prompt, and a request's last token with four drafts. Both sides run as a worker that keeps bits
steady runs them, over the same pools; graphs of both alternate, and the median of each counts (see `gpu_decode`).
Results must have the same bits. Plan: the host's time to find what is common and to plan both launches.

Variants: programs with other numbers of queries, tiles of these, warps and stages of the loop than this GPU's.

Sharing is forced in every case; "used" says whether a worker would share there (see `shared_plan.SAVED_BYTES_MIN`).
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from kvforge.worker.attention import AttentionOptions, KvLayer
from kvforge.worker.attention import shared_decode as launching
from kvforge.worker.attention.decode import DecodeWorkspace, paged_decode
from kvforge.worker.attention.shared_decode import Program, shared_decode, shared_planner
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import current_target

from .gpu_attention import BLOCK_SIZE, LLAMA, stored
from .gpu_decode import POOLS_BYTES_MIN
from .gpu_timing import captured_in_turn, medians_us
from .report import report


@dataclass(frozen=True)
class Rows:
    """Rows with `common` tokens in common. Row i has `own + growth x i` further tokens, in blocks of its own if any.

    drafts: Rows are tokens of one request: all have the same blocks.
    """

    rows: int
    common: int
    own: int = 64
    growth: int = 0
    drafts: bool = False

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[rows] tokens."""
        return self.common + self.own + self.growth * np.arange(self.rows)

    def tables(self) -> npt.NDArray[np.int64]:
        """[rows, width], blocks in random order."""
        width = -(-int(self.lengths.max()) // BLOCK_SIZE)
        shared = width if self.drafts else self.common // BLOCK_SIZE
        tables = np.tile(np.arange(width), (self.rows, 1))
        own = width - shared
        tables[:, shared:] = shared + np.arange(self.rows * own).reshape(self.rows, own)
        return np.random.default_rng(0).permutation(int(tables.max()) + 1)[tables]


CASES = {
    "256 forks of 32768": Rows(256, 32768),
    "64 samples of 8192": Rows(64, 8192),
    "8 samples of 8192": Rows(8, 8192),
    "64 requests, 4096 in common, other lengths": Rows(64, 4096, growth=23),
    "64 requests, 1024 in common": Rows(64, 1024),
    "1 + 4 drafts at 8000": Rows(5, 8000, 0, 1, drafts=True),
    "1 + 4 drafts at 1000": Rows(5, 1000, 0, 1, drafts=True),
}
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


WIDE = [Program(64, 1, 4, stages, 4) for stages in (1, 2, 3)] + [Program(128, 1, 8, stages, 4) for stages in (1, 2, 3)]
VARIANTS = [Program(16, tiles, 4, stages) for tiles in (1, 2, 4) for stages in (3, 5)] + WIDE


def measure(name: str, dtype: torch.dtype, device: Device, target: Target, repeats: int) -> dict[str, Any]:
    """Return the times of a case in microseconds, and what its plans share."""
    case, sizes = CASES[name], (LLAMA.heads, LLAMA.kv_heads, LLAMA.head_size)
    lengths, tables = case.lengths, case.tables()
    planner = shared_planner(len(lengths), *sizes, dtype, 0, target)
    assert planner is not None, "this target shares no reads"
    planned = list[float]()
    for _ in range(5):
        begin = perf_counter()
        plans = planner.plan(tables, lengths, BLOCK_SIZE, 0)
        planned.append(1e6 * (perf_counter() - begin))
    assert plans is not None, "nothing is shared"
    on, blocks = device.torch_device, int(tables.max()) + 1
    generator = torch.Generator(on).manual_seed(1)
    shape = (blocks, BLOCK_SIZE, *sizes[1:])
    pools = list[KvLayer]()
    for _ in range(max(2, -(-POOLS_BYTES_MIN // (blocks * BLOCK_SIZE * planner.token_bytes)))):
        halves = [
            stored(torch.empty(shape, dtype=torch.bfloat16, device=on).normal_(generator=generator), dtype)
            for _ in "kv"
        ]
        pools.append(KvLayer(*(kept for kept, _ in halves), *(scales for _, scales in halves)))
    query = torch.empty((len(lengths), *sizes[::2]), dtype=torch.bfloat16, device=on).normal_(generator=generator)
    workspace = DecodeWorkspace.allocate(planner.decode, sizes[0], sizes[2], on)
    table, alone, own, shared = (
        torch.from_numpy(array.astype(np.int32)).to(on)
        for array in (tables, planner.decode.plan(lengths), plans.own, plans.shared)
    )
    options, outputs = AttentionOptions(LLAMA.scaling), [torch.empty_like(query) for _ in range(2)]

    def attend(side: int, pool: int) -> None:
        if side:
            shared_decode(query, pools[pool], table, shared, workspace, options, target)
        plan = own if side else alone
        paged_decode(query, pools[pool], table, plan, outputs[side], workspace, options, target)

    for side in range(2):
        attend(side, 0)
    same = torch.equal(*outputs)
    graphs = {str(side): captured_in_turn(device, partial(attend, side), len(pools)) for side in range(2)}
    times = medians_us(device, graphs, repeats)
    return {
        "case": name,
        "dtype": str(dtype).removeprefix("torch."),
        "alone_us": times["0"],
        "shared_us": times["1"],
        "same_bits": same,
        "plan_us": median(planned),
        "used": planner.plan(tables, lengths, BLOCK_SIZE) is not None,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_shared_reads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--variants", action="store_true", help="other programs than this GPU's")
    parser.add_argument("--json", help="write the results here too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_shared_reads needs a CUDA or HIP device", file=sys.stderr)
        return 1
    device = open_device("auto")
    target = replace(current_target(device), steady=True)
    results = []
    for program in VARIANTS if arguments.variants else [None]:
        with patch.object(launching, "choose_program", lambda *_, one=program: one) if program else nullcontext():
            for dtype, name in product(DTYPES, arguments.cases):
                found = measure(name, dtype, device, target, arguments.repeats)
                if program is not None:
                    found["case"] += f", {program}"
                results.append(found)
                print(found, file=sys.stderr, flush=True)
                torch.cuda.empty_cache()
    rows = [
        [
            f"{each['case']} {each['dtype']}",
            *(f"{each[name]:.1f}" for name in ("alone_us", "shared_us")),
            f"{each['alone_us'] / each['shared_us']:.2f} x",
            *("yes" if each[name] else "no" for name in ("same_bits", "used")),
            f"{each['plan_us']:.0f}",
        ]
        for each in results
    ]
    header = ["rows", "each by itself, us", "common parts once, us", "ratio", "same bits", "used", "plan, us"]
    report("Decode attention of one layer, Llama-3.1-8B shape", header, rows, results, arguments.json)
    print(f"gpu {device.name}")
    return 0 if all(each["same_bits"] for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
