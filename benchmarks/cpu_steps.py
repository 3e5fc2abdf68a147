"""Prompts and their greedy decoding by the runner, shared by several CPU benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvforge.models.store import pull
from kvforge.protocol.messages import RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.runner import ModelRunner

BLOCK_SIZE = 16
PROMPT_TOKENS = (5, 9, 14, 20, 27, 35, 48, 64)


def default_model() -> Path:
    """Return the model in the cache folder, after fetching it if it is missing."""
    return Path(pull("smollm2-135m"))


def prompts_of(model: LoadedModel, rows: int, tokens: int | None = None) -> list[list[int]]:
    """Return random token ids, since the work does not depend on their meaning. tokens: of each; None: of
    `PROMPT_TOKENS`."""
    rng = np.random.default_rng(0)
    counts = PROMPT_TOKENS[:rows] if tokens is None else (tokens,) * rows
    return [rng.integers(3, model.vocab_size, count).tolist() for count in counts]


def run_kvforge(
    model: LoadedModel, prompts: list[list[int]], tokens: int, after: Callable[[int], None] = lambda _step: None
) -> tuple[float, float, list[list[int]]]:
    """Seconds to the first token and from it to the last, and the tokens of each prompt.

    after(step) is called when a step is done: 0 is the prefill.
    """
    width = -(-(max(map(len, prompts)) + tokens) // BLOCK_SIZE)
    pool = KvPool(model.geometry, width * len(prompts), model.device)
    total = sum(map(len, prompts))
    runner = ModelRunner(model, pool, slots_max=len(prompts), step_tokens_max=total, step_rows_max=len(prompts))
    tables = np.arange(width * len(prompts), dtype=np.int32).reshape(len(prompts), width)
    slots = np.arange(len(prompts), dtype=np.int32)
    ones = np.ones_like(slots)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    step = Step(
        0,
        begins=tuple(
            RowStart(slot=i, request_id=i, sampling=SamplingParams(temperature=0.0), seed=0)
            for i in range(len(prompts))
        ),
        slots=slots,
        starts=np.zeros_like(slots),
        counts=lengths,
        samples=ones,
        tokens=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
    )
    began = time.perf_counter()
    outcomes = [runner.run(step, tables)]
    started = time.perf_counter()
    after(0)
    for index in range(1, tokens):
        starts = (lengths + index - 1).astype(np.int32)
        step = Step(index, slots=slots, starts=starts, counts=ones, samples=ones, tokens=-ones)
        outcomes.append(runner.run(step, tables))
        after(index)
    elapsed = time.perf_counter() - started
    pool.close()
    assert not any(outcome.errors for outcome in outcomes)
    return started - began, elapsed, np.stack([outcome.tokens for outcome in outcomes], axis=1).tolist()
