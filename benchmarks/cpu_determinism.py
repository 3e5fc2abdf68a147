"""Cost of batch invariance on a CPU, for layers that transformers runs.

    python -m benchmarks.cpu_determinism [--models phi3,gemma2,gpt2,mixtral] [--dtype float32] [--threads 1]
        [--rounds 9] [--json FILE]

The forward pass alone, of small models with random weights in these layers, each loaded twice: with `determinism =
"fast"`, which leaves transformers' modules unchanged, and with "batch-invariant". Both run in turn, in one process;
medians in milliseconds of CPU time: decode steps of 1 and of 8 rows behind 100 tokens, prompts of 40 and of 256 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from benchmarks.report import report
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel

MODES = ("fast", "batch-invariant")
BLOCK_SIZE, BEFORE = 16, 100
SHAPE = {
    "vocab_size": 8000,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FIELDS: dict[str, dict[str, object]] = {
    "gemma2": {"head_dim": 64},
    "gpt2": {"n_embd": 576, "n_layer": 12, "n_head": 9, "n_positions": 1024},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 512},
}
# Rows, new tokens of each, cached tokens before them, and passes timed together.
WORK = {"decode, 1 row": (1, 1, BEFORE, 5), "8 rows": (8, 1, BEFORE, 5), "40": (1, 40, 0, 2), "256": (1, 256, 0, 1)}


def loaded(model_type: str, dtype: str, mode: str, more: Mapping[str, object] = MappingProxyType({})) -> LoadedModel:
    """The model in one of the modes. more: other fields of its configuration."""
    with tempfile.TemporaryDirectory() as folder:
        fields = SHAPE | FIELDS.get(model_type, {}) | dict(more) | {"model_type": model_type}
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        device = open_device("cpu", steady=mode != "fast")
        return load_model(folder, load_format="dummy", dtype=dtype, device=device, block_size=BLOCK_SIZE)


def pass_ms(
    model: LoadedModel,
    pool: KvPool,
    rows: int,
    count: int,
    before: int,
    passes: int,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the milliseconds of one pass, in CPU time unless another clock is given."""
    width = -(-(before + count) // BLOCK_SIZE)
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    tokens, places = torch.arange(rows * count) % model.vocab_size, torch.arange(before, before + count).repeat(rows)
    ends = torch.arange(1, rows + 1) * count - 1
    began = clock()
    for _ in range(passes):
        starts, counts = np.full(rows, before, np.int32), np.full(rows, count, np.int32)
        batch = PagedBatch.build(tables, starts, counts, BLOCK_SIZE, model.device)
        model.forward(tokens, places, ends, batch, pool)
    return (clock() - began) / passes * 1e3


def measured(model_type: str, dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    """Medians by work and mode."""
    models = {mode: loaded(model_type, dtype, mode) for mode in MODES}
    pools = {mode: KvPool(model.geometry, 128, model.device) for mode, model in models.items()}
    found: dict[str, dict[str, float]] = {}
    for name, work in WORK.items():
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for turn in range(rounds + 1):
            for mode in MODES:
                model = models[mode]
                assert model.info.determinism == mode, model.info.determinism
                took = pass_ms(model, pools[mode], *work)
                if turn:  # the first warms up
                    times[mode].append(took)
        found[name] = {mode: statistics.median(each) for mode, each in times.items()}
    for pool in pools.values():
        pool.close()
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="phi3,gemma2,gpt2,mixtral")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results, rows = {}, []
    for model_type in options.models.split(","):
        found = results[model_type] = measured(model_type, options.dtype, options.rounds)
        for name, times in found.items():
            fast, steady = (times[mode] for mode in MODES)
            rows.append([model_type, name, f"{fast:.2f}", f"{steady:.2f}", f"{steady / fast - 1:+.1%}"])
    title = f"layers that transformers runs, {options.dtype}, {options.threads} threads, ms of CPU time"
    report(title, ["layers", "", *MODES, "longer by"], rows, results, options.json)


if __name__ == "__main__":
    main()
