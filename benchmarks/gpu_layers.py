"""Times in a decode step on a GPU: each operation of a decoder layer, the vocabulary head, and the whole step.

    python -m benchmarks.gpu_layers [--model llama-3.1-8b] [--context 1024] [--batches 1,16,64,256] [--json FILE]

Dummy weights of a known shape; every time is of a graph's replay. Each operation runs with the weights of every layer
in turn, so that no weight is in the cache when it is read. Its share is the time its floor would take over the time it
took; the floor is the larger of its weight bytes over the read bandwidth and its operations over the matrix rate, both
measured in the same run. The step's floor is that of all weights together, plus its K and V over the read bandwidth.
"torch" is the same operation through torch alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton

from kvforge.worker.attention import PagedBatch, ReferenceAttention
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels import LayerOperations, PlainOperations
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel

from .gpu_roof import Roof, measure_roof
from .gpu_timing import measure_us
from .report import report

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One operation. run(operations) queues it once for each of `calls` weights. bytes, flops: for one call."""

    name: str
    run: Callable[[LayerOperations], None]
    calls: int
    weight_bytes: int
    flops: int


class NoAttention(ReferenceAttention):
    """A stand-in for attention, to time the rest of a step."""

    def write_rotated(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query

    def attend(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query


def cases(fused: FusedDecoder, batch: int) -> list[Case]:
    """The operations of a step of `batch` rows."""
    layers, hidden, dtype = fused.layers, fused.table.shape[1], fused.table.dtype
    first = layers[0]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=fused.table.device)

    x, residual = random(batch, hidden), random(batch, hidden)
    attended = random(batch, first.output.weight.shape[1])
    assert first.dense is not None, "its layers are dense"
    inner = random(batch, first.dense.down.weight.shape[1])

    def every_layer(call: Callable[[LayerOperations, Any], Any]) -> Callable[[LayerOperations], None]:
        def run(operations: LayerOperations) -> None:
            for layer in layers:
                call(operations, layer)

        return run

    def product(name: str, call: Callable[[LayerOperations, Any], Any], weight: torch.Tensor) -> Case:
        size = weight.numel()
        return Case(name, every_layer(call), len(layers), size * weight.element_size(), 2 * batch * size)

    norm = fused.final_norm

    def norm_of(operations: LayerOperations, layer: Any) -> None:
        parts = operations.linear_parts(attended, layer.output.weight)
        operations.add_norm(parts, residual, norm.weight, norm.epsilon)

    logits = torch.empty((batch, len(fused.head.weight)), device=fused.table.device)

    def head(operations: LayerOperations) -> None:
        operations.linear(x, fused.head.weight, output=logits)

    head_size = fused.head.weight.numel()
    return [
        product("qkv", lambda o, w: o.linear(x, w.projected.weight, w.projected.bias), first.projected.weight),
        product("output", lambda o, w: o.linear_parts(attended, w.output.weight), first.output.weight),
        product("output, sum, norm", norm_of, first.output.weight),
        product("gate, up, silu", lambda o, w: o.gated(x, w.dense.gate_up.weight), first.dense.gate_up.weight),
        product("down", lambda o, w: o.linear_parts(inner, w.dense.down.weight), first.dense.down.weight),
        Case("head", head, 1, head_size * fused.head.weight.element_size(), 2 * batch * head_size),
    ]


def decode_batch(rows: int, context: int, device: Device, entries: int = 1) -> PagedBatch:
    """Return rows with `context` tokens each, in consecutive blocks of `entries` entries."""
    width = -(-context // BLOCK_SIZE)
    tables = entries * np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    starts = np.full(rows, context - 1, np.int32)
    return PagedBatch.build(tables, starts, np.ones(rows, np.int32), BLOCK_SIZE, device)


@contextmanager
def decode_step(model: LoadedModel, fused: FusedDecoder, rows: int, context: int) -> Iterator[Callable[[], None]]:
    """Yield what queues one decode step of `rows` rows with `context` tokens each."""
    device, pages = model.device, model.geometry.state_blocks
    kv_blocks = rows * -(-context // BLOCK_SIZE)
    pool = KvPool(model.geometry, kv_blocks + rows * pages, device)
    for tensor in pool.tensors():
        tensor.normal_() if tensor.is_floating_point() else tensor.fill_(1)
    batch = decode_batch(rows, context, device, model.geometry.entries_per_block)
    if pages:
        batch.states = kv_blocks + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
        batch.state_pages = device.upload(batch.states)
    tokens = torch.arange(rows, device=device.torch_device) % model.vocab_size
    positions = torch.full((rows,), context - 1, device=device.torch_device)

    def run() -> None:
        fused.forward(tokens, positions, None, batch, pool)

    try:
        yield torch.inference_mode()(run)
    finally:
        pool.close()


def measure_step(model: LoadedModel, fused: FusedDecoder, rows: int, context: int) -> float:
    """Microseconds of one decode step of `rows` rows with `context` tokens each."""
    with decode_step(model, fused, rows, context) as run:
        return measure_us(model.device, run, 1)


def step_floor_us(model: LoadedModel, roof: Roof, rows: int, context: int) -> float:
    """max(weight bytes / read bandwidth, weight operations / matrix rate) + KV bytes / read bandwidth."""
    size = sum(int(weight.numel()) for weight in model.module.parameters())
    weight_s = max(size * model.dtype.itemsize / roof.read_bytes, 2 * rows * size / roof.flops)
    kv_bytes = rows * context * model.geometry.bytes_per_block / BLOCK_SIZE
    return (weight_s + kv_bytes / roof.read_bytes) * 1e6


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    roof = measure_roof(device)
    model = load_model(arguments.model, load_format="dummy", device=device, block_size=BLOCK_SIZE)
    fused = model.fused
    assert fused is not None, "this model's layers are not fused"
    rows: list[list[object]] = []
    results: list[dict[str, object]] = []
    for batch in map(int, arguments.batches.split(",")):
        with torch.inference_mode():
            measured = _operations(device, roof, fused, batch)
        for name, us, torch_us, floor_us in measured:
            rows.append([f"{batch} {name}", f"{us:.1f}", f"{torch_us:.1f}", f"{floor_us:.1f}", f"{floor_us / us:.0%}"])
            results.append({"batch": batch, "what": name, "us": us, "torch_us": torch_us, "floor_us": floor_us})
        steps = {
            "step without attention": replace(fused, attention=NoAttention()),
            "step": fused,
        }
        floors = step_floor_us(model, roof, batch, 0), step_floor_us(model, roof, batch, arguments.context)
        for (name, decoder), floor_us in zip(steps.items(), floors, strict=True):
            us = measure_step(model, decoder, batch, arguments.context)
            rows.append([f"{batch} {name}", f"{us:.0f}", "", f"{floor_us:.0f}", f"{floor_us / us:.0%}"])
            results.append({"batch": batch, "what": name, "us": us, "floor_us": floor_us})
    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    where = f"{device.name}, triton {triton.__version__}, {toolkit}"
    title = f"{arguments.model}, context {arguments.context}, {where}: {roof}; microseconds from graph replays"
    document = {"device": where, "read_bytes_s": roof.read_bytes, "flops_s": roof.flops, "measured": results}
    report(title, ["batch, operation", "us", "torch us", "floor us", "share"], rows, document, arguments.json)


def _operations(device: Device, roof: Roof, fused: FusedDecoder, batch: int) -> list[tuple[str, float, float, float]]:
    """Name, microseconds, those of torch alone, and floor of each operation."""
    found = []
    for case in cases(fused, batch):
        ours, plain = (
            measure_us(device, lambda case=case, o=operations: case.run(o), case.calls)  # type: ignore[misc]
            for operations in (fused.operations, PlainOperations())
        )
        floor_us = max(case.weight_bytes / roof.read_bytes, case.flops / roof.flops) * 1e6
        found.append((case.name, ours, plain, floor_us))
    return found


if __name__ == "__main__":
    main()
