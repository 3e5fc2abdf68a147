"""Memory bandwidth of paged decode attention over latents, and operations a second of prefill attention.

    python -m benchmarks.gpu_latent [--json FILE] [--repeats 20] [--heads 16 128] [--rows 1 16 64]
                                    [--kv-dtype fp8] [--prefill] [--sweep]

The attention of one layer of DeepSeek-V2 or V3: latents of 512 numbers and rotary keys of 64, stored once for a token
in bfloat16, int8 or fp8, blocks of 16 tokens in random order. 16 query heads are those of DeepSeek-V2-Lite, or of V3 on
eight ranks. A graph holds many calls, each on the next of several pools, so that no pool is still in the L2 cache when
its turn comes again.

Share: bytes of the latents / time / read bandwidth, which `gpu_roof` measures in the same run. Error: greatest
difference from attention in float64 over the same latents, for two rows, relative to the greatest number of the result.
Parts: time without the merge of parts. Empty: time of a call whose rows have no tokens, which launches both kernels for
nothing.

`--sweep` times other divisions of the rows. Their bits differ from those that are served.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton

from kvforge.worker.attention import AttentionOptions, KvLayer, PagedBatch
from kvforge.worker.attention import latent_plan as planning
from kvforge.worker.attention.expanded import prompt_parts
from kvforge.worker.attention.expanded_space import EXPANDED_TOKENS_MAX
from kvforge.worker.attention.latent_decode import LatentWorkspace, compute_items, latent_decode, latent_planner
from kvforge.worker.attention.latent_prefill import latent_prefill, latent_prefill_tokens
from kvforge.worker.attention.plan_items import FIELDS
from kvforge.worker.attention.pool import KV_DTYPES
from kvforge.worker.attention.prefill_plan import plan_prefill
from kvforge.worker.attention.quantised import as_bytes, dequantise, is_quantised, quantise
from kvforge.worker.attention.triton_attention import TritonAttention
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import current_target
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.latent import attend_expanded
from kvforge.worker.kernels.layer_weights import LatentAttention

from .gpu_roof import Roof, measure_roof
from .gpu_timing import captured_in_turn, medians_us
from .report import report

LATENT, ROPE, BLOCK_SIZE = 512, 64, 16
PLAIN, VALUE = 128, 128  # numbers of an expanded key without rotation, and of a value
LENGTHS = (1024, 4096, 16_384)
POOLS_BYTES_MIN = 1 << 29
SCALING = 192**-0.5
PREFILLS = ((1, 2048, 0), (1, 8192, 0), (4, 512, 7680))  # rows, new tokens, tokens before
# PART_MIN, GROUP_MIN, GROUPS_MAX: see `latent_plan`.
DIVISIONS = ((128, 4, 8), (64, 8, 8), (128, 2, 16), (128, 8, 8), (128, 4, 16))


@dataclass
class Setup:
    """Pools [blocks, BLOCK_SIZE, 1, LATENT + ROPE] of one case with their scales, and its rows' blocks."""

    pools: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    query: torch.Tensor
    tables: torch.Tensor
    length: int

    @property
    def bytes_read(self) -> int:
        of_token = (LATENT + ROPE) * self.pools[0].itemsize + (0 if self.scales[0] is None else 4)
        return len(self.tables) * self.length * of_token

    @classmethod
    def make(
        cls,
        rows: int,
        length: int,
        heads: int,
        device: torch.device,
        tokens: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Setup:
        """Return pools of a KV dtype, and queries of one token of each row, or of `tokens` tokens in all."""
        width = -(-length // BLOCK_SIZE)
        generator = torch.Generator(device).manual_seed(rows * length)
        tables = torch.randperm(rows * width, generator=generator, device=device, dtype=torch.int32).view(rows, width)
        shape = (rows * width, BLOCK_SIZE, 1, LATENT + ROPE)
        count = max(2, -(-POOLS_BYTES_MIN // (int(np.prod(shape)) * dtype.itemsize)))
        numbers = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        first, scale = quantise(numbers, dtype) if is_quantised(dtype) else (numbers, None)
        pools = [first, *(first.clone() for _ in range(count - 1))]
        scales = [None if scale is None else scale.clone() for _ in pools]
        query = torch.empty((tokens or rows, heads, LATENT + ROPE), dtype=torch.bfloat16, device=device)
        return cls(pools, scales, query.normal_(generator=generator), tables, length)

    def error(self, output: torch.Tensor) -> float:
        """Return the error of output [rows, heads, LATENT], as the module's docstring defines it."""
        worst = 0.0
        for row in (0, len(self.tables) - 1):
            blocks, scales = self.tables[row].long(), self.scales[0]
            stored = as_bytes(self.pools[0])[blocks].view(self.pools[0].dtype)
            numbers = dequantise(stored, None if scales is None else scales[blocks])
            latents = numbers.flatten(0, 2)[: self.length].double()
            weights = (self.query[row].double() @ latents.T * SCALING).softmax(-1)
            want = weights @ latents[:, :LATENT]
            worst = max(worst, float((output[row].double() - want).abs().max() / want.abs().max()))
        return worst


class Decode:
    """Calls of `latent_decode` on the pools of a setup. empty: without tokens. merged: with the merge of parts."""

    def __init__(self, setup: Setup, target: Target, empty: bool = False, merged: bool = True) -> None:
        self.setup, self.target, self.merged = setup, target, merged
        (rows, heads, _), device = setup.query.shape, setup.query.device
        self.planner = latent_planner(rows, heads, LATENT, setup.query.dtype, target)
        plan = self.planner.plan(np.full(rows, 0 if empty else setup.length))
        self.items, self.plan = int(plan[0]), torch.from_numpy(plan).to(device)
        self.workspace = LatentWorkspace.allocate(self.planner, heads, LATENT, device)
        self.output = torch.zeros((rows, heads, LATENT), dtype=setup.query.dtype, device=device)

    def __call__(self, pool: int) -> torch.Tensor:
        arguments = self.setup.query, self.setup.pools[pool], self.setup.tables, self.planner, self.plan
        compute = latent_decode if self.merged else compute_items
        compute(*arguments, self.output, self.workspace, SCALING, self.target, self.setup.scales[pool])
        return self.output


def measure(
    rows: int, length: int, heads: int, device: Device, target: Target, repeats: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Time one case of decodes, in us."""
    setup = Setup.make(rows, length, heads, device.torch_device, dtype=dtype)
    calls = {
        "us": Decode(setup, target),
        "parts_us": Decode(setup, target, merged=False),
        "empty_us": Decode(setup, target, empty=True),
    }
    graphs = {name: captured_in_turn(device, call, len(setup.pools)) for name, call in calls.items()}
    found: dict[str, Any] = {"case": f"{rows} x {length}", "heads": heads, "bytes": setup.bytes_read}
    found |= medians_us(device, graphs, repeats)
    found |= {"items": calls["us"].items, "error": setup.error(calls["us"](0))}
    return found


def measure_prefill(
    rows: int, new: int, before: int, heads: int, device: Device, target: Target, repeats: int
) -> dict[str, Any]:
    """Time one case of prefills, in us. Operations are those of the absorbed form, causal ones only."""
    setup = Setup.make(rows, before + new, heads, device.torch_device, rows * new)
    starts, counts = np.full(rows, before), np.full(rows, new)
    tokens = latent_prefill_tokens(heads, LATENT, setup.query.dtype, target)
    items = plan_prefill(starts, counts, np.arange(rows + 1) * new, tokens)
    items_on = torch.from_numpy(items).to(setup.query.device).view(-1, FIELDS)
    output = torch.empty((rows * new, heads, LATENT), dtype=setup.query.dtype, device=setup.query.device)

    def call(pool: int) -> None:
        latent_prefill(setup.query, setup.pools[pool], setup.tables, items_on, output, SCALING, target)

    us = medians_us(device, {"": captured_in_turn(device, call, len(setup.pools))}, repeats)[""]
    seen = rows * sum(range(before + 1, before + new + 1))
    flops = 2 * seen * heads * (2 * LATENT + ROPE)
    return {"case": f"{rows} x {new} after {before}", "heads": heads, "us": us, "tflops": flops / us / 1e6}


def measure_expanded(rows: int, new: int, before: int, heads: int, device: Device, repeats: int) -> dict[str, Any]:
    """Time the same prefills over expanded keys and values, in us, expansion included; {} before Hopper."""
    setup = Setup.make(rows, before + new, heads, device.torch_device, rows * new)
    attention, operations, place = TritonAttention(device), FusedOperations(device), setup.query.device
    spaces = attention.expanded_spaces
    if spaces is None or before + new > EXPANDED_TOKENS_MAX:
        return {}
    starts, counts = np.full(rows, before, np.int32), np.full(rows, new, np.int32)
    generated = np.zeros(rows, np.bool_)
    batch = PagedBatch.build(setup.tables.cpu().numpy(), starts, counts, BLOCK_SIZE, device, generated)
    parts = prompt_parts(batch)
    assert parts is not None and parts.rest is None
    expansion = torch.randn((heads * (PLAIN + VALUE), LATENT), dtype=torch.bfloat16, device=place) / LATENT**0.5
    keys, values = expansion.unflatten(0, (heads, -1)).split((PLAIN, VALUE), dim=1)
    latent = LatentAttention(None, None, None, keys, values.mT, expansion, ROPE)
    layer: Any = SimpleNamespace(heads=heads, options=AttentionOptions(SCALING))
    query = torch.randn((rows * new, heads, PLAIN + ROPE), dtype=torch.bfloat16, device=place)
    queries = [query if each.tokens is None else query.index_select(0, each.tokens) for each in parts.groups]

    def call(pool: int) -> None:
        cache = KvLayer.of_latents(setup.pools[pool], LATENT)
        for group, own in zip(parts.groups, queries, strict=True):
            attend_expanded(operations, attention, spaces, layer, latent, group, own, cache)

    call(0)  # plans are sent before the capture
    us = medians_us(device, {"": captured_in_turn(device, call, len(setup.pools))}, repeats)[""]
    return {"expanded_us": us}


def sweep(device: Device, target: Target, arguments: argparse.Namespace) -> None:
    """Print the times of other divisions of the rows."""
    for heads, rows, length in itertools.product(arguments.heads, arguments.rows, LENGTHS):
        setup = Setup.make(rows, length, heads, device.torch_device)
        for division in DIVISIONS:
            names: dict[str, Any] = dict(zip(("PART_MIN", "GROUP_MIN", "GROUPS_MAX"), division, strict=True))
            with patch.multiple(planning, **names):
                call = Decode(setup, target)
                graph = captured_in_turn(device, call, len(setup.pools))
                us = medians_us(device, {"": graph}, arguments.repeats)[""]
            print(f"{rows} x {length}, {heads} heads, {names}: {us:.1f} us, {call.items} items", flush=True)
        device.release_cached()


def _row(result: dict[str, Any], roof: Roof) -> list[str]:
    rate = result["bytes"] / result["us"] * 1e6
    result["share"] = rate / roof.read_bytes
    us = [f"{result[name]:.1f}" for name in ("us", "parts_us", "empty_us")]
    return [
        f"{result['case']}, {result['heads']} heads", *us, f"{rate / 1e9:.0f}", f"{100 * result['share']:.1f} %",
        str(result["items"]), f"{result['error']:.1e}",
    ]  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--kv-dtype", choices=("bfloat16", "int8", "fp8"), default="bfloat16", help="[bfloat16]")
    parser.add_argument("--prefill", action="store_true", help="time prefills too")
    parser.add_argument("--sweep", action="store_true", help="time other divisions of the rows as well")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_latent needs a CUDA or HIP device", file=sys.stderr)
        return 1
    device = open_device("auto")
    target = current_target(device)
    roof = measure_roof(device)
    decodes, rows = [], []
    for heads, count, length in itertools.product(arguments.heads, arguments.rows, LENGTHS):
        kept = KV_DTYPES[arguments.kv_dtype].torch_dtype
        decodes.append(measure(count, length, heads, device, target, arguments.repeats, kept))
        rows.append(_row(decodes[-1], roof))
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
        device.release_cached()
    prefills = [
        measure_prefill(*case, heads, device, target, arguments.repeats)
        | measure_expanded(*case, heads, device, arguments.repeats)
        for case, heads in itertools.product(PREFILLS if arguments.prefill else (), arguments.heads)
    ]
    where = {
        "gpu": device.name,
        "kv_dtype": arguments.kv_dtype,
        "read_tb_per_s": round(roof.read_bytes / 1e12, 3),
        "triton": triton.__version__,
    }
    header = ["rows x tokens", "us", "parts us", "empty us", "GB/s", "share", "items", "error"]
    document = {**where, "decodes": decodes, "prefills": prefills}
    report("Decode attention over latents, 512 + 64 numbers", header, rows, document, arguments.json)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    for each in prefills:
        share = each["tflops"] * 1e12 / roof.flops
        print(
            f"prefill {each['case']}, {each['heads']} heads: {each['us']:.0f} us, {each['tflops']:.0f} TFLOP/s,", end=""
        )
        print(f" {100 * share:.0f} % of a matrix product's", end="")
        print(f"; expanded {each['expanded_us']:.0f} us" if "expanded_us" in each else "")
    if arguments.sweep:
        sweep(device, target, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
