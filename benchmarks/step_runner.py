"""The runner's part of `benchmarks.gpu_step`: steps without coordinator and client, and the rates of the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np

from kvforge.protocol.messages import WorkerWelcome

from .step_plan import BLOCK_SIZE, WARM_STEPS, Plan, Save

PROFILED = 8  # steps


def measure_runner(plan: Plan, save: Save) -> dict[str, Any]:
    """By batch: ms of a step of the runner alone; and the rates, weight bytes and KV bytes that the floor needs."""
    device, model, runner = open_runner(plan)
    found: dict[str, Any] = {"device": device.name}
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
    found["batches"] = {}
    for batch in plan.batches:
        found["batches"][str(batch)] = decode_steps(runner, plan, batch)
        print(f"runner {batch}: {found['batches'][str(batch)]}", file=sys.stderr, flush=True)
        save(found)
    if device.runs_kernels:
        found["profile"] = _profiles(runner, plan, width)
        found |= _rates(device)
    return found


def open_runner(
    plan: Plan,
    rows_min: int = 0,
    tokens_min: int = 0,
    drafts: int = 0,
    join: Callable[[Any], Any] = lambda model: model,
) -> tuple[Any, Any, Any]:
    """Return device, model with dummy weights, and runner with captured graphs for the plan's batches.

    Args:
        plan: The plan.
        rows_min: Additional capacity for this many rows.
        tokens_min: Tokens of each of these rows.
        drafts: The most drafts of one row.
        join: Called with the model; returns it with what drafts for it.
    """
    import torch

    from kvforge.worker.attention.pool import KvPool
    from kvforge.worker.device.device import open_device
    from kvforge.worker.loading.load import load_model
    from kvforge.worker.step.memory import make_runner

    device = open_device("cpu" if plan.tiny else "auto", steady=plan.determinism != "fast")
    if plan.tiny:
        torch.set_num_threads(1)
    dtype = "float32" if plan.tiny else "auto"
    model = load_model(
        plan.model, load_format="dummy", dtype=dtype, device=device, block_size=BLOCK_SIZE, kv_dtype=plan.kv_dtype
    )
    model = join(model)
    print(f"{plan.determinism}: {model.unsteady or 'batch-invariant'}", file=sys.stderr, flush=True)
    width = max(plan.context_max, tokens_min) // BLOCK_SIZE
    rows = max(*plan.batches, rows_min)
    blocks = max(max(plan.batches) * plan.context_max, rows_min * tokens_min) // BLOCK_SIZE
    pool = KvPool(model.geometry, blocks, device)
    for tensor in pool.tensors():
        if tensor.is_floating_point() and tensor.element_size() > 1:
            tensor.normal_()  # equal numbers would use less power, and a GPU at its power limit would run faster
        else:
            tensor.view(torch.int8).random_(-100, 100)
    runner = make_runner(model, pool, welcome(rows, plan.step_tokens, width, drafts), rows)
    started = monotonic()
    if runner.graphs is not None:
        for batch in plan.batches:
            runner.graphs.capture_one(runner.graphs.size_for(batch))
    device.synchronize()
    print(f"graphs captured in {monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return device, model, runner


def _rates(device: Any) -> dict[str, float]:
    """Measure the rates; call this last, because earlier captures slow the runner's graphs (see NOTES.md)."""
    from .gpu_roof import measure_roof

    roof = measure_roof(device)
    print(f"roof: {roof}", file=sys.stderr, flush=True)
    return {"read_bytes_per_s": roof.read_bytes, "flops": roof.flops}


def welcome(rows: int, step_tokens: int, width: int, drafts: int = 0) -> WorkerWelcome:
    """Return the limits of a coordinator with steps of so many rows and tokens, and sequences of `width` blocks."""
    return WorkerWelcome(
        rid=0,
        version=0,
        boot="",
        tables_path="",
        block_size=BLOCK_SIZE,
        slots_max=rows,
        blocks_per_sequence_max=width,
        step_tokens_max=step_tokens,
        step_rows_max=rows,
        drafts_max=drafts,
    )


def _steps_of(plan: Plan, batch: int, width: int) -> tuple[Any, Callable[[int], Any]]:
    """Block tables [batch, width], and the step at an index: rows of `context` tokens and more, fed with -1."""
    from kvforge.protocol.messages import RowStart, SamplingParams, Step

    order = np.random.default_rng(0).permutation(batch * width).astype(np.int32)
    tables = order.reshape(batch, width)
    tables[:, : plan.common // BLOCK_SIZE] = tables[0, : plan.common // BLOCK_SIZE]
    slots, ones = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32)
    begins = tuple(
        RowStart(slot=slot, request_id=slot, sampling=SamplingParams(temperature=0.0), seed=0) for slot in range(batch)
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


def decode_steps(runner: Any, plan: Plan, batch: int) -> dict[str, Any]:
    """Time steps of `batch` rows of one token, with two steps in flight as in a worker."""
    width = plan.context_max // BLOCK_SIZE
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
        outcome = runner.finish(under_way.pop(0))
        assert not outcome.errors, outcome.errors[0]
    took = monotonic() - begun
    line = runner.meter.line()
    idle = runner.meter.idle_share
    runner.finish(under_way.pop())
    context = plan.prompt_tokens + WARM_STEPS + plan.steps / 2
    return {"ms": took / (plan.steps + 1) * 1e3, "context": context, "idle_share": idle, "worker": line}


def _profiles(runner: Any, plan: Plan, width: int) -> dict[str, list[dict[str, Any]]]:
    """Kernels by device time, of the measured batches among 1, 16 and 64: microseconds and calls of a step."""
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
