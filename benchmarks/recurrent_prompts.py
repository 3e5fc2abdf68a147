"""Prefill of models with recurrent states: prompts in chunks by kernels, and through transformers row by row.

    python -m benchmarks.recurrent_prompts --device auto --dtype bfloat16 [--shape qwen3_next] [--json FILE]

One model is loaded, with random weights. A step with all tokens of several prompts alternates between both ways; the
shortest of each are compared, and what their recurrent layers take of them. On a device without kernels for prompts
both ways are transformers' own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.mixers import BoundMixer
from kvforge.worker.loading.model import LoadedModel

from .recurrent_steps import BLOCK_SIZE, PLAIN, row_by_row
from .recurrent_steps import SHAPES as STEPPING
from .report import report

WARM = 2
LINEAR = "linear_attention"
SHAPES: dict[str, dict[str, Any]] = {
    **STEPPING,
    "qwen3_next": {  # of Qwen3-Next-80B-A3B: 32 states of 128 x 128 in a layer, but 16 experts
        **PLAIN,
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, LINEAR, LINEAR, "full_attention"],
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}


class Prefill:
    """A step with all tokens of several prompts."""

    def __init__(self, model: LoadedModel, rows: int, tokens: int) -> None:
        self._model, width = model, -(-tokens // BLOCK_SIZE)
        each = width + model.geometry.state_blocks
        self.pool = KvPool(model.geometry, rows * each, model.device)
        table = np.random.default_rng(0).permutation(rows * each).astype(np.int32).reshape(rows, each)
        self._tables, self._states = table[:, :width].copy(), table[:, width:].copy()
        self._counts, upload = np.full(rows, tokens, np.int32), model.device.upload
        self._ids = upload(np.random.default_rng(1).integers(3, model.vocab_size, rows * tokens))
        self._places = upload(np.tile(np.arange(tokens), rows))
        self._last = upload(np.arange(1, rows + 1) * tokens - 1)

    @torch.inference_mode()
    def run(self) -> float:
        """Return the seconds of the step."""
        self._model.device.synchronize()
        began = time.perf_counter()
        starts, alike = np.zeros_like(self._counts), np.zeros(len(self._counts), np.bool_)
        batch = self.pool.batch(self._tables, starts, self._counts, alike, states=self._states)
        self._model.forward(self._ids, self._places, self._last, batch, self.pool)
        self._model.device.synchronize()
        return time.perf_counter() - began


@contextmanager
def timed(model: LoadedModel, spent: list[float]) -> Iterator[None]:
    """Add up the seconds of recurrent layers in `spent`."""
    run = BoundMixer.__call__

    def timing(self: BoundMixer, *given: Any) -> torch.Tensor:
        model.device.synchronize()
        began = time.perf_counter()
        try:
            return run(self, *given)
        finally:
            model.device.synchronize()
            spent[-1] += time.perf_counter() - began

    with patch.object(BoundMixer, "__call__", timing):
        yield


def measure(model: LoadedModel, rows: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return the shortest step of both ways, and its recurrent layers' part, in milliseconds."""
    assert model.fused is not None, "the model is not described"
    prefill = Prefill(model, rows, tokens)
    found: dict[str, float] = {}
    for way in ("rows", "chunks"):
        for timing in ("", "_recurrent"):
            times = []
            for _ in range(rounds + WARM):
                spent = [0.0]
                with row_by_row(model) if way == "rows" else nullcontext():
                    if timing:
                        with timed(model, spent):
                            prefill.run()
                    else:
                        spent[0] = prefill.run()
                times.append(1e3 * spent[0])
            found[f"{way}{timing}_ms"] = min(times[WARM:])
    prefill.pool.close()
    return found


def main() -> None:
    """Measure a shape, and print a table or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen3_next"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    torch.set_num_threads(arguments.threads)
    results = {}
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
            model = load_model(
                Path(folder), load_format="dummy", dtype=arguments.dtype, device=device, block_size=BLOCK_SIZE
            )
        results[shape] = measure(model, arguments.rows, arguments.tokens, arguments.rounds)
    names = ("rows_ms", "rows_recurrent_ms", "chunks_ms", "chunks_recurrent_ms")
    lines = [
        [shape, *(round(found[name], 2) for name in names), f"{found['rows_ms'] / found['chunks_ms']:.2f}"]
        for shape, found in results.items()
    ]
    header = ["shape", "row by row, ms", "its recurrent layers", "chunks, ms", "its recurrent layers", "ratio"]
    title = f"Prefill of {arguments.rows} x {arguments.tokens} tokens, {arguments.dtype}, {device.name}"
    report(title, header, lines, results, arguments.json)


if __name__ == "__main__":
    main()
