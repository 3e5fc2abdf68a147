"""Times of one layer of experts on a GPU: the router, the sort, both grouped products and the sum.

    python -m benchmarks.gpu_experts [--tokens 1,16,64,256] [--shapes NAME,...] [--sweep | --chain] [--json FILE]

Dummy weights of a known shape, in bfloat16. Every time is of a graph's replay over many random choices of experts in
turn, so that an expert's weights are rarely in the cache when they are read. The floor is the time that reading the
weights of the distinct chosen experts takes at the measured read bandwidth; the share is that over the time. "experts"
is the whole operation as a layer calls it; "torch" is the same through torch's grouped product, sorted by torch.
--sweep times each product with many tile sizes, the fastest first; --chain both together, with more or less overlap.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import current_target
from kvforge.worker.kernels.activations import SILU, Activation
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.expert_sort import sort_by_expert
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.grouped import Gating, multiply_down, multiply_up, sum_places
from kvforge.worker.kernels.grouped_tiles import GroupedTiles, tiles_for, tokens_per_block
from kvforge.worker.kernels.router import Router

from .gpu_roof import read_bandwidth
from .gpu_timing import captured_in_turn, medians_us
from .report import report

CHOICES = 24  # random choices of experts that take turns
REPEATS = 9
DTYPE = torch.bfloat16
SHOWN = 6  # fastest tiles of a sweep


@dataclass(frozen=True)
class Shape:
    """A layer of experts. chosen: experts per token. oss: biases, transposed weights, and gpt-oss's gate and router."""

    hidden: int
    inner: int
    experts: int
    chosen: int
    oss: bool = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return (3 * self.hidden * self.inner + (self.hidden + 2 * self.inner) * self.oss) * DTYPE.itemsize


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, oss=True),
}


@dataclass(frozen=True)
class Layer:
    """The weights of a layer, and inputs for each of CHOICES turns."""

    shape: Shape
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: Activation
    router: Router
    x: torch.Tensor
    logits: list[torch.Tensor]
    chosen: list[torch.Tensor]
    weights: list[torch.Tensor]

    def distinct(self) -> float:
        """Return the mean number of distinct experts of a step."""
        return sum(int(each.bincount().count_nonzero()) for each in map(torch.flatten, self.chosen)) / len(self.chosen)


def make(shape: Shape, tokens: int, operations: FusedOperations, device: Device) -> Layer:
    """Return a layer with random weights."""

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device.torch_device, dtype=DTYPE).mul_(0.05)

    rows, hidden, inner, experts = 2 * shape.inner, shape.hidden, shape.inner, shape.experts
    up_bias, down_bias, activation = None, None, SILU
    if shape.oss:
        router = Router(shape.chosen, scores="", weights="softmax", dtype=DTYPE)
        up, down = random(experts, hidden, rows).transpose(1, 2), random(experts, inner, hidden).transpose(1, 2)
        up_bias, down_bias = random(experts, rows), random(experts, hidden)
        activation = Activation("clamped_swiglu", 1.702, 7.0)
    else:
        router = Router(shape.chosen, normalises=True, dtype=DTYPE)
        up, down = random(experts, rows, hidden), random(experts, hidden, inner)
    logits = [random(tokens, experts) for _ in range(CHOICES)]
    routed = [operations.route(each, router) for each in logits]
    chosen, weights = map(list, zip(*routed, strict=True))
    x = random(tokens, hidden)
    return Layer(shape, up, up_bias, down, down_bias, activation, router, x, logits, chosen, weights)


def calls(layer: Layer, operations: FusedOperations, target: Target) -> dict[str, Callable[[int], object]]:
    """Return the whole operation and its parts, by name; each takes the number of a choice."""
    width, shape = layer.shape.chosen, layer.shape
    tokens = tokens_per_block(layer.chosen[0].numel(), shape.experts, DTYPE, target)
    up_tiles, down_tiles = (
        tiles_for(tokens, each.shape[1], each.shape[2], DTYPE, target) for each in (layer.up, layer.down)
    )
    sorted_pairs = [sort_by_expert(operations, each, shape.experts, tokens) for each in layer.chosen]
    gating = Gating(layer.activation, interleaved=shape.oss)
    up, down = (layer.up, layer.up_bias), (layer.down, layer.down_bias)
    matrices = ExpertMatrices(*up, *down)
    inner = multiply_up(operations, layer.x, *up, gating, sorted_pairs[0], width, up_tiles)
    parts = multiply_down(operations, inner, *down, layer.weights[0], sorted_pairs[0], down_tiles)
    made: dict[str, Callable[[int], object]] = {
        "experts": lambda turn: operations.experts(
            layer.x, layer.chosen[turn], layer.weights[turn], matrices, layer.activation, shape.oss
        ),
        "route": lambda turn: operations.route(layer.logits[turn], layer.router),
        "up": lambda turn: multiply_up(operations, layer.x, *up, gating, sorted_pairs[turn], width, up_tiles),
        "down": lambda turn: multiply_down(
            operations, inner, *down, layer.weights[turn], sorted_pairs[turn], down_tiles
        ),
        "sum": lambda _turn: sum_places(operations, parts, layer.chosen[0]),
    }
    if len(layer.x) > 1:  # a single token needs no sort
        made["sort"] = lambda turn: sort_by_expert(operations, layer.chosen[turn], shape.experts, tokens)
    if not shape.oss and hasattr(torch.nn.functional, "grouped_mm"):
        made["torch"] = lambda turn: grouped_by_torch(layer, turn)
    return made


def grouped_by_torch(layer: Layer, turn: int) -> torch.Tensor:
    """Compute the experts through torch's grouped product, as transformers does."""
    chosen, weights, shape = layer.chosen[turn].flatten(), layer.weights[turn].flatten(), layer.shape
    by_expert, order = chosen.sort()
    ends = torch.histc(by_expert, bins=shape.experts, min=0, max=shape.experts - 1).cumsum(0, dtype=torch.int32)
    multiply: Any = torch.nn.functional.grouped_mm
    both = multiply(layer.x[order // shape.chosen], layer.up.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, dim=-1)
    down = multiply(torch.nn.functional.silu(gate) * up, layer.down.transpose(1, 2), offs=ends)
    weighted = down * weights[order, None].to(DTYPE)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    found: torch.Tensor = weighted[back].view(-1, shape.chosen, shape.hidden).sum(1)
    return found


def sweep(layer: Layer, operations: FusedOperations, device: Device, target: Target) -> Iterator[tuple[str, float]]:
    """Yield the fastest tiles of each product."""
    shape, width = layer.shape, layer.shape.chosen
    gating = Gating(layer.activation, interleaved=shape.oss)
    pairs = layer.chosen[0].numel()
    wanted = tokens_per_block(pairs, shape.experts, DTYPE, target)
    for name, k in (("up", shape.hidden), ("down", shape.inner)):
        times: list[tuple[float, GroupedTiles]] = []
        for tokens in sorted({wanted, max(16, wanted // 2), min(128, 2 * wanted)}):
            if len(layer.x) == 1 and tokens > wanted:
                continue
            sorted_pairs = [sort_by_expert(operations, each, shape.experts, tokens) for each in layer.chosen]
            inner = torch.randn((pairs, shape.inner), device=device.torch_device).to(DTYPE)
            for tiles in _tiles(tokens):

                def call(turn: int) -> object:
                    grouped = sorted_pairs[turn]  # noqa: B023 - called before the next one
                    if name == "up":  # noqa: B023
                        up = (layer.x, layer.up, layer.up_bias)
                        return multiply_up(operations, *up, gating, grouped, width, tiles)  # noqa: B023
                    down = (inner, layer.down, layer.down_bias)  # noqa: B023
                    return multiply_down(operations, *down, layer.weights[turn], grouped, tiles)  # noqa: B023

                try:
                    graph = captured_in_turn(device, call, CHOICES)
                except OutOfResources:
                    continue
                times.append((medians_us(device, {"": graph}, 3)[""], tiles))
        for us, tiles in sorted(times, key=lambda each: each[0])[:SHOWN]:
            yield f"{name} k={k} {tiles}", us


def chain(layer: Layer, operations: FusedOperations, device: Device, target: Target) -> Iterator[tuple[str, float]]:
    """Yield the fastest ways to overlap both products."""
    shape, width = layer.shape, layer.shape.chosen
    gating = Gating(layer.activation, interleaved=shape.oss)
    tokens = tokens_per_block(layer.chosen[0].numel(), shape.experts, DTYPE, target)
    sorted_pairs = [sort_by_expert(operations, each, shape.experts, tokens) for each in layer.chosen]
    up_tiles, down_tiles = (
        tiles_for(tokens, each.shape[1], each.shape[2], DTYPE, target) for each in (layer.up, layer.down)
    )
    times: list[tuple[float, str]] = []
    for early_up, early_down, ahead, stages in itertools.product((False, True), (False, True), (0, 2, 4, 6), (3, 4)):
        first = replace(up_tiles, early=early_up, stages=stages)
        second = replace(down_tiles, early=early_down, prefetch=ahead, stages=stages)

        def call(turn: int) -> object:
            pairs = sorted_pairs[turn]
            inner = multiply_up(operations, layer.x, layer.up, layer.up_bias, gating, pairs, width, first)  # noqa: B023
            weights = layer.weights[turn]
            return multiply_down(operations, inner, layer.down, layer.down_bias, weights, pairs, second)  # noqa: B023

        graph = captured_in_turn(device, call, CHOICES)
        what = f"chain early={early_up:d}{early_down:d} prefetch={ahead} stages={stages}"
        times.append((medians_us(device, {"": graph}, 5)[""], what))
    for us, what in sorted(times)[: 2 * SHOWN]:
        yield what, us


def _tiles(tokens: int) -> Iterator[GroupedTiles]:
    for rows, depth, stages, warps in itertools.product((64, 128), (64, 128), (3, 4, 6), (4, 8)):
        stage = (rows + tokens) * depth * 2
        if stage * stages <= 220 * 1024 and (warps == 4 or rows * tokens >= 128 * 64):
            yield GroupedTiles(rows, depth, tokens, warps, stages, prefetch=2 if tokens == 16 else 0)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,16,64,256")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    target = replace(current_target(device), steady=True)
    operations = FusedOperations(device)
    read_bytes = read_bandwidth(device)
    rows: list[list[object]] = []
    results: list[dict[str, object]] = []
    for name, tokens in itertools.product(arguments.shapes.split(","), map(int, arguments.tokens.split(","))):
        with torch.inference_mode():
            layer = make(SHAPES[name], tokens, operations, device)
            if arguments.sweep:
                times = dict(sweep(layer, operations, device, target))
            elif arguments.chain:
                times = dict(chain(layer, operations, device, target))
            else:
                graphs = {
                    what: captured_in_turn(device, call, CHOICES)
                    for what, call in calls(layer, operations, target).items()
                }
                times = medians_us(device, graphs, REPEATS)
            distinct = layer.distinct()
        size = distinct * layer.shape.expert_bytes
        shares = {"experts": 1.0, "chain": 1.0, "torch": 1.0, "up": 2 / 3, "down": 1 / 3}
        for what, us in times.items():
            part = size * shares.get(what.partition(" ")[0], 0.0)
            share = part / read_bytes * 1e6 / us
            rows.append([f"{name} {tokens} {what}", f"{us:.1f}", f"{part / 1e6:.0f}", f"{share:.0%}" if part else ""])
            results.append(
                {"shape": name, "tokens": tokens, "what": what, "us": us, "bytes": part, "experts": distinct}
            )
        del layer
        device.release_cached()
    where = f"{device.name}, triton {triton.__version__}"
    title = (
        f"one layer of experts, bfloat16, {where}: read {read_bytes / 1e12:.2f} TB/s; microseconds from graph replays"
    )
    document = {"device": where, "read_bytes_s": read_bytes, "measured": results}
    report(title, ["shape, tokens, what", "us", "MB", "share"], rows, document, arguments.json)


if __name__ == "__main__":
    main()
