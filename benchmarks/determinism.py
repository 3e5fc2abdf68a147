"""Cost of batch-invariant results: both modes on one device, in turns.

    python -m benchmarks.determinism [--model llama-3.1-8b] [--context 1024] [--rounds 2] [--json FILE]

The runner alone, dummy weights, each mode in its own process `--rounds` times in turns; the minimum is reported.
Measured: a decode step by the number of rows; the prefill of 8 prompts of 2048 tokens in as many steps as they need;
and in the batch-invariant mode, the recomputation of 1,000 tokens behind a prompt of 1,000, as generated tokens by
decode's kernels and as tokens of a prompt. --tiny: a tiny model on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from kvforge.protocol.messages import GENERATED, RowStart, SamplingParams, Step

from .gpu_step import tiny_model
from .report import report
from .step_plan import BLOCK_SIZE, Plan
from .step_runner import decode_steps, open_runner

MODES = ("fast", "batch-invariant")
PROMPTS, PROMPT_TOKENS = 8, 2048
AGAIN = 1000  # recomputed tokens, behind a prompt of as many
REPEATS = 5
Part = tuple[int, int, int, bool]  # slot, first token, tokens, and whether they were generated


def measured(plan: Plan) -> dict[str, Any]:
    """Return the device's name and the milliseconds of each measurement, in this process."""
    device, _, runner = open_runner(plan, PROMPTS, PROMPT_TOKENS)
    found = {f"decode {batch}": decode_steps(runner, plan, batch)["ms"] for batch in plan.batches}
    per_step = max(1, plan.step_tokens // PROMPT_TOKENS)
    prompts = [
        [(row, 0, PROMPT_TOKENS, False) for row in range(first, min(first + per_step, PROMPTS))]
        for first in range(0, PROMPTS, per_step)
    ]
    found[f"prefill {PROMPTS} x {PROMPT_TOKENS}"] = _least_ms(runner, prompts)
    if runner.model.wants_kinds:
        found[f"{AGAIN} as a prompt"] = _least_ms(runner, [[(0, AGAIN, AGAIN, False)]])
        found[f"{AGAIN} as generated"] = _least_ms(runner, [[(0, AGAIN, AGAIN, True)]])
    runner.close()
    return {"device": device.name, "ms": found}


def _least_ms(runner: Any, parts: list[list[Part]]) -> float:
    """Return the minimum time of the steps over some repeats, with two steps in flight."""
    return min(_steps_ms(runner, parts) for _ in range(REPEATS))


def _steps_ms(runner: Any, steps: list[list[Part]]) -> float:
    began, under_way = monotonic(), []
    for number, parts in enumerate(steps):
        slots, starts, counts, _ = (np.array(each, np.int32) for each in zip(*parts, strict=True))
        width = int(-(-(starts + counts).max() // BLOCK_SIZE))
        tables = (slots[:, None] * width + np.arange(width)).astype(np.int32)
        begins = tuple(
            RowStart(slot=slot, request_id=slot, sampling=SamplingParams(temperature=0.0), seed=0) for slot, *_ in parts
        )
        marks = [np.full(count, GENERATED if mark else 0, np.int32) for _, _, count, mark in parts]
        step = Step(
            number,
            begins=begins,
            slots=slots,
            starts=starts,
            counts=counts,
            samples=np.ones(len(parts), np.int32),
            tokens=np.arange(int(counts.sum()), dtype=np.int32) % 97 + np.concatenate(marks),
        )
        under_way.append(runner.launch(step, tables))
    for launched in under_way:
        outcome = runner.finish(launched)
        assert not outcome.errors, outcome.errors[0]
    return (monotonic() - began) * 1e3


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape that ships with kvforge, or a config.json")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100, help="measured steps of each batch [100]")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of both modes [2]")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to try the script")
    parser.add_argument("--part", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvf-determinism-") as folder:
        if options.tiny and options.model == "llama-3.1-8b":
            options.model, options.context = tiny_model(Path(folder), 4096), 64
        batches = tuple(int(batch) for batch in options.batches.split(","))
        plan = Plan(options.model, batches, options.context, options.steps, 8192, options.tiny, options.kv_dtype)
        if options.part:
            Path(options.json).write_text(json.dumps(measured(replace(plan, determinism=options.part))))
            return 0
        arguments = ["--model", options.model, "--batches", options.batches, "--context", str(options.context)]
        arguments += ["--steps", str(options.steps), "--kv-dtype", options.kv_dtype, *["--tiny"] * options.tiny]
        rounds = [(mode, _part(mode, arguments, Path(folder))) for _ in range(options.rounds) for mode in MODES]
    least: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
    for mode, found in rounds:
        for name, ms in found["ms"].items():
            least[mode][name] = min(ms, least[mode].get(name, ms))
    rows = [[name, *_cells(least, name)] for name in least["batch-invariant"]]
    title = f"determinism: {Path(options.model).name}, context {plan.context}, KV {plan.kv_dtype}"
    title += f", least of {options.rounds} rounds, {rounds[0][1]['device']}"
    results = {"least": least, "rounds": rounds, "plan": asdict(plan)}
    report(title, ["", "fast ms", "batch-invariant ms", "speed"], rows, results, options.json)
    again, prompt = (least["batch-invariant"].get(f"{AGAIN} as {kind}") for kind in ("generated", "a prompt"))
    if again and prompt:
        print(f"{AGAIN} generated tokens recomputed: {again / prompt:.2f} x the time of prompt tokens")
    return 0


def _part(mode: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    path = folder / "part.json"
    subprocess.run([sys.executable, "-m", __spec__.name, *arguments, "--part", mode, "--json", str(path)], check=True)
    found: dict[str, Any] = json.loads(path.read_text())
    print(mode, {name: round(ms, 3) for name, ms in found["ms"].items()}, file=sys.stderr, flush=True)
    return found


def _cells(least: dict[str, dict[str, float]], name: str) -> list[str]:
    fast, steady = least["fast"].get(name), least["batch-invariant"][name]
    return [
        "-" if fast is None else f"{fast:.3f}",
        f"{steady:.3f}",
        "-" if fast is None else f"{100 * fast / steady:.1f} %",
    ]


if __name__ == "__main__":
    sys.exit(main())
