"""Times of products with weights in codes on a GPU, of the whole decode step with them, and of other tile sizes.

    python -m benchmarks.gpu_codes [--model llama-3.1-8b] [--weights fp8] [--batches 1,16,64]
        [--sweep] [--compare] [--json FILE]

Dummy weights of a known shape; every time is of a graph's replay, with the weights of every layer in turn, so that no
weight is in the cache when it is read. --weights names a `weight_dtype`, or mxfp4: then the experts alone have codes,
random ones in groups of 32, as gpt-oss is published; or nvfp4, nf4, or a type of GGUF files (q4_k, q6_k, q8_0): then
all projections have random codes, and the head stays in 16 bits. An operation's floor is the larger of its weight bytes
over the read bandwidth and its operations over the matrix rate of 16 bits, both measured in the same run. A step's
floor adds its K and V; of experts it counts those that a step reads, if tokens choose them at random. --sweep times the
products with other tiles, the fastest first. --compare times them in other ways that have the same bits: with one step
in a turn of a sum's loop, with more columns in it, and with the tensor instructions of a warp; and mxfp4 with scales of
32 bits, as it was kept before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime.errors import OutOfResources

from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels import LayerOperations, stored_experts, stored_linear, stored_project
from kvforge.worker.kernels.code_tables import CODES, pack, unit_columns
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.layer_weights import FeedForward, FusedLayer, MixtureOfExperts, Projection
from kvforge.worker.kernels.packed import stored_bytes
from kvforge.worker.kernels.stored import Codes, StoredWeight, with_exponents, without_exponents
from kvforge.worker.kernels.stored_linear import StoredTiles
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.source import MODEL_CONFIGS

from .gpu_layers import BLOCK_SIZE, NoAttention, measure_step
from .gpu_roof import Roof, measure_roof
from .gpu_timing import measure_us
from .report import report

MXFP4_GROUP = 32
# By the name of a format: code, columns of a group (0: all), what groups have beside scales.
FORMATS = {
    "nvfp4": ("e2m1", 0, "factors"),
    "nf4": ("nf4", 64, ""),
    "q4_k": ("int4", 32, "lows"),
    "q6_k": ("int8", 16, ""),
    "q8_0": ("int8", 32, ""),
}
PERIOD = 2  # layers with windows and without take turns in gpt-oss
# Rows, tokens, warps, stages. On Hopper all have the same bits.
SWEPT = {
    8: ((64, 8, 4, 4), (64, 8, 4, 6), (64, 8, 2, 4), (32, 8, 2, 4), (64, 16, 4, 4), (64, 16, 4, 6), (64, 16, 2, 4)),
    16: ((64, 16, 4, 4), (64, 16, 4, 6), (64, 16, 2, 4), (64, 8, 4, 4), (128, 16, 8, 4)),
    64: ((64, 64, 4, 4), (64, 32, 4, 4), (64, 32, 2, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4)),
}
SWEPT_EXPERTS = ((64, 4, 4), (64, 4, 6), (64, 4, 9), (128, 4, 4), (128, 8, 4), (128, 8, 6))  # rows, warps, stages
SHOWN = 8  # fastest tiles of a sweep


@dataclass(frozen=True)
class Operation:
    """One operation. run(operations) queues it once for each of `calls` weights. bytes, flops: of one call."""

    name: str
    run: Callable[[LayerOperations], None]
    calls: int
    bytes: float
    flops: float


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """Return the mean number of experts that `rows` tokens choose, if each chooses at random."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def operations_of(fused: FusedDecoder, batch: int) -> list[Operation]:
    """Return the products of a step of `batch` rows."""
    layers, first, hidden = fused.layers, fused.layers[0], fused.table.shape[1]

    def random(width: int) -> torch.Tensor:
        return torch.randn((batch, width), dtype=fused.table.dtype, device=fused.table.device)

    x, attended = random(hidden), random(first.output.weight.shape[1])
    logits = torch.empty((batch, len(fused.head.weight)), device=x.device)

    def product(name: str, weight: torch.Tensor, call: Callable[[LayerOperations, Any], object]) -> Operation:
        def run(operations: LayerOperations) -> None:
            for layer in layers:
                call(operations, layer)

        return Operation(name, run, len(layers), stored_bytes(weight), 2.0 * batch * weight.numel())

    found = [
        product("qkv", first.projected.weight, lambda o, w: o.linear(x, w.projected.weight, w.projected.bias)),
        product("output", first.output.weight, lambda o, w: o.linear_parts(attended, w.output.weight)),
    ]
    if isinstance(first.feed, MixtureOfExperts):
        found.append(_mixture(fused, first.feed, x, batch))
    else:
        feed = first.feed
        assert feed is not None, "a layer without a feed-forward block"
        inner = random(feed.down.weight.shape[1])
        found.append(product("gate, up, silu", feed.gate_up.weight, lambda o, w: o.gated(x, w.feed.gate_up.weight)))
        found.append(product("down", feed.down.weight, lambda o, w: o.linear_parts(inner, w.feed.down.weight)))
    size = stored_bytes(fused.head.weight)

    def head(operations: LayerOperations) -> None:
        operations.linear(x, fused.head.weight, output=logits)

    found.append(Operation("head", head, 1, size, 2.0 * batch * fused.head.weight.numel()))
    return found


def _mixture(fused: FusedDecoder, first: MixtureOfExperts, x: torch.Tensor, batch: int) -> Operation:
    chosen = first.router.chosen
    experts, ways = len(first.matrices.up), len(fused.layers)
    choices = [torch.rand((batch, experts), device=x.device).topk(chosen) for _ in range(ways)]

    def run(operations: LayerOperations) -> None:
        for layer, (weights, places) in zip(fused.layers, choices, strict=True):
            feed = layer.feed
            assert isinstance(feed, MixtureOfExperts)
            operations.experts(x, places.int(), weights, feed.matrices, feed.activation, feed.interleaved)

    size, numbers = _expert_size(first)
    return Operation(
        "experts", run, ways, size * distinct_experts(experts, chosen, batch), 2.0 * batch * chosen * numbers
    )


def _expert_size(feed: MixtureOfExperts) -> tuple[float, float]:
    """Return bytes and numbers of one expert."""
    up, down = feed.matrices.up, feed.matrices.down
    assert isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor)
    return (stored_bytes(up) + stored_bytes(down)) / len(up), (up.numel() + down.numel()) / len(up)


def step_floor_us(model: LoadedModel, fused: FusedDecoder, roof: Roof, rows: int, context: int) -> float:
    """Return the time that reading weights, K and V takes, or multiplying, if that is longer."""
    size = float(stored_bytes(fused.head.weight))
    numbers = float(fused.head.weight.numel())
    for layer in fused.layers:
        dense = [layer.projected.weight, layer.output.weight]
        if isinstance(layer.feed, MixtureOfExperts):
            each, count = _expert_size(layer.feed)
            chosen = layer.feed.router.chosen
            size += each * distinct_experts(len(layer.feed.matrices.up), chosen, rows)
            numbers += count * chosen
        elif layer.feed is not None:
            dense += [layer.feed.gate_up.weight, layer.feed.down.weight]
        size += sum(map(stored_bytes, dense))
        numbers += sum(each.numel() for each in dense)
    kv_bytes = rows * context * model.geometry.bytes_per_block / BLOCK_SIZE
    return (max(size / roof.read_bytes, 2 * rows * numbers / roof.flops) + kv_bytes / roof.read_bytes) * 1e6


def load_with_mxfp4_experts(name: str, device: Device) -> tuple[LoadedModel, FusedDecoder]:
    """Return a model with random codes as its experts, which never exist as numbers of 16 bits.

    Two layers are loaded, one of each kind of attention; the other layers copy these, with their own codes.
    """
    config = json.loads((MODEL_CONFIGS / f"{name}.json").read_text())
    layers = int(config["num_hidden_layers"])
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        few = config | {"num_hidden_layers": PERIOD, "layer_types": config["layer_types"][:PERIOD]}
        (Path(folder) / "config.json").write_text(json.dumps(few))
        model = load_model(folder, load_format="dummy", device=device, block_size=BLOCK_SIZE)
    fused = model.fused
    assert fused is not None, "this model's layers are not fused"
    bare: list[tuple[FusedLayer, tuple[int, ...], tuple[int, ...]]] = []
    for layer in fused.layers:
        feed = layer.feed
        assert isinstance(feed, MixtureOfExperts), "mxfp4 is a format of experts here"
        up, down = feed.matrices.up, feed.matrices.down
        assert isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor)
        nothing = torch.empty(0, dtype=up.dtype, device=up.device)
        matrices = replace(feed.matrices, up=nothing, down=nothing)
        bare.append((replace(layer, feed=replace(feed, matrices=matrices)), tuple(up.shape), tuple(down.shape)))
    del layer, feed, up, down
    for parameter_name, parameter in model.module.named_parameters():
        if "experts" in parameter_name:
            parameter.data = parameter.data.new_empty(0)
    model = replace(
        model, geometry=replace(model.geometry, layers=model.geometry.layers * (layers // PERIOD)), fused=None
    )
    fused = replace(fused, layers=tuple(each for each, _, _ in bare))
    device.release_cached()

    def whole(layer: FusedLayer, up: tuple[int, ...], down: tuple[int, ...]) -> FusedLayer:
        feed = layer.feed
        assert isinstance(feed, MixtureOfExperts)
        matrices = replace(feed.matrices, up=random_codes(up, fused.table), down=random_codes(down, fused.table))
        return replace(layer, feed=replace(feed, matrices=matrices))

    made = tuple(whole(*bare[number % PERIOD]) for number in range(layers))
    return model, replace(fused, layers=made)


def random_codes(shape: tuple[int, ...], like: torch.Tensor) -> StoredWeight:
    """Return random mxfp4 experts of a shape [experts, n, k], on the device and in the dtype of `like`, as kept."""
    experts, n, k = shape
    parts = [
        pack(torch.randint(16, (n, k), dtype=torch.uint8, device=like.device), "e2m1", k // MXFP4_GROUP)
        for _ in range(experts)
    ]
    scales = torch.exp2(torch.randint(-10, -6, (experts, k // MXFP4_GROUP, n), device=like.device).float())
    return StoredWeight(with_exponents(Codes("e2m1", torch.stack(parts), scales), like.dtype), like.dtype)


def codes_of_format(n: int, k: int, kind: str, device: torch.device) -> Codes:
    """Return random codes of one of FORMATS, [n, k]."""
    code, group, extra = FORMATS[kind]
    codes = torch.randint(256 if CODES[code] == 2 else 16, (n, k), dtype=torch.uint8, device=device)
    scales = torch.rand((k // group if group else 1, n), device=device) * (1e-4 if code == "int8" else 1e-3)
    lows = scales * -7.5 if extra == "lows" else None
    factors = None
    if extra == "factors":  # 0.5 to 7.5
        four = torch.randint(0x30, 0x50, (k // unit_columns(code), n, 4), dtype=torch.uint8, device=device)
        factors = four.view(torch.int32).squeeze(-1)
    return Codes(code, pack(codes, code, len(scales)), scales, lows=lows, factors=factors)


def with_codes(fused: FusedDecoder, kind: str) -> FusedDecoder:
    """Return the decoder with random codes in place of the numbers of all projections of its layers."""

    def coded(projection: Projection) -> Projection:
        n, k = projection.weight.shape
        codes = codes_of_format(n, k, kind, fused.table.device)
        return replace(projection, weight=StoredWeight(codes, projection.weight.dtype))

    def changed(layer: FusedLayer) -> FusedLayer:
        feed = layer.feed
        assert isinstance(feed, FeedForward), "of a dense model"
        feed = replace(feed, gate_up=coded(feed.gate_up), down=coded(feed.down))
        return replace(layer, projected=coded(layer.projected), output=coded(layer.output), feed=feed)

    return replace(fused, layers=tuple(map(changed, fused.layers)))


def swept(device: Device, operation: Operation, fused: FusedDecoder, batch: int) -> Iterator[tuple[str, float]]:
    """Yield the fastest tiles of an operation, with microseconds of a call."""
    times: dict[str, float] = {}

    def measure(name: str) -> None:
        with suppress(OutOfResources):
            times[name] = measure_us(device, lambda: operation.run(fused.operations), operation.calls, repeats=5)

    if operation.name == "experts":
        for rows, warps, stages in SWEPT_EXPERTS:
            changed = partial(StoredTiles, rows, warps=warps, stages=stages)
            with patch.object(
                stored_experts, "stored_expert_tiles", lambda tokens, *_, changed=changed: changed(tokens)
            ):
                measure(f"{rows} rows, {warps} warps, {stages} stages")
    else:
        for rows, tokens, warps, stages in next(tiles for most, tiles in SWEPT.items() if batch <= most):
            tiles = StoredTiles(rows, tokens, warps, stages)
            with ExitStack() as stack:
                for module in (stored_linear, stored_project):
                    stack.enter_context(patch.object(module, "tiles_of", lambda *_, tiles=tiles: tiles))
                measure(f"{rows} x {tokens}, {warps} warps, {stages} stages")
    yield from sorted(times.items(), key=lambda item: item[1])[:SHOWN]


def with_wide_scales(fused: FusedDecoder) -> FusedDecoder:
    """Return the decoder with scales of 32 bits for its mxfp4 experts. The codes are the same memory."""

    def wide(weight: object) -> StoredWeight:
        assert isinstance(weight, StoredWeight)
        return StoredWeight(without_exponents(weight.codes), weight.dtype)

    def changed(layer: FusedLayer) -> FusedLayer:
        feed = layer.feed
        assert isinstance(feed, MixtureOfExperts)
        up, down = wide(feed.matrices.up), wide(feed.matrices.down)
        return replace(layer, feed=replace(feed, matrices=replace(feed.matrices, up=up, down=down)))

    return replace(fused, layers=tuple(map(changed, fused.layers)))


def compared(device: Device, operation: Operation, fused: FusedDecoder) -> Iterator[tuple[str, float]]:
    """Yield other ways of an operation, with microseconds of a call."""
    modules = stored_linear, stored_experts, stored_project
    tiles, expert_tiles = stored_linear.tiles_of, stored_experts.stored_expert_tiles
    ways: dict[str, list[tuple[object, str, object]]] = {
        "one step a turn": [(each, "steps_together", lambda *_: 1) for each in modules],
        "256 columns a turn": [(each, "COLUMNS", 256) for each in modules],
        "2 warps": [
            (stored_linear, "tiles_of", lambda *a, **k: replace(tiles(*a, **k), warps=2)),
            (stored_experts, "stored_expert_tiles", lambda *a, **k: replace(expert_tiles(*a, **k), warps=2)),
        ],
    }
    for name, changes in ways.items():
        with ExitStack() as stack, suppress(OutOfResources):
            for each in changes:
                stack.enter_context(patch.object(*each))
            yield name, measure_us(device, lambda: operation.run(fused.operations), operation.calls)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument(
        "--weights", default="fp8", help=f"dtype, fp8, int8, int4, mxfp4 for experts, {', '.join(FORMATS)} [fp8]"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--compare", action="store_true", help="try other ways with the same bits")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    roof = measure_roof(device)
    if arguments.weights == "mxfp4":
        with torch.inference_mode():
            model, fused = load_with_mxfp4_experts(arguments.model, device)
    else:
        kind, size = "dtype" if arguments.weights in FORMATS else arguments.weights, BLOCK_SIZE
        model = load_model(arguments.model, load_format="dummy", weight_dtype=kind, device=device, block_size=size)
        assert model.fused is not None, "this model's layers are not fused"
        fused = model.fused
        if arguments.weights in FORMATS:
            with torch.inference_mode():
                fused = with_codes(fused, arguments.weights)
    before: dict[str, FusedDecoder] = {}
    if arguments.compare and arguments.weights == "mxfp4":
        with torch.inference_mode():
            before = {"scales of 32 bits": with_wide_scales(fused)}
    rows: list[list[object]] = []
    results: list[dict[str, object]] = []

    def note(batch: int, name: str, us: float, floor_us: float) -> None:
        rows.append([f"{batch} {name}", f"{us:.1f}", f"{floor_us:.1f}", f"{floor_us / us:.0%}"])
        results.append({"batch": batch, "what": name, "us": us, "floor_us": floor_us})
        print(*rows[-1], flush=True)

    for batch in map(int, arguments.batches.split(",")):
        with torch.inference_mode():
            for each in operations_of(fused, batch):
                floor_us = max(each.bytes / roof.read_bytes, each.flops / roof.flops) * 1e6
                run = each.run
                us = measure_us(device, lambda run=run: run(fused.operations), each.calls)  # type: ignore[misc]
                note(batch, each.name, us, floor_us)
                if arguments.sweep and (each.name == "experts") == (arguments.weights == "mxfp4"):
                    for tiles, us in swept(device, each, fused, batch):
                        note(batch, f"{each.name}: {tiles}", us, floor_us)
                if arguments.compare and (each.name == "experts" or arguments.weights != "mxfp4"):
                    for way, us in compared(device, each, fused):
                        note(batch, f"{each.name}: {way}", us, floor_us)
            for way, decoder in before.items():
                (experts,) = (each for each in operations_of(decoder, batch) if each.name == "experts")
                us = measure_us(device, partial(experts.run, decoder.operations), experts.calls)
                note(batch, f"experts: {way}", us, experts.bytes / roof.read_bytes * 1e6)
        steps = {
            "step without attention": (replace(fused, attention=NoAttention()), 0),
            "step": (fused, arguments.context),
        } | {f"step: {way}": (decoder, arguments.context) for way, decoder in before.items()}
        for name, (decoder, context) in steps.items():
            us = measure_step(model, decoder, batch, arguments.context)
            note(batch, name, us, step_floor_us(model, fused, roof, batch, context))
    where = f"{device.name}, triton {triton.__version__}"
    title = f"{arguments.model} in {arguments.weights}, context {arguments.context}, {where}: {roof}; microseconds"
    document = {"device": where, "weights": arguments.weights, "read_bytes_s": roof.read_bytes, "measured": results}
    report(title, ["batch, operation", "us", "floor us", "share"], rows, document, arguments.json)


if __name__ == "__main__":
    main()
