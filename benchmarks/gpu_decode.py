"""Memory bandwidth of paged decode attention, beside FlashInfer where it is installed.

    python -m benchmarks.gpu_decode [--json FILE] [--repeats 20]

The attention of one Llama-3.1-8B layer: 32 query heads, 8 KV heads, head size 128, blocks of 16 tokens in random order,
random numbers. A graph holds many calls, each on the next of several pools, so that no pool is still in the L2 cache
when its turn comes again; all calls share tables and plan, as a model's layers do. Each figure is the median over
replays of a replay's time divided by its calls.

FlashInfer runs with and without tensor cores, and the better time is shown. It chooses its backend (fa2).

Share: bytes of K and V (with scales, if any) / time / read bandwidth, which `gpu_roof` measures in the same
run, as for every benchmark here. Error: greatest difference from attention in float64 over the same stored K and V, for
a few rows, relative to the greatest number of the result.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from kvforge.worker.attention import AttentionOptions, KvLayer
from kvforge.worker.attention.decode import DecodeWorkspace, decode_planner, paged_decode
from kvforge.worker.attention.decode_plan import DecodePlanner
from kvforge.worker.attention.quantised import dequantise, is_quantised
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import current_target

from .gpu_attention import BLOCK_SIZE, LLAMA, Shape, flashinfer_version, stored
from .gpu_roof import read_bandwidth
from .gpu_timing import Call, captured_in_turn, medians_us
from .report import report

POOLS_BYTES_MIN = 1 << 29  # total size of a case's pools: several times any L2
FLASHINFER_TENSOR_CORES = (True, False)  # the better time is reported


def mixed_lengths(rows: int = 128, low: int = 64, high: int = 16_384) -> npt.NDArray[np.int64]:
    """Log-uniform: half of the rows are below 1024, and the longest tenth holds half of all tokens."""
    rng = np.random.default_rng(0)
    return np.exp(rng.uniform(np.log(low), np.log(high), rows)).astype(np.int64)


CASES: dict[str, npt.NDArray[np.int64]] = {
    f"{rows} x {length}": np.full(rows, length, np.int64)
    for rows, length in [(1, 4096), (1, 32768), (16, 4096), (64, 1024), (64, 4096), (256, 1024), (256, 4096)]
}
CASES["128 mixed"] = mixed_lengths()
QUANTISED_CASE = "256 x 4096"


@dataclass
class Setup:
    """Pools of one case. indices: [blocks in use] int32, the rows' blocks one row after the other."""

    lengths: npt.NDArray[np.int64]
    pools: list[KvLayer]
    query: torch.Tensor
    tables: torch.Tensor
    indices: torch.Tensor
    shape: Shape = LLAMA

    @property
    def bytes_read(self) -> int:
        layer = self.pools[0]
        scales = 0 if layer.key_scales is None else 4
        return int(self.lengths.sum()) * self.shape.kv_heads * 2 * (self.shape.head_size * layer.keys.itemsize + scales)

    @classmethod
    def make(
        cls, lengths: npt.NDArray[np.int64], dtype: torch.dtype, device: torch.device, shape: Shape = LLAMA
    ) -> Setup:
        needed = -(-lengths // BLOCK_SIZE)
        blocks = int(needed.sum())
        generator = torch.Generator(device).manual_seed(blocks)
        indices = torch.randperm(blocks, generator=generator, device=device, dtype=torch.int32)
        tables = np.zeros((len(lengths), int(needed.max())), np.int32)
        tables[np.arange(tables.shape[1]) < needed[:, None]] = indices.cpu().numpy()
        pool_shape = (blocks, BLOCK_SIZE, shape.kv_heads, shape.head_size)
        bytes_of_pool = 2 * math.prod(pool_shape) * dtype.itemsize
        pools = []
        for _ in range(max(2, -(-POOLS_BYTES_MIN // bytes_of_pool))):
            halves = []
            for _ in "kv":
                numbers = torch.empty(pool_shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
                halves.append(stored(numbers, dtype))
            (keys, key_scales), (values, value_scales) = halves
            pools.append(KvLayer(keys, values, key_scales, value_scales))
        query = torch.empty((len(lengths), shape.heads, shape.head_size), dtype=torch.bfloat16, device=device)
        query.normal_(generator=generator)
        return cls(lengths, pools, query, torch.from_numpy(tables).to(device), indices, shape)

    def error(self, output: torch.Tensor, pool: KvLayer) -> float:
        """Return the error of a few rows of output [rows, heads, head_size], as the module's docstring defines it."""
        worst = 0.0
        ends = np.cumsum(-(-self.lengths // BLOCK_SIZE))
        for row in {0, int(self.lengths.argmax()), int(self.lengths.argmin()), len(self.lengths) - 1}:
            length = int(self.lengths[row])
            blocks = self.indices[int(ends[row]) - -(-length // BLOCK_SIZE) : int(ends[row])].long()
            k, v = (
                dequantise(cache[blocks], None if scales is None else scales[blocks])
                .flatten(0, 1)[:length]
                .double()
                .repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1)
                for cache, scales in ((pool.keys, pool.key_scales), (pool.values, pool.value_scales))
            )
            weights = (torch.einsum("hd,khd->hk", self.query[row].double(), k) * self.shape.scaling).softmax(-1)
            want = torch.einsum("hk,khd->hd", weights, v)
            worst = max(worst, float((output[row].double() - want).abs().max() / want.abs().max()))
        return worst


class KvforgeDecode:
    """Calls of `paged_decode` on the pools of a setup."""

    def __init__(self, setup: Setup, target: Target, planner: DecodePlanner | None = None) -> None:
        self.setup, self.target = setup, target
        layer, rows, shape = setup.pools[0], len(setup.lengths), setup.shape
        sizes = shape.heads, shape.kv_heads, shape.head_size
        self.planner = planner or decode_planner(rows, *sizes, layer.keys.dtype, 0, target)
        self.plan = torch.from_numpy(self.planner.plan(setup.lengths)).to(setup.query.device)
        self.workspace = DecodeWorkspace.allocate(self.planner, shape.heads, shape.head_size, setup.query.device)
        self.output = torch.empty_like(setup.query)

    def __call__(self, pool: int) -> torch.Tensor:
        paged_decode(
            self.setup.query,
            self.setup.pools[pool],
            self.setup.tables,
            self.plan,
            self.output,
            self.workspace,
            AttentionOptions(self.setup.shape.scaling),
            self.target,
        )
        return self.output


class FlashInfer:
    """The same calls of FlashInfer's decode wrapper, made for CUDA graphs."""

    def __init__(self, setup: Setup, tensor_cores: bool) -> None:
        import flashinfer

        self.setup = setup
        device, rows = setup.query.device, len(setup.lengths)
        needed = -(-setup.lengths // BLOCK_SIZE)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(needed)]).astype(np.int32)).to(device)
        last = torch.from_numpy((setup.lengths - (needed - 1) * BLOCK_SIZE).astype(np.int32)).to(device)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(256 << 20, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=torch.empty(rows + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.empty_like(setup.indices),
            paged_kv_last_page_len_buffer=torch.empty(rows, dtype=torch.int32, device=device),
        )
        dtypes = {"q_data_type": setup.query.dtype, "kv_data_type": setup.pools[0].keys.dtype}
        shape = setup.shape
        sizes = (shape.heads, shape.kv_heads, shape.head_size, BLOCK_SIZE)
        self.wrapper.plan(starts, setup.indices, last, *sizes, sm_scale=shape.scaling, **dtypes)
        self.output = torch.empty_like(setup.query)

    def __call__(self, pool: int) -> torch.Tensor:
        layer = self.setup.pools[pool]
        self.wrapper.run(self.setup.query, (layer.keys, layer.values), out=self.output)
        return self.output


def measure(name: str, dtype: torch.dtype, device: Device, target: Target, repeats: int) -> dict[str, Any]:
    """One case: times in us, errors, and bytes read."""
    setup = Setup.make(CASES[name], dtype, device.torch_device)
    result: dict[str, Any] = {"case": name, "dtype": str(dtype).removeprefix("torch."), "bytes": setup.bytes_read}

    def time_us(call: Call) -> float:
        return medians_us(device, {name: captured_in_turn(device, call, len(setup.pools))}, repeats)[name]

    ours = KvforgeDecode(setup, target)
    result["us"] = time_us(ours)
    result["error"] = setup.error(ours(0), setup.pools[0])
    if flashinfer_version() and not is_quantised(dtype):
        times = {}
        for tensor_cores in FLASHINFER_TENSOR_CORES:
            theirs = FlashInfer(setup, tensor_cores)
            times[tensor_cores] = time_us(theirs)
            result["flashinfer_error"] = setup.error(theirs(0), setup.pools[0])
        result["flashinfer_tensor_cores"] = min(times, key=lambda setting: times[setting])
        result["flashinfer_us"] = min(times.values())
    return result


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_decode needs a CUDA or HIP device", file=sys.stderr)
        return 1
    device = open_device("auto")
    target = current_target(device)
    bandwidth = read_bandwidth(device)
    device.release_cached()
    results = []
    wanted = [(name, torch.bfloat16) for name in CASES]
    wanted += [(QUANTISED_CASE, torch.int8), (QUANTISED_CASE, torch.float8_e4m3fn)]
    for name, dtype in wanted:
        results.append(measure(name, dtype, device, target, arguments.repeats))
        print(results[-1], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    rows = []
    tokens_per_us = {result["dtype"]: 0.0 for result in results}
    for result in results:
        share = result["bytes"] / result["us"] * 1e6 / bandwidth
        theirs = result.get("flashinfer_us")
        their_share = f"{100 * result['bytes'] / theirs * 1e6 / bandwidth:.1f} %" if theirs else "-"
        result["share"] = share
        if result["case"] == QUANTISED_CASE:
            tokens_per_us[result["dtype"]] = 1 / result["us"]
        us = (f"{result['us']:.1f}", f"{theirs:.1f}" if theirs else "-")
        rows.append([f"{result['case']} {result['dtype']}", *us, f"{100 * share:.1f} %", their_share])
        rows[-1].append(f"{result['error']:.1e}")
    gains = {kind: rate / tokens_per_us["bfloat16"] for kind, rate in tokens_per_us.items()}
    where = {"gpu": device.name, "read_tb_per_s": round(bandwidth / 1e12, 3), "triton": triton.__version__}
    where["flashinfer"] = flashinfer_version() or "not installed: its columns are empty"
    document = {**where, "cases": results, "tokens_per_second_over_bfloat16": gains}
    header = ["rows x tokens", "us", "FlashInfer us", "share", "FlashInfer", "error"]
    report("Paged decode attention, Llama-3.1-8B shape", header, rows, document, arguments.json)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    for kind in ("int8", "float8_e4m3fn"):
        print(f"{kind}: {gains[kind]:.2f} x the tokens/s of bfloat16 at {QUANTISED_CASE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
