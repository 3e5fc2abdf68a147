"""What a whole decode step costs, through coordinator and client, beside what the memory and the matrix units allow.

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
context of the steps that were measured. A step reads a few rows of the embedding table only, so it is not counted among
the weights unless it is the head too; "all weights" is the share where every byte of the model is counted.
--tiny runs the same script with a tiny model on a CPU, where nothing is to be learned from its numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from .report import report

BLOCK_SIZE = 16
VOCABULARY = 97  # of the prompts: every model knows so many tokens
PROFILED = 8  # steps
WARM_STEPS = 12  # after the last request's first token
PART_S, READY_S = 540, 240
IDLE_LINE = re.compile(r"(\d+) back to back: idle ([\d.]+) us \(([\d.]+) %\)")


Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """What to measure. steps: measured ones of each batch. context: tokens of a row in the middle of them."""

    model: str
    batches: tuple[int, ...]
    context: int
    steps: int
    step_tokens: int
    tiny: bool
    kv_dtype: str = "auto"
    attention: str = "auto"
    transformers_steps: int = 24

    @property
    def prompt_tokens(self) -> int:
        """So that the rows have `context` tokens in the middle of the steps that are measured."""
        return max(4, self.context - WARM_STEPS - self.steps // 2)

    @property
    def answer_tokens(self) -> int:
        """Enough for the first request to go on while the prompts of the last ones are computed."""
        prefill = -(-max(self.batches) * self.prompt_tokens // self.step_tokens)
        return 2 * prefill + 2 * WARM_STEPS + self.steps + 64

    @property
    def context_max(self) -> int:
        return -(-(self.prompt_tokens + self.answer_tokens + 1) // BLOCK_SIZE) * BLOCK_SIZE


# ------------------------------------------------------------------------------------------------------------- served


def measure_served(plan: Plan, save: Save) -> dict[str, Any]:
    """By batch: ms of a step as the client sees it, mean context, the worker's idle share."""
    from kvforge import Client

    from .installation import Installation

    rows = max(plan.batches)
    schedule: dict[str, float] = {
        "step_rows_max": rows,
        "step_tokens_max": plan.step_tokens,
        "decode_gap_ms": 10_000.0,  # prompts as fast as they go: what is measured comes after them
    }
    worker: dict[str, Any] = {"model": plan.model, "kv_dtype": plan.kv_dtype, "attention": plan.attention}
    if plan.tiny:
        worker |= {"device": "cpu", "dtype": "float32", "threads": 1, "graphs": "on"}
        worker["blocks"] = rows * plan.context_max // BLOCK_SIZE
    installation = Installation(
        context_tokens=plan.context_max, blocks=1 << 20, schedule=schedule, sequences=rows + 8, worker=worker
    )
    found: dict[str, Any] = {}
    with installation:
        try:
            with Client(installation.endpoint, timeout_s=60.0, stream_timeout_s=120.0) as kv:
                _wait_ready(kv, installation)
                for batch in plan.batches:
                    found[str(batch)] = _served_batch(kv, installation, plan, batch)
                    print(f"served {batch}: {found[str(batch)]}", file=sys.stderr, flush=True)
                    save(found)
        finally:
            print(installation.log_of("worker"), file=sys.stderr, flush=True)
    return found


def _wait_ready(kv: Any, installation: Any) -> None:
    from protocol.errors import KvforgeError

    deadline = monotonic() + READY_S
    while monotonic() < deadline:
        try:
            kv.wait_ready(2.0)
            return
        except KvforgeError:
            for child in installation.children:
                if child.ended() is not None:
                    raise RuntimeError(f"the {child.name} ended: {child.last_words()}") from None
    raise RuntimeError("the worker does not become ready")


def _served_batch(kv: Any, installation: Any, plan: Plan, batch: int) -> dict[str, Any]:
    from kvforge import Sampling

    rng = np.random.default_rng(batch)
    log_before = len(installation.log_of("worker"))
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    submitted = monotonic()
    requests = [
        kv.submit(
            rng.integers(0, VOCABULARY, plan.prompt_tokens).astype(np.int32),
            max_tokens=plan.answer_tokens,
            sampling=sampling,
        )
        for _ in range(batch)
    ]
    try:
        waiting = set(requests)
        for request, token in kv.merge(*requests):
            if token.offset + 1 >= WARM_STEPS:
                waiting.discard(request)
            if not waiting:
                break
        # From here on one request is read token by token, which takes in what comes for the others too.
        begun = took = 0.0
        counts: list[list[int]] = []
        last = requests[-1]
        first = len(last.tokens) + 2  # a token that has not come yet
        for token in last:
            if token.offset == first:
                begun, counts = monotonic(), [[len(request.tokens) for request in requests]]
            elif token.offset == first + plan.steps:
                took = monotonic() - begun
                counts.append([len(request.tokens) for request in requests])
                break
    finally:
        for request in requests:
            if not request.done:
                kv.cancel(request.id)
    total = sum(counts[1]) - sum(counts[0])
    steps = total / batch
    mean = plan.prompt_tokens + sum(counts[0]) / batch + steps / 2
    lines = _worker_lines(installation, log_before)
    idle = [IDLE_LINE.search(line) for line in lines]
    idle_shares = [float(match[3]) / 100 for match in idle if match]
    return {
        "ms": took / steps * 1e3,
        "tokens_per_s": total / took,
        "context": mean,
        "until_all_decode_s": begun - submitted,
        "idle_share": idle_shares[-1] if idle_shares else None,
        "worker": lines[-1] if lines else "",
    }


def _worker_lines(installation: Any, start: int) -> list[str]:
    """The meter's lines that the worker wrote once it was idle."""
    deadline = monotonic() + 6.0
    while monotonic() < deadline:
        lines = [line for line in installation.log_of("worker")[start:].splitlines() if "host us/step" in line]
        if lines:
            return lines
        sleep(0.1)
    return []


# ------------------------------------------------------------------------------------------------------------- runner


def measure_runner(plan: Plan, save: Save) -> dict[str, Any]:
    """By batch: ms of a step of the runner alone; and the rates, weight bytes and KV bytes that the floor needs."""
    import torch

    from worker.device import open_device
    from worker.memory import make_runner
    from worker.model import load_model
    from worker.pool import KvPool

    device = open_device("cpu" if plan.tiny else "auto")
    if plan.tiny:
        torch.set_num_threads(1)
    found: dict[str, Any] = {"device": device.name}
    if device.runs_kernels:
        from .gpu_roof import measure_roof

        roof = measure_roof(device)
        found |= {"read_bytes_per_s": roof.read_bytes, "flops": roof.flops}
        print(f"roof: {roof}", file=sys.stderr, flush=True)
    dtype = "float32" if plan.tiny else "auto"
    model = load_model(
        plan.model, load_format="dummy", dtype=dtype, device=device, block_size=BLOCK_SIZE, kv_dtype=plan.kv_dtype
    )
    parameters = dict(model.module.named_parameters())  # tied ones once
    embedding = model.module.get_input_embeddings().weight
    counted = [p for p in parameters.values() if p is not embedding]
    if model.module.get_output_embeddings().weight is embedding:
        counted.append(embedding)
    found["weights"] = sum(int(p.numel()) for p in counted)
    found["weight_bytes"] = sum(int(p.numel()) * p.element_size() for p in counted)
    found["all_weights"] = sum(int(p.numel()) for p in parameters.values())
    found["all_weight_bytes"] = sum(int(p.numel()) * p.element_size() for p in parameters.values())
    found["kv_bytes_per_token"] = model.geometry.bytes_per_block / BLOCK_SIZE
    width = plan.context_max // BLOCK_SIZE
    rows = max(plan.batches)
    pool = KvPool(model.geometry, rows * width, device)
    for tensor in pool.tensors():
        if tensor.is_floating_point() and tensor.element_size() > 1:
            tensor.normal_()  # equal numbers would cost less power, and a GPU at its limit of power would be faster
        else:
            tensor.view(torch.int8).random_(-100, 100)
    limits = _Limits(rows, plan.step_tokens, rows, width)
    runner = make_runner(model, pool, limits, rows)  # type: ignore[arg-type]  # as much of a welcome as it reads
    started = monotonic()
    if runner.graphs is not None:
        for batch in plan.batches:
            runner.graphs.capture_one(runner.graphs.size_for(batch))
    device.synchronize()
    print(f"graphs captured in {monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    found["batches"] = {}
    for batch in plan.batches:
        found["batches"][str(batch)] = _runner_batch(runner, plan, batch, width)
        print(f"runner {batch}: {found['batches'][str(batch)]}", file=sys.stderr, flush=True)
        save(found)
    if device.runs_kernels:
        found["profile"] = _profiles(runner, plan, width)
    return found


@dataclass(frozen=True)
class _Limits:
    slots_max: int
    step_tokens_max: int
    step_rows_max: int
    blocks_per_sequence_max: int


def _steps_of(plan: Plan, batch: int, width: int) -> tuple[Any, Callable[[int], Any]]:
    """Block tables [batch, width], and the step at an index: rows of `context` tokens and more, fed with -1."""
    from protocol.messages import RowStart, Sampling, Step

    order = np.random.default_rng(0).permutation(batch * width).astype(np.int32)
    tables = order.reshape(batch, width)
    slots, ones = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32)
    begins = tuple(
        RowStart(slot=slot, request_id=slot, sampling=Sampling(temperature=0.0), seed=0) for slot in range(batch)
    )

    def step(index: int) -> Any:
        first = index == 0
        return Step(
            index,
            begins=begins if first else (),
            slots=slots,
            starts=np.full(batch, plan.prompt_tokens + index, np.int32),
            counts=ones,
            samples=ones,
            tokens=np.full(batch, 5 if first else -1, np.int32),
        )

    return tables, step


def _runner_batch(runner: Any, plan: Plan, batch: int, width: int) -> dict[str, Any]:
    tables, step = _steps_of(plan, batch, width)
    under_way = [runner.launch(step(0), tables)]
    begun = monotonic()
    last = WARM_STEPS + plan.steps
    for index in range(1, last + 1):
        if index == WARM_STEPS:
            runner.meter.reset()
            begun = monotonic()
        used = -(-(plan.prompt_tokens + index + 1) // BLOCK_SIZE)
        under_way.append(runner.launch(step(index), tables[:, :used]))
        outcome = under_way.pop(0).finish()
        assert not outcome.errors, outcome.errors[0]
    took = monotonic() - begun
    line = runner.meter.line()
    idle = runner.meter.idle_share
    under_way.pop().finish()
    context = plan.prompt_tokens + WARM_STEPS + plan.steps / 2
    return {"ms": took / (plan.steps + 1) * 1e3, "context": context, "idle_share": idle, "worker": line}


def _profiles(runner: Any, plan: Plan, width: int) -> dict[str, list[dict[str, Any]]]:
    """Kernels by device time, of batches 1, 16 and 64 as far as they are measured: microseconds and calls of a step."""
    from torch.profiler import ProfilerActivity, profile

    found = {}
    for batch in [b for b in plan.batches if b in (1, 16, 64)] or plan.batches[:1]:
        tables, step = _steps_of(plan, batch, width)
        runner.run(step(0), tables)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for index in range(1, PROFILED + 1):
                runner.run(step(index), tables)
        events = [event for event in profiled.key_averages() if event.self_device_time_total > 0]
        events.sort(key=lambda event: -event.self_device_time_total)
        found[str(batch)] = [
            {
                "kernel": event.key[:60],
                "us": round(event.self_device_time_total / PROFILED, 1),
                "calls": event.count / PROFILED,
            }
            for event in events[:14]
        ]
        for line in found[str(batch)]:
            print(f"profile {batch}: {line}", file=sys.stderr, flush=True)
    return found


# ------------------------------------------------------------------------------------------------------- transformers


def measure_transformers(plan: Plan, save: Save) -> dict[str, Any]:
    """By batch: ms of a step of transformers' continuous batching."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    from worker.weights import find_source, read_config

    config = read_config(find_source(plan.model, "dummy"))
    where = "cpu" if plan.tiny else "cuda"
    dtype = torch.float32 if plan.tiny else torch.bfloat16
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="paged|sdpa").eval()
    found: dict[str, Any] = {"version": transformers.__version__}
    for batch in plan.batches:
        rng = np.random.default_rng(batch)
        prompts = [rng.integers(0, VOCABULARY, plan.prompt_tokens).tolist() for _ in range(batch)]
        new_tokens = 2 * WARM_STEPS + plan.transformers_steps
        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        started = monotonic()
        try:
            outputs = model.generate_batch(prompts, generation_config=generation, record_timestamps=True)
        except Exception as error:  # noqa: BLE001 - a comparison that does not run is told as such
            print(f"transformers {batch}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        times = [np.asarray(output.timestamps) for output in outputs.values() if len(output.timestamps) > 1]
        if len(times) < batch:
            print(f"transformers {batch}: {len(times)} of {batch} requests finished", file=sys.stderr, flush=True)
            continue
        begin, end = max(t[0] for t in times), min(t[-1] for t in times)
        inside = sum(int(((t > begin) & (t <= end)).sum()) for t in times)
        found[str(batch)] = {"ms": float(end - begin) / (inside / batch) * 1e3, "steps": inside / batch}
        found[str(batch)]["took_s"] = monotonic() - started
        print(f"transformers {batch}: {found[str(batch)]}", file=sys.stderr, flush=True)
        save(found)
    return found


PARTS: dict[str, Callable[[Plan, Save], dict[str, Any]]] = {
    "served": measure_served,
    "runner": measure_runner,
    "transformers": measure_transformers,
}


def floor_ms(rates: dict[str, Any], batch: int, context: float, prefix: str = "") -> float | None:
    """The least that a step of `batch` rows of `context` tokens can take here; None where no rates were measured.

    prefix: "all_", to count every weight.
    """
    if "flops" not in rates:
        return None
    bandwidth = rates["read_bytes_per_s"]
    bytes_s = rates[f"{prefix}weight_bytes"] / bandwidth
    weights_s = max(bytes_s, 2 * rates[f"{prefix}weights"] * batch / rates["flops"])
    return float((weights_s + batch * context * rates["kv_bytes_per_token"] / bandwidth) * 1e3)


def _run_part(part: str, plan_arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """One part in a process of its own; what it had found where it fails."""
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
    """Writes what was found so far, so that a part that fails later loses nothing of it."""

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
    parser.add_argument("--transformers-steps", type=int, default=24, help="of them, for transformers [24]")
    parser.add_argument("--timeout", type=float, default=PART_S, help=f"seconds of one part [{PART_S}]")
    parser.add_argument("--parts", default="runner,served,transformers", help="which parts [all]")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to try the script")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvf-step-") as folder:
        if options.tiny and options.model == "llama-3.1-8b":
            options.model, options.context, options.step_tokens = _tiny_model(Path(folder)), 64, 128
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
        )
        if options.part:
            save = _Saving(Path(options.json))
            save(PARTS[options.part](plan, save))
            return 0
        arguments = ["--model", options.model, "--batches", options.batches, "--context", str(options.context)]
        arguments += ["--steps", str(options.steps), "--step-tokens", str(options.step_tokens)]
        arguments += ["--transformers-steps", str(options.transformers_steps)]
        arguments += ["--kv-dtype", options.kv_dtype, "--attention", options.attention]
        arguments += ["--tiny"] if options.tiny else []
        parts = {part: _run_part(part, arguments, options.timeout) for part in options.parts.split(",")}
    rates, served = parts.get("runner", {}), parts.get("served", {})
    others = parts.get("transformers", {})
    rows = [
        _row(batch, rates, rates.get("batches", {}).get(str(batch)), served.get(str(batch)), others.get(str(batch)))
        for batch in batches
    ]
    title = f"decode step: {plan.model}, context {plan.context}, {rates.get('device', '-')}"
    if "flops" in rates:
        title += f"; read {rates['read_bytes_per_s'] / 1e12:.2f} TB/s, bfloat16 {rates['flops'] / 1e12:.0f} TFLOP/s"
    header = ["batch", "floor ms", "runner ms", "share", "idle", "floor ms", "served ms", "share", "idle"]
    header += ["all weights", "tokens/s", "transformers ms", "ratio"]
    report(title, header, rows, parts, options.json)
    return 0


def _tiny_model(folder: Path) -> str:
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
