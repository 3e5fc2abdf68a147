"""Attention by head size: heads of 96 numbers, which is no power of two, beside heads of 64 and 128.

    python -m benchmarks.gpu_head_sizes [--json FILE] [--repeats 20]

One layer with 32 query heads and 32 KV heads (Phi-3-mini has such heads of 96 numbers), bfloat16, without FlashInfer.
Setups, shares and errors are those of `gpu_decode` and `gpu_prefill`. Without a loss, the share of the bandwidth and
the operations per second do not depend on the head size.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton

from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import current_target

from . import gpu_decode, gpu_prefill
from .gpu_attention import Shape
from .gpu_roof import read_bandwidth
from .gpu_timing import captured_in_turn, medians_us
from .report import report

HEADS, SIZES = 32, (64, 96, 128)
DECODES = ((16, 1024), (64, 1024))  # rows, tokens
PREFILLS = ((4, 1024, 0), (1, 8192, 0))  # rows, new tokens, cached tokens


def decode(rows: int, tokens: int, size: int, device: Device, target: Target, repeats: int) -> dict[str, Any]:
    """Measure decodes: microseconds, bytes read and error."""
    lengths = np.full(rows, tokens, np.int64)
    setup = gpu_decode.Setup.make(lengths, torch.bfloat16, device.torch_device, Shape(HEADS, HEADS, size))
    ours = gpu_decode.KvforgeDecode(setup, target)
    graph = captured_in_turn(device, ours, len(setup.pools))
    us = medians_us(device, {"": graph}, repeats)[""]
    return {"us": us, "bytes": setup.bytes_read, "error": setup.error(ours(0), setup.pools[0])}


def prefill(case: tuple[int, int, int], size: int, device: Device, target: Target, repeats: int) -> dict[str, Any]:
    """Measure a prefill: microseconds, TFLOP/s and error."""
    setup = gpu_prefill.Setup.make(*case, torch.bfloat16, device.torch_device, Shape(HEADS, HEADS, size))
    call = gpu_prefill.ours(setup, target)
    graph = captured_in_turn(device, call, gpu_prefill.SETS, gpu_prefill.ROUNDS_MIN)
    us = medians_us(device, {"": graph}, repeats)[""]
    return {"us": us, "tflops": setup.operations / us / 1e6, "error": setup.error()}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_head_sizes needs a CUDA or HIP device", file=sys.stderr)
        return 1
    device = open_device("auto")
    target = current_target(device)
    torch.manual_seed(0)
    bandwidth = read_bandwidth(device)
    device.release_cached()
    results, rows = [], []
    kernels = {"prefill": target} | ({"portable prefill": replace(target, hopper=False)} if target.hopper else {})
    for size in SIZES:
        for count, tokens in DECODES:
            found = decode(count, tokens, size, device, target, arguments.repeats)
            found["share"] = found["bytes"] / found["us"] * 1e6 / bandwidth
            rate = f"{100 * found['share']:.1f} %"
            results.append({"what": "decode", "head_size": size, "case": f"{count} x {tokens}", **found})
            rows.append([size, "decode", f"{count} x {tokens}", f"{found['us']:.1f}", rate, f"{found['error']:.1e}"])
        for case in PREFILLS:
            for name, kernel in kernels.items():
                found, name_of_case = prefill(case, size, device, kernel, arguments.repeats), f"{case[0]} x {case[1]}"
                rate = f"{found['tflops']:.0f} TFLOP/s"
                results.append({"what": name, "head_size": size, "case": name_of_case, **found})
                rows.append([size, name, name_of_case, f"{found['us']:.1f}", rate, f"{found['error']:.1e}"])
        torch.cuda.empty_cache()
    where = {"gpu": device.name, "read_tb_per_s": round(bandwidth / 1e12, 3), "triton": triton.__version__}
    header = ["head size", "kernel", "rows x tokens", "us", "share of bandwidth, or rate", "error"]
    report("Paged attention by head size", header, rows, {**where, "cases": results}, arguments.json)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
