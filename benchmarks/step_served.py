"""The served part of `benchmarks.gpu_step`: decode steps as a client sees them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any

import numpy as np

from .installation import Installation
from .step_plan import BLOCK_SIZE, VOCABULARY, WARM_STEPS, Plan, Save

READY_S = 240
IDLE_LINE = re.compile(r"(\d+) back to back: idle ([\d.]+) us \(([\d.]+) %\)")


def measure_served(plan: Plan, save: Save) -> dict[str, Any]:
    """By batch: ms of a step as the client sees it, mean context, the worker's idle share."""
    from kvforge import Client

    found: dict[str, Any] = {}
    with open_served(plan) as installation:
        try:
            with Client(installation.endpoint, timeout_s=60.0, stream_timeout_s=120.0) as kv:
                wait_ready(kv, installation)
                for batch in plan.batches:
                    found[str(batch)] = served_batch(kv, installation, plan, batch)
                    print(f"served {batch}: {found[str(batch)]}", file=sys.stderr, flush=True)
                    save(found)
        finally:
            print(installation.log_of("worker"), file=sys.stderr, flush=True)
    return found


def open_served(
    plan: Plan, ranks: int = 1, tokens_min: int = 0, groups: int = 1, cache: Mapping[str, int] | None = None
) -> Installation:
    """Return a coordinator and `groups` workers of `ranks` ranks for a plan. tokens_min: length that sequences may
    have at least. cache: settings of the section [cache]."""
    rows = max(plan.batches)
    schedule: dict[str, float] = {
        "step_rows_max": rows,
        "step_tokens_max": plan.step_tokens,
        "decode_gap_ms": 10_000.0,  # prompts at full speed: the measurement starts after them
    }
    worker: dict[str, Any] = {"model": plan.model, "kv_dtype": plan.kv_dtype, "attention": plan.attention}
    worker |= {"determinism": plan.determinism, **dict(plan.worker)}
    if plan.tiny:
        worker |= {"device": "cpu", "dtype": "float32", "threads": 1, "graphs": "on"}
        worker.setdefault("blocks", rows * plan.context_max // BLOCK_SIZE)
    return Installation(
        context_tokens=max(plan.context_max, tokens_min),
        blocks=1 << 20,
        schedule=schedule,
        sequences=rows + 8,
        worker=worker,
        more=lambda _: {"cache": {"block_size": BLOCK_SIZE, **(cache or {})}},
        ranks=ranks,
        groups=groups,
    )


def wait_ready(kv: Any, installation: Installation) -> None:
    """Wait until the worker is ready. Raises RuntimeError if a process exits or the time runs out."""
    from kvforge.protocol.errors import KvforgeError

    deadline = monotonic() + READY_S
    while monotonic() < deadline:
        try:
            kv.wait_ready(2.0)
            return
        except KvforgeError:
            for child in installation.children:
                if child.ended() is not None:
                    raise RuntimeError(f"{child.name} exited: {child.last_words()}") from None
    raise RuntimeError("the worker did not become ready")


def served_batch(kv: Any, installation: Installation, plan: Plan, batch: int) -> dict[str, Any]:
    """Time steps of `batch` rows as the client sees them."""
    from kvforge import SamplingParams

    rng = np.random.default_rng(batch)
    log_before = len(installation.log_of("worker"))
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
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
        # From here on one request is read token by token, which also receives the tokens of the others.
        begun = took = 0.0
        counts: list[list[int]] = []
        last = requests[-1]
        first = len(last.tokens) + 2  # a token that has not arrived yet
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


def _worker_lines(installation: Installation, start: int) -> list[str]:
    """Return the meter's lines in the idle worker's log."""
    deadline = monotonic() + 6.0
    while monotonic() < deadline:
        lines = [line for line in installation.log_of("worker")[start:].splitlines() if "host us/step" in line]
        if lines:
            return lines
        sleep(0.1)
    return []
