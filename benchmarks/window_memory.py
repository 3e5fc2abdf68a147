"""Tokens that a KV pool holds for the same bytes, with layers that keep their window and with all KV kept.

    python -m benchmarks.window_memory [--context 32768] [--real] [--json FILE]

First by the geometry of published models, with the blocks that a sequence holds at this context while it decodes (and,
apart, behind the last steps of its prompt, which reach further back). With --real a coordinator and a worker as
processes then serve one prompt of this length, by tiny models with the windows and the mixture of layers of Gemma 3 and
gpt-oss on the CPU, and the pool's own numbers are read while it decodes, once with windows and once without
(`limits.state_blocks_max = 1`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge import SamplingParams
from kvforge.coordinator.core.limits import Limits
from kvforge.worker.attention.pool import KvGeometry, LayerShape
from kvforge.worker.attention.windows import WindowLimits, choose_geometry
from tools.cluster.cluster import Cluster

from .report import report

BLOCK_SIZE, GIB = 16, 1 << 30
ANSWER = 48
SLIDING, FULL = "sliding_attention", "full_attention"
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
REAL: dict[str, dict[str, Any]] = {
    "Gemma 3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": [SLIDING] * 5 + [FULL],
        "sliding_window": 1024,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 128,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@dataclass(frozen=True)
class Published:
    """A published model: every `period`-th of `layers` layers attends to all tokens."""

    name: str
    layers: int
    period: int
    kv_heads: int
    head_size: int
    window: int

    def windows(self) -> list[int]:
        """Return the window of each layer; 0: none."""
        return [0 if (index + 1) % self.period == 0 else self.window for index in range(self.layers)]


MODELS = (
    Published("Gemma 3 12B", 48, 6, 8, 256, 1024),
    Published("Gemma 3 27B", 62, 6, 16, 128, 1024),
    Published("gpt-oss-20b", 24, 2, 8, 64, 128),
    Published("gpt-oss-120b", 36, 2, 8, 64, 128),
    Published("Command R7B", 32, 4, 8, 128, 4096),
)


def sequence_bytes(geometry: KvGeometry, context: int, ahead: int) -> int:
    """Return the most bytes that a sequence of `context` tokens holds, with `ahead` tokens in flight."""
    blocks = -(-context // BLOCK_SIZE)
    released = max(0, context - ahead - geometry.window) // BLOCK_SIZE if geometry.window else blocks
    return (blocks + (blocks - released) * geometry.window_pages) * geometry.bytes_per_block


def by_geometry(context: int) -> tuple[list[list[object]], list[dict[str, Any]]]:
    """Return the rows of the table and the results of the published models."""
    limits = Limits()
    ahead = limits.schedule.steps_in_flight_max * limits.schedule.step_tokens_max
    columns = limits.bounds.state_blocks_max
    rows, results = list[list[object]](), list[dict[str, Any]]()
    for model in MODELS:
        whole = KvGeometry((LayerShape(model.kv_heads, model.head_size),) * model.layers, BLOCK_SIZE, "bfloat16")
        kept = choose_geometry(whole, model.windows(), WindowLimits(ahead, 1 << 20, columns), context)
        before = sequence_bytes(whole, context, 0)
        # The worst place of the window among the blocks.
        decoding = max(sequence_bytes(kept, context - at, 1) for at in range(BLOCK_SIZE))
        prompt = max(sequence_bytes(kept, context - at, ahead) for at in range(BLOCK_SIZE))
        found = {
            "model": model.name,
            "layers": model.layers,
            "windows": sum(map(bool, model.windows())),
            "window": model.window,
            "pages": kept.window_pages,
            "tokens_per_gib": context * GIB / before,
            "with_windows": context * GIB / decoding,
            "ratio": before / decoding,
            "ratio_in_prompt": before / prompt,
        }
        results.append(found)
        layers = f"{found['windows']} of {model.layers} layers see {model.window}"
        tokens = [f"{found[name]:,.0f}" for name in ("tokens_per_gib", "with_windows")]
        rows.append([model.name, layers, *tokens, f"{found['ratio']:.2f}", f"{found['ratio_in_prompt']:.2f}"])
    return rows, results


def serve(name: str, context: int, windows: bool) -> dict[str, Any]:
    """Serve one prompt, and return the pool's numbers while it decodes."""
    limits = f"[limits]\nblocks_per_sequence_max = {context // BLOCK_SIZE}\n"
    limits += "" if windows else "state_blocks_max = 1\n"
    with tempfile.TemporaryDirectory() as folder:
        config = TINY | REAL[name] | {"max_position_embeddings": context + ANSWER}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with Cluster(model=Path(folder), blocks=4 * context // BLOCK_SIZE, coordinator=limits) as cluster:
            cluster.start_coordinator()
            cluster.start_worker("w0", changed='load_format = "dummy"')
            kv = cluster.client()
            cluster.wait_workers(kv, 1)
            prompt = [3 + 7 * place % 90 for place in range(context - ANSWER)]
            request = kv.submit(prompt, max_tokens=ANSWER, sampling=SamplingParams(temperature=0.0, ignore_eos=True))
            tokens = iter(request)
            for _ in range(ANSWER // 2):
                next(tokens)
            (pool,) = kv.stats().pools
            held = pool.referenced * pool.bytes_per_block
            request.result(600)
            return {
                "model": name,
                "windows": windows,
                "tokens": pool.live_tokens,
                "blocks": pool.referenced,
                "bytes": held,
                "tokens_per_mib": pool.live_tokens * (1 << 20) / held,
            }


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--real", action="store_true", help="serve a prompt of this length too")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    rows, results = by_geometry(options.context)
    title = f"Tokens of KV in bfloat16 in one GiB, a context of {options.context} tokens"
    header = ["model", "windows", "all KV kept", "windows kept", "ratio", "ratio while a prompt ends"]
    if not options.real:
        report(title, header, rows, results, options.json)
        return
    for name in REAL:
        whole, kept = (serve(name, options.context, windows) for windows in (False, True))
        ratio = kept["tokens_per_mib"] / whole["tokens_per_mib"]
        numbers = [f"{each['tokens_per_mib'] * 1024:,.0f}" for each in (whole, kept)]
        held = f"{kept['blocks']} blocks in use"
        rows.append([f"{name}'s windows in a tiny model, served", held, *numbers, f"{ratio:.2f}", ""])
        results += [whole, kept | {"ratio": ratio}]
    report(title, header, rows, results, options.json)


if __name__ == "__main__":
    main()
