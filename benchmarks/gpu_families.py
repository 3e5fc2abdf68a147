"""Decode steps of described families on a GPU, beside the floor of the memory.

    python -m benchmarks.gpu_families [--models llama-3.1-8b,granite-3.3-8b,...] [--batches 1,16,64,256]
        [--context 1024] [--layers 20] [--apart] [--kernels]
        [--json FILE]

Dummy weights of known shapes in bfloat16; each time is of a replay of the step's graph in one process, without
coordinator and sampling (`gpu_step` has these). floor = the larger of weight bytes over the read bandwidth and weight
operations over the matrix rate, plus K and V over the read bandwidth. Both rates are measured in the same run. Weights
are those of products; an embedding that is not the head is not read. A mixture of experts reads the distinct experts
that its tokens choose, counted as they are for even chances. Layers with windows read their windows, and layers with
latents (deepseek-v2-lite) read each latent once. Layers with a recurrent state (qwen3.5-35b-a3b) read and write it.
`--layers` cuts models that do not fit the GPU (qwen3-next-80b-a3b, kimi-linear-48b-a3b). `--apart` also measures each
model with its shared experts as a dense block beside the others, in the same process. `--kernels` lists the kernels of
each step, how often they run and how long.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.loading import fusion
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.probe import bound_options
from kvforge.worker.loading.source import MODEL_CONFIGS

from .gpu_layers import BLOCK_SIZE, decode_step, measure_step
from .gpu_roof import Roof, measure_roof
from .gpu_timing import captured
from .report import report

MODELS = "llama-3.1-8b,granite-3.3-8b,olmo-2-7b,phi-3-mini,gemma-3-12b"


def weights_read(module: Any, rows: int) -> tuple[float, float]:
    """Return the numbers of weights that a step reads, and those that each row multiplies with."""
    config = module.config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    chosen = getattr(config, "num_experts_per_tok", 0) or 0
    table = module.get_input_embeddings().weight
    is_tied = table is module.get_output_embeddings().weight
    read = used = 0.0
    for name, weight in module.named_parameters():
        if weight is table and not is_tied:
            continue
        if ".experts." in name and weight.dim() >= 2:
            read += weight.numel() * (1 - (1 - chosen / experts) ** rows)
            used += weight.numel() * chosen / experts
        else:
            read += weight.numel()
            used += weight.numel()
    return read, used


def floor_us(model: LoadedModel, roof: Roof, rows: int, context: int) -> float:
    """Return the least time of a step."""
    read, used = weights_read(model.module, rows)
    kv = 0.0
    for layer, options in zip(model.geometry.layers, bound_options(model.module), strict=True):
        seen = min(context, options.window) if options.window else context
        kv += rows * seen * layer.stored * layer.kv_heads * layer.head_size * model.dtype.itemsize
    states = 2 * rows * sum(each.nbytes for each in model.geometry.states)
    weights_s = max(read * model.dtype.itemsize / roof.read_bytes, 2 * rows * used / roof.flops)
    return (weights_s + (kv + states) / roof.read_bytes) * 1e6


def load(name: str, device: Device, layers: int, apart: bool = False) -> LoadedModel:
    """Load a model of dummy weights. layers: its first ones alone; 0: all. apart: with shared experts as a block."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patched:
        if apart:
            patched.enter_context(mock.patch.object(fusion, "beside_shared", return_value=None))
        source: str | Path = name
        if layers:
            config = json.loads((MODEL_CONFIGS / f"{name}.json").read_text()) | {"num_hidden_layers": layers}
            source = Path(folder) / name
            source.mkdir()
            (source / "config.json").write_text(json.dumps(config))
        return load_model(source, load_format="dummy", dtype="bfloat16", device=device, block_size=BLOCK_SIZE)


def kernels_of(device: Device, run: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the kernels of a graph's replay: how many run, and their time together, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    graph = captured(device, run, 1).captured
    graph.replay()
    device.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        device.synchronize()
    found = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    kernels = [{"kernel": each.key[:60], "launches": each.count, "us": each.self_device_time_total} for each in found]
    return [each for each in kernels if each["us"] > 0]


def measure(
    name: str, device: Device, roof: Roof, batches: list[int], arguments: argparse.Namespace, apart: bool
) -> list[dict[str, Any]]:
    """Measure one model."""
    context, layers = arguments.context, arguments.layers
    began = time.monotonic()
    model = load(name, device, layers, apart)
    loaded_s = time.monotonic() - began
    found = []
    for rows in batches if model.fused is not None else []:
        assert model.fused is not None
        try:
            with torch.inference_mode():
                us, least_us = measure_step(model, model.fused, rows, context), floor_us(model, roof, rows, context)
        except InvalidConfiguration as error:  # its K and V do not fit
            print(f"{name}, {rows} rows: {error.message}", flush=True)
            continue
        found.append({"model": name, "batch": rows, "us": us, "floor_us": least_us, "load_s": loaded_s})
        if arguments.kernels:
            with decode_step(model, model.fused, rows, context) as run:
                found[-1]["kernels"] = kernels_of(device, run)
        found[-1] |= ({"layers": layers} if layers else {}) | ({"shared": "apart"} if apart else {})
    determinism = model.info.determinism
    print(f"{name}: loaded in {loaded_s:.1f} s, fused: {model.fused is not None}, {determinism}", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    roof = measure_roof(device)
    results: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        batches = [int(each) for each in arguments.batches.split(",")]
        for apart in (False, True) if arguments.apart else (False,):
            results += measure(name, device, roof, batches, arguments, apart)
            gc.collect()
            device.release_cached()
    rows = [
        [
            f"{each['model']} {each['batch']}{' apart' if 'shared' in each else ''}",
            f"{each['us'] / 1e3:.2f}",
            f"{each['floor_us'] / each['us']:.0%}",
        ]
        for each in results
    ]
    for each in results:
        for kernel in each.get("kernels", []):
            print(f"{each['model']} {each['batch']}: {kernel['us']:8.1f} us, {kernel['launches']:4} {kernel['kernel']}")
    title = f"context {arguments.context}, {device.name}: {roof}; ms of a graph's replay"
    document = {"device": device.name, "read_bytes_s": roof.read_bytes, "flops_s": roof.flops, "measured": results}
    report(title, ["model, batch", "ms", "share of the floor"], rows, document, arguments.json)


if __name__ == "__main__":
    main()
