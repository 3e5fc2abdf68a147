"""One model on several GPUs of one host, through coordinator and client: decode steps, prefill, a burst of requests.

    python -m benchmarks.tensor_parallel [--ranks 1,2] [--model llama-3.1-8b] [--batches 1,16,64,256] [--json FILE]

Dummy weights in bfloat16, greedy requests with random prompts, all different; each number of ranks with a coordinator,
its workers and a client of its own, one after the other.

decode     as the served part of `benchmarks.gpu_step`: the tokens that come while all requests of the batch decode
prefill    8 prompts of 2048 tokens at once, one token each: from the first submission to the last token
burst      256 requests of 512 tokens in and 128 out at once: tokens a second until the last token
exchange   the sum over the ranks with its norm, alone in a graph (`benchmarks.gpu_exchange`)

floor = a rank's weights and its part of K and V, at the measured read bandwidth of one GPU, and two exchanges a layer
and one more for the head, each with its time alone. --tiny runs it with a tiny model on CPU ranks; its numbers have no
meaning.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from .gpu_step import tiny_model
from .report import report
from .step_plan import VOCABULARY, Plan
from .step_served import open_served, served_batch, wait_ready

PREFILL, BURST = (8, 2048), (256, 512, 128)
REPEATS = 5
SIDE_S = 200


def measured(plan: Plan, ranks: int, only_decode: bool) -> dict[str, Any]:
    """Measure all parts with `ranks` ranks."""
    from kvforge import Client

    tokens = max(PREFILL[1] + 2, BURST[1] + BURST[2] + 1, plan.context_max)
    prefill, burst = (PREFILL, BURST) if not plan.tiny else ((2, 32), (4, 16, 8))
    found: dict[str, Any] = {"decode": {}, "ranks": ranks}
    with open_served(plan, ranks, tokens) as installation:
        try:
            with Client(installation.endpoint, timeout_s=60.0, stream_timeout_s=120.0) as kv:
                wait_ready(kv, installation)
                worker = kv.health().workers[0]
                found |= {"kernels": dict(worker.kernels), "blocks": kv.stats().pools[0].blocks}
                print(f"{ranks} ranks: {worker.kernels}", file=sys.stderr, flush=True)
                for batch in plan.batches:
                    found["decode"][str(batch)] = served_batch(kv, installation, plan, batch)
                    print(f"{ranks} ranks, {batch}: {found['decode'][str(batch)]}", file=sys.stderr, flush=True)
                if not only_decode:
                    found["prefill_s"] = min(_burst_s(kv, prefill[0], prefill[1], 1, seed) for seed in range(REPEATS))
                    took = min(_burst_s(kv, *burst, 100 + seed) for seed in range(2))
                    found["burst_tokens_per_s"] = burst[0] * burst[2] / took
                    print(f"{ranks} ranks: {found['prefill_s']}, {found['burst_tokens_per_s']}", file=sys.stderr)
        finally:
            for child in installation.children[1:]:
                print(installation.log_of(child.name)[-6000:], file=sys.stderr, flush=True)
    return found


def _burst_s(kv: Any, requests: int, prompt_tokens: int, answer_tokens: int, seed: int) -> float:
    """Seconds from the first submission to the last token."""
    from kvforge import SamplingParams

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCABULARY, prompt_tokens).astype(np.int32) for _ in range(requests)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    began = monotonic()
    running = [kv.submit(prompt, max_tokens=answer_tokens, sampling=sampling) for prompt in prompts]
    for _ in kv.merge(*running):
        pass
    took = monotonic() - began
    assert all(len(request.tokens) == answer_tokens for request in running)
    return took


def _other(command: list[str], timeout_s: float) -> dict[str, Any]:
    """Run another benchmark; return its JSON, or an empty object if it fails."""
    with tempfile.TemporaryDirectory(prefix="kvf-tp-") as folder:
        path = Path(folder) / "found.json"
        try:
            subprocess.run([sys.executable, "-m", *command, "--json", str(path)], check=True, timeout=timeout_s)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found


def floor_ms(shape: dict[str, Any], ranks: int, batch: int, context: float, exchange_us: float) -> float:
    """Return the minimum time of a step of `batch` rows of `context` tokens."""
    read = shape["weight_bytes"] + batch * context * shape["kv_bytes_per_token"]
    exchanges = 2 * shape["layers"] + 1 if ranks > 1 else 0
    return float(read / ranks / shape["read_bytes_per_s"] * 1e3 + exchanges * exchange_us / 1e3)


def shape_of(model: str, kv_dtype: str) -> dict[str, Any]:
    """Return the bytes that a step reads, for a model with separate embedding and head, and one GPU's read
    bandwidth."""
    from kvforge.worker.device.device import open_device
    from kvforge.worker.loading import find_source

    from .gpu_roof import measure_roof

    config = json.loads(find_source(model, "dummy").files[0].read_text(encoding="utf-8"))
    device = open_device()
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    layer = hidden * size * (heads + 2 * kv_heads) + heads * size * hidden + 3 * hidden * inner
    stored = 2 if kv_dtype == "auto" else 1 + 4 / size
    return {
        "layers": layers,
        "hidden": hidden,
        "weight_bytes": 2 * (layers * layer + config["vocab_size"] * hidden),
        "kv_bytes_per_token": 2 * layers * kv_heads * size * stored,
        "device": device.name,
        "read_bytes_per_s": measure_roof(device).read_bytes,
    }


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, one after the other [1,2]")
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape that ships with kvforge, or a config.json")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--only-decode", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU ranks, to try the script")
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--side", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvf-tp-") as folder:
        if options.tiny:
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
        )
        if options.side == -1:
            Path(options.json).write_text(json.dumps(shape_of(options.model, options.kv_dtype)), encoding="utf-8")
            return 0
        if options.side:
            found = measured(plan, options.side, options.only_decode)
            Path(options.json).write_text(json.dumps(found), encoding="utf-8")
            return 0
        given = [each for each in sys.argv[1:] if each != options.json and each != "--json"]
        if options.tiny:
            given += ["--model", options.model]
        counts = [int(each) for each in options.ranks.split(",")]
        sides = {
            count: _other(["benchmarks.tensor_parallel", *given, "--side", str(count)], SIDE_S) for count in counts
        }
        shape: dict[str, Any] = {}
        exchange: dict[str, Any] = {}
        if not options.tiny:
            shape = _other(["benchmarks.tensor_parallel", *given, "--side", "-1"], SIDE_S)
            command = [
                "benchmarks.gpu_exchange",
                "--ranks",
                str(max(counts)),
                "--hidden",
                str(shape.get("hidden", 4096)),
            ]
            exchange = _other([*command, "--tokens", options.batches], SIDE_S) if max(counts) > 1 else {}
    rows = [_row(batch, sides, shape, exchange) for batch in map(str, batches)]
    header = ["batch"]
    for count in counts:
        header += [f"{count} ranks, ms", "floor", "share"]
    title = f"tensor parallel: {options.model}, context {plan.context}, {shape.get('device', '-')}"
    results = {"sides": {str(count): side for count, side in sides.items()}, "shape": shape, "exchange": exchange}
    report(title, header, rows, results, options.json)
    for count, side in sides.items():
        if "prefill_s" in side:
            burst = (
                f"{BURST[0]} requests of {BURST[1]} in and {BURST[2]} out: {side['burst_tokens_per_s']:.0f} tokens/s"
            )
            print(f"{count} ranks: {PREFILL[0]} x {PREFILL[1]} prompt tokens in {side['prefill_s']:.3f} s; {burst}")
    return 0


def _row(batch: str, sides: dict[int, dict[str, Any]], shape: dict[str, Any], exchange: dict[str, Any]) -> list[str]:
    cells = [batch]
    took = exchange.get("results", {}).get("us", {}).get(batch, {}).get("read of peers", 0.0)
    for count, side in sides.items():
        one = side.get("decode", {}).get(batch)
        if one is None:
            cells += ["-"] * 3
            continue
        floor = floor_ms(shape, count, int(batch), one["context"], took) if shape else None
        cells += [f"{one['ms']:.2f}", "-" if floor is None else f"{floor:.2f}"]
        cells.append("-" if floor is None else f"{100 * floor / one['ms']:.1f} %")
    return cells


if __name__ == "__main__":
    sys.exit(main())
