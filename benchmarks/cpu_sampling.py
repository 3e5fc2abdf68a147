"""Cost of sampling in a step on the CPU, by the worker's kernels and in plain torch, in alternation.

    python -m benchmarks.cpu_sampling [--vocab 49152] [--rows 1 8] [--repeats 15] [--json FILE]

Logits are normally distributed with a deviation of 5, which leaves a nucleus of some hundred tokens; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks.report import report
from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.sampling.sampler import SamplingState

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
    "log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
}


class Side:
    """Rows with the same sampling parameters, sampled as the worker's runner does."""

    def __init__(self, device: Device, sampling: SamplingParams, rows: int, vocab: int) -> None:
        self._state, self._slots = SamplingState(rows, vocab, device), np.arange(rows)
        for slot in range(rows):
            self._state.begin(RowStart(slot=slot, request_id=slot, sampling=sampling, seed=slot))
        self._state.upload_starts()
        self._simple = bool(self._state.splits and self._state.simple(self._slots).all())
        self._on_device, self._wanted = torch.arange(rows), torch.ones(rows, dtype=torch.int64)
        self._packed = torch.empty(3 * rows, dtype=torch.int32)

    def run_ms(self, logits: torch.Tensor) -> float:
        """One step."""
        began = time.perf_counter()
        if self._simple:
            self._state.sample_simple(logits, self._on_device, self._wanted, self._packed)
        else:
            self._state.sample(logits, self._slots).to_host()
        return (time.perf_counter() - began) * 1e3


@torch.inference_mode()
def measure(sampling: SamplingParams, rows: int, vocab: int, repeats: int) -> tuple[float, float]:
    """Medians of both sides in ms: the kernels, plain torch."""
    device = open_device("cpu")
    sides = [Side(each, sampling, rows, vocab) for each in (device, replace(device, kernels=False))]
    generator = torch.Generator().manual_seed(0)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(repeats + 2):
        logits = torch.randn(rows, vocab, generator=generator) * 5
        for side, seen in zip(sides, times, strict=True):
            took = side.run_ms(logits)
            if index >= 2:  # compiled, and its memory is there
                seen.append(took)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152, help="[49152]")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="[1 8]")
    parser.add_argument("--repeats", type=int, default=15, help="[15]")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows: list[list[object]] = []
    found: dict[str, dict[str, float]] = {}
    for name, sampling in KINDS.items():
        for count in options.rows:
            ours, plain = measure(sampling, count, options.vocab, options.repeats)
            found[f"{name}, {count}"] = {"kernels_ms": ours, "plain_torch_ms": plain}
            rows.append([name, count, f"{ours:.3f}", f"{plain:.2f}", f"{plain / ours:.1f}"])
    results = {"vocab": options.vocab, "repeats": options.repeats, "medians": found}
    report(
        f"choosing tokens of {options.vocab}", ["kind", "rows", "kernels ms", "plain torch ms", "x"], rows, results,
        options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
