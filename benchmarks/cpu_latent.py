"""Prompts of a model with latents on a CPU: keys and values expanded from the latents, and attention over latents.

    python -m benchmarks.cpu_latent [--dtype bfloat16] [--threads 1] [--rounds 3] [--json FILE]

Two layers of DeepSeek-V2-Lite with random weights and a small vocabulary. Both ways alternate; the shortest are
compared. Steps have new tokens behind tokens that are in the cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvforge.worker.attention.expanded_space import ExpandedSpaces
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel

from .report import report

BLOCK_SIZE, TOKENS_MAX = 16, 8192
CASES = ((2048, 0), (512, 0), (512, 1536), (32, 500), (32, 2000), (100, 2000), (200, 2000), (32, 6000), (512, 6000))
CONFIGURATION = Path(__file__).parents[1] / "worker" / "model_configs" / "deepseek-v2-lite.json"


def load(dtype: str) -> LoadedModel:
    """Return two layers of DeepSeek-V2-Lite."""
    fields = json.loads(CONFIGURATION.read_text()) | {"num_hidden_layers": 2, "vocab_size": 8192}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        device = open_device("cpu")
        return load_model(Path(folder), load_format="dummy", dtype=dtype, device=device, block_size=BLOCK_SIZE)


@torch.inference_mode()
def step_ms(model: LoadedModel, pool: KvPool, new: int, before: int) -> float:
    """Return the milliseconds of a step with `new` tokens behind others."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, model.vocab_size, new))
    places, table = torch.arange(before, before + new), np.arange(-(-(before + new) // BLOCK_SIZE), dtype=np.int32)
    starts, counts = np.array([before], np.int32), np.array([new], np.int32)
    began = time.perf_counter()
    batch = pool.batch(table[None], starts, counts, np.zeros(1, np.bool_))
    model.forward(ids, places, torch.tensor([new - 1]), batch, pool)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    """Measure all cases, and print a table or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load(arguments.dtype)
    pool, attention = KvPool(model.geometry, TOKENS_MAX // BLOCK_SIZE, model.device), model.context.attention
    ways = {"absorbed": None, "expanded": ExpandedSpaces(torch.device("cpu"), TOKENS_MAX)}
    results: dict[str, Any] = {"dtype": arguments.dtype, "threads": arguments.threads, "cases": []}
    rows = []
    for new, before in CASES:
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, spaces in ways.items():
                attention.expanded_spaces = spaces
                times[way].append(step_ms(model, pool, new, before))
        found = {way: min(each) for way, each in times.items()}
        ratio = found["absorbed"] / found["expanded"]
        results["cases"].append(
            {"new": new, "before": before, "ratio": ratio, **{f"{way}_ms": found[way] for way in ways}}
        )
        rows.append([f"{new} behind {before}", *(f"{found[way]:.0f}" for way in ways), f"{ratio:.2f}"])
    title = (
        f"Steps of two layers of DeepSeek-V2-Lite, {arguments.dtype}, {arguments.threads} threads, {model.device.name}"
    )
    report(title, ["new tokens", "absorbed, ms", "expanded, ms", "ratio"], rows, results, arguments.json)


if __name__ == "__main__":
    main()
