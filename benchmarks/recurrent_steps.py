"""Decode steps of models with recurrent states: generated tokens through kernels, and through transformers row by row.

    python -m benchmarks.recurrent_steps [--shape lfm2] [--rows 8 64] [--threads 1] [--json FILE]

One model is loaded, with random weights. Its steps alternate between both ways on the same states; the shortest of each
are compared, and what their recurrent layers take of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kvforge.protocol.messages import RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import open_device
from kvforge.worker.loading import mixers
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.mixers import BoundMixer
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.runner import ModelRunner

from .report import report

BLOCK_SIZE, PROMPT, WARM = 16, 4, 2
PLAIN = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 4096, "vocab_size": 8192}
FULL = "full_attention"
SHAPES: dict[str, dict[str, Any]] = {  # layers of published models, fewer of them, with a small vocabulary
    "lfm2": {  # of LFM2-350M
        **PLAIN,
        "model_type": "lfm2",
        "hidden_size": 1024,
        "intermediate_size": 4608,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", FULL, "conv", "conv", FULL, "conv", "conv"],
    },
    "qwen3_5": {  # of a Qwen3.5 of 1024 numbers: 16 states of 128 x 128 in a layer
        **PLAIN,
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "kimi_linear": {  # of Kimi Linear 48B A3B: 32 states of 128 x 128 in a layer, but 16 experts
        **PLAIN,
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + [FULL],
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    "granite4": {  # of Granite 4.0 H 1B: 48 states of 64 x 128 in a layer
        **PLAIN,
        "model_type": "granitemoehybrid",
        "hidden_size": 1536,
        "shared_intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
    },
    "falcon_h1": {  # of Falcon-H1 0.5B: attention and 24 states of 64 x 128 in every layer
        **PLAIN,
        "model_type": "falcon_h1",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35],
        "mlp_multipliers": [0.88, 0.59],
    },
    "jamba": {  # of Jamba's kind, dense: 2,048 states of 16 in a layer
        **PLAIN,
        "model_type": "jamba",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_experts": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": 64,
    },
    "mamba2": {  # of Mamba 2 780M, through transformers' layers: 48 states of 64 x 128 in a layer
        **PLAIN,
        "model_type": "mamba2",
        "hidden_size": 1536,
        "num_hidden_layers": 8,
        "num_heads": 48,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
    },
}


class Decoding:
    """Rows of one model that decode, each behind a prompt of PROMPT tokens."""

    def __init__(self, model: LoadedModel, rows: int, steps: int) -> None:
        width = -(-(PROMPT + steps) // BLOCK_SIZE)
        each = width + model.geometry.state_blocks
        self.pool = KvPool(model.geometry, rows * each, model.device)
        table = np.random.default_rng(0).permutation(rows * each).astype(np.int32).reshape(rows, each)
        self._tables, self._states = table[:, :width].copy(), table[:, width:].copy()
        self._runner = ModelRunner(model, self.pool, slots_max=rows, step_tokens_max=PROMPT * rows, step_rows_max=rows)
        self._slots, self._length = np.arange(rows, dtype=np.int32), 0
        begins = tuple(
            RowStart(slot=row, request_id=row, sampling=SamplingParams(temperature=0.0), seed=0) for row in range(rows)
        )
        tokens = np.random.default_rng(1).integers(3, model.vocab_size, PROMPT * rows).astype(np.int32)
        self._run(tokens, PROMPT, begins)

    def step(self) -> float:
        """Return the seconds of one step."""
        began = time.perf_counter()
        self._run(np.full(len(self._slots), -1, np.int32), 1, ())
        return time.perf_counter() - began

    def _run(self, tokens: np.ndarray, count: int, begins: tuple[RowStart, ...]) -> None:
        one = np.ones_like(self._slots)
        step = Step(
            self._length,
            begins=begins,
            slots=self._slots,
            starts=one * self._length,
            counts=one * count,
            samples=one,
            tokens=tokens,
        )
        outcome = self._runner.run(step, self._tables, self._states)
        assert not outcome.errors, outcome.errors
        self._length += count


@contextmanager
def row_by_row(model: LoadedModel) -> Iterator[None]:
    """Let transformers' modules compute generated tokens."""
    bound, undescribed = bound_mixers(model), model.context.steps
    kept, model.context.steps = [mixer.step for mixer in bound], {}
    for mixer in bound:
        mixer.step = None
    try:
        yield
    finally:
        model.context.steps = undescribed
        for mixer, step in zip(bound, kept, strict=True):
            mixer.step = step


def bound_mixers(model: LoadedModel) -> list[BoundMixer]:
    """Return the recurrent layers of a described decoder."""
    layers = [] if model.fused is None else model.fused.layers
    return [layer.mixer for layer in layers if isinstance(layer.mixer, BoundMixer)]


@contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    """Add up the seconds of recurrent layers in `spent`."""
    run = mixers._mixed

    def timing(*given: Any) -> torch.Tensor:
        began = time.perf_counter()
        try:
            return run(*given)
        finally:
            spent[-1] += time.perf_counter() - began

    with patch.object(mixers, "_mixed", timing):
        yield


def measure(model: LoadedModel, rows: int, rounds: int) -> dict[str, float]:
    """Return the shortest step of both ways, and its recurrent layers' part, in milliseconds."""
    described = [mixer.step for mixer in bound_mixers(model)] or [*model.context.steps.values()]
    assert described and all(step is not None for step in described), "its steps are not described"
    decoding = Decoding(model, rows, 2 * (rounds + WARM))
    found: dict[str, list[tuple[float, float]]] = {"rows": [], "kernels": []}
    for _ in range(rounds + WARM):
        for way, times in found.items():
            spent = [0.0]
            with timed(spent):
                if way == "rows":
                    with row_by_row(model):
                        whole = decoding.step()
                else:
                    whole = decoding.step()
            times.append((1e3 * whole, 1e3 * spent[0]))
    decoding.pool.close()
    best = {way: min(times[WARM:]) for way, times in found.items()}
    return {f"{way}{name}_ms": best[way][place] for way in best for place, name in enumerate(("", "_recurrent"))}


def main() -> None:
    """Measure a shape, and print a table or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="lfm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
        model = load_model(
            Path(folder), load_format="dummy", dtype=arguments.dtype, device=device, block_size=BLOCK_SIZE
        )
    results = {rows: measure(model, rows, arguments.rounds) for rows in arguments.rows}
    lines = [
        [
            rows,
            *(round(found[name], 2) for name in ("rows_ms", "rows_recurrent_ms", "kernels_ms", "kernels_recurrent_ms")),
            f"{found['rows_ms'] / found['kernels_ms']:.2f}",
        ]
        for rows, found in results.items()
    ]
    header = ["rows", "row by row, ms", "its recurrent layers", "kernels, ms", "its recurrent layers", "ratio"]
    title = f"Decode steps, {arguments.shape}, {arguments.dtype}, {arguments.threads} thread(s)"
    report(title, header, lines, results, arguments.json)


if __name__ == "__main__":
    main()
