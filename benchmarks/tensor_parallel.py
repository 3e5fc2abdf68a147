"""One model on several GPUs of one host, through coordinator and client: decode steps, prefill, a burst of requests.

    python -m benchmarks.tensor_parallel [--ranks 1,2,2x2] [--model llama-3.1-8b] [--batches 1,16,64,256]
        [--worker expert_parallel=true] [--json FILE]

Dummy weights in bfloat16, greedy requests with random prompts, all different; each number of ranks with a coordinator,
its workers and a client of its own, one after the other. 2x2: two workers of two ranks each.

decode     as the served part of `benchmarks.gpu_step`: the tokens that come while all requests of the batch decode
prefill    8 prompts of 2048 tokens at once, one token each: from the first submission to the last token
burst      256 requests of 512 tokens in and 128 out at once: tokens a second until the last token
start      from the start of the processes until all ranks are ready, and the device memory of each rank
loss       the last rank is killed while 64 requests decode, and the ranks are started again as they end: from the kill
           to the first token of the new ranks, and tokens that differ from those of a run without a kill
exchange   the sum over the ranks with its norm, alone in a graph (`benchmarks.gpu_exchange`)

floor = a rank's weights and its part of K and V, at the measured read bandwidth of one GPU, and two exchanges a layer
and one more for the head, each with its time alone. A mixture of experts reads the distinct experts that its tokens
choose, counted for even chances. --tiny runs it with a tiny model on CPU ranks; its numbers have no
meaning.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from .gpu_step import tiny_model
from .installation import Installation
from .report import report
from .step_plan import VOCABULARY, Plan
from .step_served import open_served, served_batch, wait_ready

PREFILL, BURST, LOSS = (8, 2048), (256, 512, 128), (64, 512, 192)
REPEATS = 5
SIDE_S = 280
READY_S = 200
ENDS_WITH_S = 60.0  # after one rank ends, the others end within this time
SHAPE = "shape"
MEMORY_LINE = re.compile(r"device memory: (.+)")


@dataclass(frozen=True)
class Side:
    """Workers to measure: `groups` workers of `ranks` ranks each. Written "2" or "2x2" (groups first)."""

    ranks: int
    groups: int = 1

    @classmethod
    def parse(cls, words: str) -> Side:
        """Return the side that the words name."""
        groups, _, ranks = words.rpartition("x")
        return cls(int(ranks), int(groups or 1))

    @property
    def processes(self) -> int:
        """Return the number of worker processes."""
        return self.ranks * self.groups

    @property
    def name(self) -> str:
        """Return a title."""
        return f"{self.ranks} ranks" if self.groups == 1 else f"{self.groups} x {self.ranks} ranks"


def measured(plan: Plan, side: Side, only_decode: bool) -> dict[str, Any]:
    """Measure all parts of a side."""
    from kvforge import Client

    tokens = max(PREFILL[1] + 2, BURST[1] + BURST[2] + 1, plan.context_max)
    prefill, burst, loss = (PREFILL, BURST, LOSS) if not plan.tiny else ((2, 32), (4, 16, 8), (4, 16, 60))
    found: dict[str, Any] = {"decode": {}, "ranks": side.ranks, "groups": side.groups}
    began = monotonic()
    with open_served(plan, side.ranks, tokens, side.groups) as installation:
        try:
            with Client(installation.endpoint, timeout_s=60.0, stream_timeout_s=120.0) as kv:
                _wait_all_ready(kv, installation, side)
                found["start_s"] = monotonic() - began
                found["memory"] = _memory(installation)
                worker = kv.health().workers[0]
                found |= {"kernels": dict(worker.kernels), "blocks": kv.stats().pools[0].blocks}
                print(f"{side.name}: {found}", file=sys.stderr, flush=True)
                for batch in plan.batches:
                    found["decode"][str(batch)] = served_batch(kv, installation, plan, batch)
                    print(f"{side.name}, {batch}: {found['decode'][str(batch)]}", file=sys.stderr, flush=True)
                if not only_decode:
                    found["prefill_s"] = min(_burst_s(kv, prefill[0], prefill[1], 1, seed) for seed in range(REPEATS))
                    took = min(_burst_s(kv, *burst, 100 + seed) for seed in range(2))
                    found["burst_tokens_per_s"] = burst[0] * burst[2] / took
                    if side.processes > 1:
                        found["loss"] = _loss(kv, installation, side, loss)
                    parts = {part: found[part] for part in ("prefill_s", "burst_tokens_per_s", "loss") if part in found}
                    print(f"{side.name}: {parts}", file=sys.stderr, flush=True)
        finally:
            for child in installation.children[1:]:
                print(installation.log_of(child.name)[-6000:], file=sys.stderr, flush=True)
    return found


def _wait_all_ready(kv: Any, installation: Installation, side: Side) -> None:
    """Wait until every rank of every worker is ready."""
    deadline = monotonic() + READY_S
    wait_ready(kv, installation)
    while sum(worker.state == "ready" for worker in kv.health().workers) != side.processes:
        if monotonic() > deadline:
            raise RuntimeError(f"{side.processes} processes were not ready within {READY_S} s")
        sleep(0.1)


def _memory(installation: Installation) -> list[str]:
    """Return what each rank logged about its device's memory."""
    found = [MEMORY_LINE.findall(installation.log_of(child.name)) for child in installation.children[1:]]
    return [lines[-1] if lines else "" for lines in found]


def _loss(kv: Any, installation: Installation, side: Side, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Kill the last rank while requests decode, start the ranks again, and compare with a run without a kill."""
    expected = [request.result(SIDE_S).tokens for request in _submit(kv, sizes, 7)]
    running = _submit(kv, sizes, 7)
    waiting = set(running)
    for request, token in kv.merge(*running):
        if token.offset >= sizes[2] // 4:
            waiting.discard(request)
        if not waiting:
            break
    workers = installation.children[1:]
    lost = workers[-side.ranks :]
    killed_at = monotonic()
    lost[-1].send(signal.SIGKILL)
    ended = [child for child in lost if child.wait(killed_at + ENDS_WITH_S)]
    ended_s = monotonic() - killed_at
    for child in ended:
        child.start()
    at = [killed_at, *(monotonic() for _ in kv.merge(*running))]
    changed = sum(request.result(SIDE_S).tokens != tokens for request, tokens in zip(running, expected, strict=True))
    longest, resumed_at = max((later - earlier, later) for earlier, later in pairwise(at))
    return {
        "requests": sizes[0],
        "ranks_ended": len(ended),
        "ended_s": ended_s,
        "resumed_s": resumed_at - killed_at,
        "silence_s": longest,
        "tokens_compared": sum(map(len, expected)),
        "requests_changed": changed,
    }


def _submit(kv: Any, sizes: tuple[int, int, int], seed: int) -> list[Any]:
    """Submit requests of (number, prompt tokens, answer tokens)."""
    from kvforge import SamplingParams

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCABULARY, sizes[1]).astype(np.int32) for _ in range(sizes[0])]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return [kv.submit(prompt, max_tokens=sizes[2], sampling=sampling) for prompt in prompts]


def _burst_s(kv: Any, requests: int, prompt_tokens: int, answer_tokens: int, seed: int) -> float:
    """Seconds from the first submission to the last token."""
    began = monotonic()
    running = _submit(kv, (requests, prompt_tokens, answer_tokens), seed)
    for _ in kv.merge(*running):
        pass
    took = monotonic() - began
    assert all(len(request.tokens) == answer_tokens for request in running)
    return took


def run_other(command: list[str], timeout_s: float) -> dict[str, Any]:
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
    kv = sum(size * min(context, window or context) for window, size in shape["kv_bytes_per_token"])
    read = shape["weight_bytes"][str(batch)] + batch * kv
    exchanges = 2 * shape["layers"] + 1 if ranks > 1 else 0
    return float(read / ranks / shape["read_bytes_per_s"] * 1e3 + exchanges * exchange_us / 1e3)


def bytes_read(model: str, kv_dtype: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """Return the bytes that a step of each batch reads: bfloat16 weights by batch, and K and V of a token as pairs of
    (window, bytes), window 0 for layers that see the whole context."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvforge.worker.loading import find_source

    from .gpu_families import weights_read

    config = AutoConfig.from_pretrained(find_source(model, "dummy").files[0])
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    windows = [config.sliding_window if kind == "sliding_attention" else 0 for kind in kinds]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    times = 2  # K and V
    if latent := getattr(config, "kv_lora_rank", None):  # one latent and rotary key of all heads
        times, kv_heads, size = 1, 1, latent + config.qk_rope_head_dim
    stored = 2 if kv_dtype == "auto" else 1 + 4 / size
    return {
        "layers": layers,
        "hidden": config.hidden_size,
        "weight_bytes": {str(batch): 2 * weights_read(module, batch)[0] for batch in batches},
        "kv_bytes_per_token": [
            (window, times * windows.count(window) * kv_heads * size * stored) for window in sorted(set(windows))
        ],
    }


def shape_of(model: str, kv_dtype: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """Return the bytes that a step reads, and one GPU's read bandwidth."""
    from kvforge.worker.device.device import open_device

    from .gpu_roof import measure_roof

    device = open_device()
    found = bytes_read(model, kv_dtype, batches)
    return found | {"device": device.name, "read_bytes_per_s": measure_roof(device).read_bytes}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks; 2x2: two workers of two [1,2]")
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape that ships with kvforge, or a config.json")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--worker", action="append", default=[], help="a further setting of the worker, KEY=VALUE")
    parser.add_argument("--only-decode", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU ranks, to try the script")
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
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
            worker=tuple(_setting(words) for words in options.worker),
        )
        if options.side == SHAPE:
            groups = {Side.parse(name).groups for name in options.ranks.split(",")}
            sizes = tuple(sorted({-(-batch // group) for batch in batches for group in groups}))
            found = shape_of(options.model, options.kv_dtype, sizes)
            Path(options.json).write_text(json.dumps(found), encoding="utf-8")
            return 0
        if options.side:
            found = measured(plan, Side.parse(options.side), options.only_decode)
            Path(options.json).write_text(json.dumps(found), encoding="utf-8")
            return 0
        given = [each for each in sys.argv[1:] if each != options.json and each != "--json"]
        if options.tiny:
            given += ["--model", options.model]
        names = options.ranks.split(",")
        sides = {name: run_other(["benchmarks.tensor_parallel", *given, "--side", name], SIDE_S) for name in names}
        ranks = max(Side.parse(name).ranks for name in names)
        shape: dict[str, Any] = {}
        exchange: dict[str, Any] = {}
        if not options.tiny:
            shape = run_other(["benchmarks.tensor_parallel", *given, "--side", SHAPE], SIDE_S)
            command = [
                "benchmarks.gpu_exchange",
                "--ranks",
                str(ranks),
                "--hidden",
                str(shape.get("hidden", 4096)),
            ]
            exchange = run_other([*command, "--tokens", options.batches], SIDE_S) if ranks > 1 else {}
    rows = [_row(batch, sides, shape, exchange) for batch in map(str, batches)]
    header = ["batch"]
    for name in names:
        header += [f"{Side.parse(name).name}, ms", "floor", "share"]
    title = f"tensor parallel: {options.model}, context {plan.context}, {shape.get('device', '-')}"
    results = {"sides": sides, "shape": shape, "exchange": exchange}
    report(title, header, rows, results, options.json)
    for name, side in sides.items():
        if "prefill_s" in side:
            burst = (
                f"{BURST[0]} requests of {BURST[1]} in and {BURST[2]} out: {side['burst_tokens_per_s']:.0f} tokens/s"
            )
            print(f"{Side.parse(name).name}: {PREFILL[0]} x {PREFILL[1]} tokens in {side['prefill_s']:.3f} s; {burst}")
    return 0


def _setting(words: str) -> tuple[str, str | bool | int]:
    """Return key and value of "KEY=VALUE"; a value is as in TOML, a word needs no quotes."""
    key, _, value = words.partition("=")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _row(batch: str, sides: dict[str, dict[str, Any]], shape: dict[str, Any], exchange: dict[str, Any]) -> list[str]:
    cells = [batch]
    took = exchange.get("results", {}).get("us", {}).get(batch, {}).get("read of peers", 0.0)
    for name, side in sides.items():
        one = side.get("decode", {}).get(batch)
        if one is None:
            cells += ["-"] * 3
            continue
        workers = Side.parse(name)
        rows = -(-int(batch) // workers.groups)
        floor = floor_ms(shape, workers.ranks, rows, one["context"], took) if shape else None
        cells += [f"{one['ms']:.2f}", "-" if floor is None else f"{floor:.2f}"]
        cells.append("-" if floor is None else f"{100 * floor / one['ms']:.1f} %")
    return cells


if __name__ == "__main__":
    sys.exit(main())
