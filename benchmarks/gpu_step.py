"""Cost of a whole decode step, through coordinator and client, beside the limits of memory and matrix units.

    python -m benchmarks.gpu_step [--model llama-3.1-8b] [--batches 1,16,64,256] [--context 1024] [--json FILE]

Dummy weights; greedy requests with random prompts, all different. Three parts, each a process of its own, one after
another on the same GPU:

served        a coordinator, a worker and a client as processes. Time per step is what the client sees: the tokens that
              arrive while all requests of the batch are decoding, over the batch. The GPU's idle share is the worker's
              own count: device time between the end of one step's graph and the start of the next one's, which is
              also when inputs and results are copied.
runner        the runner alone, in one process, two steps under way as in the worker; read bandwidth and matrix rate.
transformers  generate_batch of transformers' continuous batching with paged SDPA, the best that it has without
              packages of foreign kernels; time per step from its own timestamps.

floor = max(weight bytes / read bandwidth, weight operations / matrix rate) + KV bytes / read bandwidth, for the mean
context of the steps that were measured. A step reads a few rows of the embedding table only, so the weights exclude it
unless it is the head too; "all weights" is the share with every byte of the model counted. --tiny runs the same script
with a tiny model on a CPU; its numbers have no meaning.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import report
from .step_plan import Plan, Save
from .step_runner import measure_runner
from .step_served import measure_served
from .step_transformers import measure_transformers

PART_S = 540
PARTS: dict[str, Callable[[Plan, Save], dict[str, Any]]] = {
    "served": measure_served,
    "runner": measure_runner,
    "transformers": measure_transformers,
}


def floor_ms(rates: dict[str, Any], batch: int, context: float, prefix: str = "") -> float | None:
    """Return the minimum time of a step of `batch` rows of `context` tokens here, or None without measured rates.

    prefix: "all_", to count every weight.
    """
    if "flops" not in rates:
        return None
    bandwidth = rates["read_bytes_per_s"]
    bytes_s = rates[f"{prefix}weight_bytes"] / bandwidth
    weights_s = max(bytes_s, 2 * rates[f"{prefix}weights"] * batch / rates["flops"])
    return float((weights_s + batch * context * rates["kv_bytes_per_token"] / bandwidth) * 1e3)


def _run_part(part: str, plan_arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """Run one part in a separate process; after a failure return its partial results."""
    with tempfile.TemporaryDirectory(prefix="kvf-step-") as folder:
        path = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks.gpu_step", *plan_arguments, "--part", part, "--json", str(path)]
        try:
            subprocess.run(command, check=True, timeout=timeout_s)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{part}: {error}", file=sys.stderr, flush=True)
        if not path.exists():
            return {}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class _Saving:
    """Saves the results so far, so that a later failure of the part loses nothing."""

    path: Path

    def __call__(self, found: dict[str, Any]) -> None:
        self.path.write_text(json.dumps(found), encoding="utf-8")


def _row(batch: int, rates: dict[str, Any], runner: Any, served: Any, other: Any) -> list[str]:
    def cell(value: float | None, digits: int = 2, suffix: str = "") -> str:
        return "-" if value is None else f"{value:.{digits}f}{suffix}"

    cells = [str(batch)]
    for found in (runner, served):
        floor = floor_ms(rates, batch, found["context"]) if found else None
        share = None if floor is None else 100 * floor / found["ms"]
        idle = None if not found or found["idle_share"] is None else 100 * found["idle_share"]
        cells += [cell(floor), cell(found["ms"] if found else None), cell(share, 1, " %"), cell(idle, 2, " %")]
    floor = floor_ms(rates, batch, served["context"], "all_") if served else None
    cells.append(cell(None if floor is None else 100 * floor / served["ms"], 1, " %"))
    cells.append(cell(served["tokens_per_s"] if served else None, 0))
    cells.append(cell(other["ms"] if other else None))
    cells.append(cell(other["ms"] / served["ms"] if other and served else None, 1, " x"))
    return cells


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape that ships with kvforge, or a config.json")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=120, help="measured steps of each batch [120]")
    parser.add_argument("--step-tokens", type=int, default=8192, help="most tokens of a step [8192]")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--determinism", default="batch-invariant", help="batch-invariant, or fast")
    parser.add_argument("--transformers-steps", type=int, default=24, help="measured steps for transformers [24]")
    parser.add_argument("--timeout", type=float, default=PART_S, help=f"seconds of one part [{PART_S}]")
    parser.add_argument("--parts", default="runner,served,transformers", help="which parts [all]")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to try the script")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvf-step-") as folder:
        if options.tiny and options.model == "llama-3.1-8b":
            options.model, options.context, options.step_tokens = tiny_model(Path(folder)), 64, 128
        batches = tuple(int(batch) for batch in options.batches.split(","))
        plan = Plan(
            options.model,
            batches,
            options.context,
            options.steps,
            options.step_tokens,
            options.tiny,
            options.kv_dtype,
            options.attention,
            options.transformers_steps,
            options.determinism,
        )
        if options.part:
            save = _Saving(Path(options.json))
            save(PARTS[options.part](plan, save))
            return 0
        arguments = ["--model", options.model, "--batches", options.batches, "--context", str(options.context)]
        arguments += ["--steps", str(options.steps), "--step-tokens", str(options.step_tokens)]
        arguments += ["--transformers-steps", str(options.transformers_steps)]
        arguments += ["--kv-dtype", options.kv_dtype, "--attention", options.attention]
        arguments += ["--determinism", options.determinism]
        arguments += ["--tiny"] if options.tiny else []
        parts = {part: _run_part(part, arguments, options.timeout) for part in options.parts.split(",")}
    rates, served = parts.get("runner", {}), parts.get("served", {})
    others = parts.get("transformers", {})
    rows = [
        _row(batch, rates, rates.get("batches", {}).get(str(batch)), served.get(str(batch)), others.get(str(batch)))
        for batch in batches
    ]
    title = f"decode step: {plan.model}, {plan.determinism}, context {plan.context}, {rates.get('device', '-')}"
    if "flops" in rates:
        title += f"; read {rates['read_bytes_per_s'] / 1e12:.2f} TB/s, bfloat16 {rates['flops'] / 1e12:.0f} TFLOP/s"
    header = ["batch", "floor ms", "runner ms", "share", "idle", "floor ms", "served ms", "share", "idle"]
    header += ["all weights", "tokens/s", "transformers ms", "ratio"]
    report(title, header, rows, parts, options.json)
    return 0


def tiny_model(folder: Path, context_tokens_max: int = 1024) -> str:
    """Write the configuration of a tiny model into the folder; return the folder."""
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_tokens_max,
    }
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
