"""The time of one proposal of a draft model or of heads, by rows and passes, and what the draft model adds to a step.

    python -m benchmarks.draft_passes --gpu [--draft-layers 2 | --heads mtp|eagle3] [--json FILE]
    python -m benchmarks.draft_passes [--model smollm2-135m] [--rows 1 4] [--passes 1 4] [--late 0 4 64]

The model has dummy weights, and so has what drafts: a model of its shape in fewer layers, or heads. Medians:

- proposal: from the call until its tokens are on the host.
- queued: the part until the host has queued all passes; then it waits for the device.
- device: between events before and behind the passes, with all pauses between them.
- pass: one captured pass, replayed back to back: what the device alone takes.

With `--late`, each row has so many generated tokens for which the drafter has no K and V yet: the proposal computes
these first, up to 2,048 in all.

Last come steps of as many rows of one token, with nothing drafted, by a runner with a draft model and by one without.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from .drafts import eagle_head, fewer_layers
from .report import report
from .step_plan import BLOCK_SIZE, Plan
from .step_runner import decode_steps, open_runner

TIMES, WARM, STEPS = 40, 5, 60


def joined(options: argparse.Namespace, folder: Path, model: Any) -> Any:
    """Return the model with what the options name to draft for it."""
    from kvforge.worker.loading.draft_model import join_draft_model, join_head
    from kvforge.worker.loading.eagle_heads import load_eagle_head
    from kvforge.worker.loading.load import load_model
    from kvforge.worker.loading.mtp_heads import load_mtp_head

    dtype = "auto" if options.gpu else "float32"
    settings = {"load_format": "dummy", "dtype": dtype, "device": model.device, "block_size": BLOCK_SIZE}
    if options.heads == "mtp":
        layer: Callable[[], Any] = lambda: load_model(options.model, **settings, mtp=True)  # noqa: E731
        return join_head(model, load_mtp_head(options.model, model, "dummy", 0, layer))
    if options.heads == "eagle3":
        return join_head(model, load_eagle_head(eagle_head(options.model, folder), model, "dummy"))
    source = fewer_layers(options.model, options.draft_layers, folder)
    return join_draft_model(model, load_model(source, **settings))


def proposals(
    runner: Any, device: Any, rows: int, passes: int, context: int, width: int, late: int
) -> dict[str, float]:
    """Return the milliseconds of a proposal of so many rows and passes, and of its parts."""
    import torch

    from kvforge.worker.device.queue import DeviceEvent
    from kvforge.worker.drafts.model import DraftRow

    drafting, graphs = runner.drafter._model, runner.draft_graphs
    tables = np.random.default_rng(0).permutation(rows * width).astype(np.int32).reshape(rows, width)
    used = -(-(context + 1) // BLOCK_SIZE)
    found: dict[str, list[float]] = {"proposal_ms": [], "queued_ms": [], "device_ms": []}
    run: Callable[..., Any] = graphs.run if graphs is not None else lambda: None
    queued_at = [float("nan")]

    def watched(*arguments: Any) -> Any:
        tokens = run(*arguments)
        queued_at[0] = perf_counter()
        return tokens

    if graphs is not None:
        graphs.run = watched
    for number in range(WARM + TIMES):
        position = context + number % BLOCK_SIZE - BLOCK_SIZE
        asked = [DraftRow(row, 5, position, tables[row, :used], passes) for row in range(rows)]
        if late:
            starts, counts = np.full((2, rows), [[position - late], [late]], np.int32)
            runner.pool.beside.backlog.write(tables, starts, counts, np.ones(rows * late, np.bool_))
        device.synchronize()
        begin, began = DeviceEvent(device, timed=True), perf_counter()
        assert len(drafting.continue_rows(asked)) == rows, "the passes failed"
        ended, end = perf_counter(), DeviceEvent(device, timed=True)
        end.wait()
        if number >= WARM:
            found["proposal_ms"].append((ended - began) * 1e3)
            found["queued_ms"].append((queued_at[0] - began) * 1e3)
            found["device_ms"].append(end.ms_since(begin))
    taken = {name: median(each) for name, each in found.items()}
    if graphs is None:
        return taken | {"pass_ms": float("nan")}
    graphs.run = run
    captured = graphs._graphs[min(size for size in graphs.sizes if size >= rows)].captured
    begin = DeviceEvent(device, timed=True)
    with torch.inference_mode():
        for _ in range(TIMES):
            captured.replay()
    end = DeviceEvent(device, timed=True)
    end.wait()
    return taken | {"pass_ms": end.ms_since(begin) / TIMES}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_passes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", action="store_true", help="on a GPU; otherwise on the CPU in float32")
    parser.add_argument("--model", default="", help="a shape that ships with kvforge, or a folder")
    parser.add_argument("--draft-layers", type=int, default=2, help="of a draft model of the model's shape [2]")
    parser.add_argument("--heads", choices=("mtp", "eagle3"), help="heads in place of a draft model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2, 5, 8])
    parser.add_argument("--late", type=int, nargs="+", default=[0], help="tokens of a row without K and V [0]")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a row [1024]")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    options.model = options.model or ("llama-3.1-8b" if options.gpu else "smollm2-135m")
    plan = Plan(options.model, tuple(sorted(options.rows)), options.context, STEPS, 512, not options.gpu)
    results: dict[str, Any] = {"proposals": [], "steps": {}}
    _, _, runner = open_runner(plan, rows_min=2)  # a step of one row has no room for a draft
    plain = {rows: decode_steps(runner, plan, rows)["ms"] for rows in plan.batches}
    runner.close()
    runner.pool.close()
    with tempfile.TemporaryDirectory() as folder:
        device, model, runner = open_runner(
            plan, rows_min=2, drafts=1, join=lambda each: joined(options, Path(folder), each)
        )
    if runner.draft_graphs is not None:
        runner.draft_graphs.capture()
    with_draft = {rows: decode_steps(runner, plan, rows)["ms"] for rows in plan.batches}
    cells: list[list[object]] = []
    width = plan.context_max // BLOCK_SIZE
    for rows in plan.batches:
        results["steps"][str(rows)] = {"without_ms": plain[rows], "with_ms": with_draft[rows]}
        for passes, late in product(options.passes, options.late):
            took = proposals(runner, device, rows, passes, options.context, width, late)
            results["proposals"].append({"rows": rows, "passes": passes, "late": late} | took)
            cells.append([rows, passes, late, *(f"{took[name]:.3f}" for name in took)])
            print(*cells[-1], file=sys.stderr, flush=True)
    results["draft"] = {"name": model.draft.info.name, "bytes": model.draft.bytes}
    where = f"{options.context} tokens, {'GPU' if options.gpu else 'CPU, 1 thread'}"
    title = f"one proposal of {model.draft.info.name} for {options.model}, dummy weights, {where}"
    report(title, ["rows", "passes", "late", "proposal, ms", "queued", "device", "pass"], cells, results, options.json)
    for rows in plan.batches:
        added = with_draft[rows] / plain[rows]
        print(f"step of {rows} rows: {plain[rows]:.3f} ms without, {with_draft[rows]:.3f} with, {added:.3f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
