"""Speed of paged prefill attention, beside FlashInfer's fa3 backend where it is installed.

    python -m benchmarks.gpu_prefill [--json FILE] [--rounds 15]

The attention of one Llama-3.1-8B layer: 32 query heads, 8 KV heads, head size 128, blocks of 16 tokens in random order,
bfloat16, random numbers, causal. "4 x 512 after 7680" are four rows with 512 new tokens each after 7,680 cached ones.

Operations: 4 x head size x query heads for each pair of a query and a key that it sees, itself included; masked pairs
above the diagonal are not counted on any side. A graph holds several calls, on two sets of tensors in turn; the
compared graphs are replayed alternately, and each figure is the median over these rounds.

Error: the largest difference from attention in float64 for some tokens and all heads, relative to the largest number.
Quantised K and V: "copied" includes the time of a dequantising copy into a workspace. "portable" is the kernel for
every GPU, on this one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from kvforge.worker.attention import AttentionOptions, KvLayer
from kvforge.worker.attention.prefill import paged_prefill
from kvforge.worker.attention.prefill_copy import plan_copies, workspace_for
from kvforge.worker.attention.prefill_plan import plan_prefill, prefill_shape
from kvforge.worker.attention.quantised import dequantise, is_quantised
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import current_target

from .gpu_attention import BLOCK_SIZE, LLAMA, Shape, flashinfer_version, stored
from .gpu_timing import Call, captured_in_turn, medians_us
from .report import report

SETS = 2
ROUNDS_MIN = 2  # rounds over all sets in a graph, at least
# (rows, new tokens, cached tokens before them)
CASES = [(1, 2048, 0), (4, 2048, 0), (8, 2048, 0), (1, 8192, 0), (2, 8192, 0), (4, 512, 7680), (1, 2048, 30720)]
QUANTISED_CASES = [(4, 2048, 0), (1, 8192, 0), (4, 512, 7680)]
PORTABLE_CASES = [(4, 2048, 0), (1, 8192, 0)]


@dataclass(frozen=True)
class Setup:
    """SETS of tensors that a call reads and writes, with the same structure."""

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    queries: list[torch.Tensor]
    layers: list[KvLayer]
    tables: torch.Tensor
    outputs: list[torch.Tensor]
    shape: Shape = LLAMA

    @classmethod
    def make(
        cls, rows: int, new: int, cached: int, kv_dtype: torch.dtype, device: torch.device, shape: Shape = LLAMA
    ) -> Setup:
        blocks = (new + cached) // BLOCK_SIZE
        pool_shape = (rows * blocks, BLOCK_SIZE, shape.kv_heads, shape.head_size)
        queries, layers = [], []
        for _ in range(SETS):
            size = (rows * new, shape.heads, shape.head_size)
            queries.append(torch.randn(size, device=device, dtype=torch.bfloat16))
            (k, k_scales), (v, v_scales) = (stored(torch.randn(pool_shape, device=device), kv_dtype) for _ in range(2))
            layers.append(KvLayer(k, v, k_scales, v_scales))
        tables = torch.randperm(rows * blocks, device=device).to(torch.int32).view(rows, blocks)
        outputs = [torch.empty_like(query) for query in queries]
        return cls(np.full(rows, cached), np.full(rows, new), queries, layers, tables, outputs, shape)

    @property
    def options(self) -> AttentionOptions:
        """Options of the layers."""
        return AttentionOptions(self.shape.scaling)

    @property
    def operations(self) -> int:
        pairs = self.counts * self.starts + self.counts * (self.counts + 1) // 2
        return 4 * self.shape.head_size * self.shape.heads * int(pairs.sum())

    @property
    def query_starts(self) -> npt.NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.counts)])

    def error(self) -> float:
        """Return the error of the first set's output, on 8 tokens of the first and of the last row."""
        layer, worst, largest = self.layers[0], 0.0, 0.0
        for row in {0, len(self.counts) - 1}:
            table = self.tables[row].long()
            k, v = (
                dequantise(cache[table], None if scales is None else scales[table]).double().flatten(0, 1)
                for cache, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales))
            )
            for token in np.linspace(0, self.counts[row] - 1, 8).astype(int):
                place = int(self.query_starts[row]) + int(token)
                seen = int(self.starts[row]) + int(token) + 1
                q = self.queries[0][place].double().view(self.shape.kv_heads, -1, self.shape.head_size)
                scores = torch.einsum("hgd,nhd->hgn", q, k[:seen]) * self.shape.scaling
                want = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v[:seen]).flatten(0, 1)
                worst = max(worst, float((self.outputs[0][place].double() - want).abs().max()))
                largest = max(largest, float(want.abs().max()))
        return worst / largest


def ours(setup: Setup, target: Target, copied: bool = False) -> Call:
    """Return a call of `paged_prefill`. copied: dequantise rows into a workspace first."""
    layer = setup.layers[0]
    options = setup.options
    shape = prefill_shape(setup.shape.heads, torch.bfloat16, layer, options, target, copied)
    items = plan_prefill(setup.starts, setup.counts, setup.query_starts, shape.tokens)
    on_device = torch.from_numpy(items).to(layer.keys.device)
    copies = workspace = None
    if copied:
        planned = plan_copies(items)
        workspace = workspace_for(len(planned), layer, torch.bfloat16)
        copies = torch.from_numpy(planned).to(layer.keys.device)

    def call(number: int) -> None:
        one = (setup.queries[number], setup.layers[number], setup.tables, on_device, setup.outputs[number])
        paged_prefill(*one, options, target, copies, workspace)

    return call


def flashinfers(setup: Setup) -> Call:
    """Return a call of FlashInfer's paged prefill, by its fa3 backend."""
    import flashinfer

    device = setup.tables.device
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD", backend="fa3"
    )
    rows, blocks = setup.tables.shape
    numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        torch.from_numpy(setup.query_starts.astype(np.int32)).to(device),
        numbers * blocks,
        setup.tables.flatten(),
        torch.full((rows,), BLOCK_SIZE, dtype=torch.int32, device=device),
        setup.shape.heads,
        setup.shape.kv_heads,
        setup.shape.head_size,
        BLOCK_SIZE,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )

    def call(number: int) -> None:
        layer = setup.layers[number]
        wrapper.run(setup.queries[number], (layer.keys, layer.values), out=setup.outputs[number])

    return call


def measure(
    case: tuple[int, int, int], kv_dtype: torch.dtype, target: Target, device: Device, rounds: int
) -> dict[str, Any]:
    """One case: times in us, errors and TFLOP/s of each way. case: rows, new tokens, cached tokens."""
    rows, new, cached = case
    setup = Setup.make(rows, new, cached, kv_dtype, device.torch_device)
    portable = replace(target, hopper=False)
    calls: dict[str, Call] = {}
    if is_quantised(kv_dtype):
        calls["portable"] = ours(setup, portable)
        heads = setup.shape.heads
        if prefill_shape(heads, torch.bfloat16, setup.layers[0], setup.options, target, copied=True).hopper:
            calls["copied"] = ours(setup, target, copied=True)
    else:
        calls["ours"] = ours(setup, target)
        if flashinfer_version():
            calls["flashinfer"] = flashinfers(setup)
        if case in PORTABLE_CASES:
            calls["portable"] = ours(setup, portable)
    errors = {}
    for name, call in calls.items():
        setup.outputs[0].fill_(torch.nan)
        call(0)
        errors[name] = setup.error()
    graphs = {name: captured_in_turn(device, call, SETS, ROUNDS_MIN) for name, call in calls.items()}
    times = medians_us(device, graphs, rounds)
    after = f" after {cached}" if cached else ""
    result = {
        "case": f"{rows} x {new}{after}",
        "kv": str(kv_dtype).removeprefix("torch."),
        "us": times,
        "error": errors,
    }
    return result | {"tflops": {name: setup.operations / us / 1e6 for name, us in times.items()}}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_prefill needs a CUDA or HIP device", file=sys.stderr)
        return 1
    device = open_device("auto")
    target = current_target(device)
    torch.manual_seed(0)
    wanted = [(case, torch.bfloat16) for case in CASES]
    wanted += [(case, dtype) for case in QUANTISED_CASES for dtype in (torch.int8, torch.float8_e4m3fn)]
    results, rows = [], []
    for case, dtype in wanted:
        result = measure(case, dtype, target, device, arguments.rounds)
        results.append(result)
        print(result, file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        theirs = result["tflops"].get("flashinfer")
        for name in result["us"]:
            share = f"{result['tflops'][name] / theirs:.2f}" if theirs else "-"
            numbers = (f"{result['us'][name]:.1f}", f"{result['tflops'][name]:.0f}", share)
            rows.append([result["case"], result["kv"], name, *numbers, f"{result['error'][name]:.1e}"])
    where = {"gpu": device.name, "triton": triton.__version__}
    where["flashinfer"] = flashinfer_version() or "not installed: nothing to compare with"
    header = ["rows x new tokens", "K and V", "what", "us", "TFLOP/s", "of FlashInfer", "error"]
    report("Paged prefill attention, Llama-3.1-8B shape", header, rows, {**where, "cases": results}, arguments.json)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
