"""Decode throughput of kvforge's runner and of transformers' `generate`: same weights, same batch, one process, CPU.

    python -m benchmarks.cpu_generate [--model PATH] [--tokens 64] [--repeats 3] [--rows 8] [--prompt N]
                                      [--dtype float32] [--threads N] [--json FILE]

Up to eight prompts, of different lengths or all of N tokens, greedy, the end token ignored. kvforge runs twice: as it
is, and in plain torch (kernels = "reference"). transformers runs its default way: left padding, its dynamic cache, its
sdpa attention. Decode throughput is (tokens - 1) x prompts over the time between the first and the last token, so that
no side's prefill counts, and prefill throughput the prompts' tokens over the time to the first. They alternate; medians
are compared. Run it on an idle machine: torch's threads wait for each other in every layer, so a neighbour
on one core slows all sides tenfold.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.report import report
from kvforge.protocol.messages import RowStart, Sampling, Step
from worker.attention.pool import KvPool
from worker.device.device import open_device
from worker.loading.load import load_model
from worker.loading.model import ATTENTION_NAME, LoadedModel, use_attention
from worker.step.runner import Runner

BLOCK_SIZE = 16
PROMPT_TOKENS = (5, 9, 14, 20, 27, 35, 48, 64)


def prompts_of(model: LoadedModel, rows: int, tokens: int | None = None) -> list[list[int]]:
    """Random token ids: the work does not depend on what they mean. tokens: of each; None: of `PROMPT_TOKENS`."""
    rng = np.random.default_rng(0)
    counts = PROMPT_TOKENS[:rows] if tokens is None else (tokens,) * rows
    return [rng.integers(3, model.vocab_size, count).tolist() for count in counts]


def run_kvforge(model: LoadedModel, prompts: list[list[int]], tokens: int) -> tuple[float, float, list[list[int]]]:
    """Seconds to the first token and from it to the last, and the tokens of each prompt."""
    width = -(-(max(map(len, prompts)) + tokens) // BLOCK_SIZE)
    pool = KvPool(model.geometry, width * len(prompts), model.device)
    total = sum(map(len, prompts))
    runner = Runner(model, pool, slots_max=len(prompts), step_tokens_max=total, step_rows_max=len(prompts))
    tables = np.arange(width * len(prompts), dtype=np.int32).reshape(len(prompts), width)
    slots = np.arange(len(prompts), dtype=np.int32)
    ones = np.ones_like(slots)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    step = Step(
        0,
        begins=tuple(
            RowStart(slot=i, request_id=i, sampling=Sampling(temperature=0.0), seed=0) for i in range(len(prompts))
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
    for index in range(1, tokens):
        starts = (lengths + index - 1).astype(np.int32)
        step = Step(index, slots=slots, starts=starts, counts=ones, samples=ones, tokens=-ones)
        outcomes.append(runner.run(step, tables))
    elapsed = time.perf_counter() - started
    pool.close()
    assert not any(outcome.errors for outcome in outcomes)
    return started - began, elapsed, np.stack([outcome.tokens for outcome in outcomes], axis=1).tolist()


class _Clock(transformers.LogitsProcessor):  # type: ignore[misc]
    """Notes when each token's logits are ready."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self.times.append(time.perf_counter())
        return scores


def run_transformers(model: LoadedModel, prompts: list[list[int]], tokens: int) -> tuple[float, float, list[list[int]]]:
    """The same of `generate`, on the left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    clock = _Clock()
    module: Any = model.module
    module.generation_config.eos_token_id = None
    module.generation_config.pad_token_id = 0
    use_attention(module, "sdpa")
    began = time.perf_counter()
    try:
        output = module.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=tokens,
            logits_processor=transformers.LogitsProcessorList([clock]),
        )
    finally:
        use_attention(module, ATTENTION_NAME)
    return clock.times[0] - began, clock.times[-1] - clock.times[0], output[:, width:].tolist()


def main() -> None:
    """Measures all sides in turn and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file or folder (default: smollm2-135m from the cache folder)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--repeats", type=int, default=3, help="alternating repeats; medians are compared")
    parser.add_argument("--rows", type=int, default=len(PROMPT_TOKENS), help="prompts, up to 8")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt (default: 5 to 64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice, the cores)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    arguments = parser.parse_args()

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    source = arguments.model or _default_model()
    model, plain = (
        load_model(source, dtype=arguments.dtype, device=open_device("cpu", kernels=kernels), block_size=BLOCK_SIZE)
        for kernels in (True, False)
    )
    prompts = prompts_of(model, arguments.rows, arguments.prompt)
    sides = {
        "kvforge": partial(run_kvforge, model),
        "kvforge, plain torch": partial(run_kvforge, plain),
        "transformers": partial(run_transformers, plain),
    }
    for run in sides.values():
        run(prompts, 4)  # warm-up: threads, allocator
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    first_seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(arguments.repeats):
        for name, run in sides.items():
            first, elapsed, tokens[name] = run(prompts, arguments.tokens)
            seconds[name].append(elapsed)
            first_seconds[name].append(first)

    decoded = (arguments.tokens - 1) * len(prompts)
    rate = {name: decoded / statistics.median(times) for name, times in seconds.items()}
    prompt_tokens = sum(map(len, prompts))
    prefill_rate = {name: prompt_tokens / statistics.median(times) for name, times in first_seconds.items()}
    prefill_ratios = {name: prefill_rate["kvforge"] / prefill_rate[name] for name in sides if name != "kvforge"}
    ratios = {name: rate["kvforge"] / rate[name] for name in sides if name != "kvforge"}
    same = sum(a == b for a, b in zip(tokens["kvforge"], tokens["transformers"], strict=True))
    rows = [
        [
            name,
            f"{rate[name]:.1f}",
            f"{decoded / max(times):.1f}",
            f"{decoded / min(times):.1f}",
            f"{prefill_rate[name]:.0f}",
        ]
        for name, times in seconds.items()
    ]
    rows += [
        [f"kvforge / {name}", f"{ratio:.2f}", "", "", f"{prefill_ratios[name]:.2f}"] for name, ratio in ratios.items()
    ]
    results = {
        "model": model.info.name,
        "dtype": arguments.dtype,
        "prompts": len(prompts),
        "prompt_tokens": prompt_tokens,
        "tokens": arguments.tokens,
        "threads": torch.get_num_threads(),
        "decode_tokens_per_second": rate,
        "seconds": seconds,
        "prefill_tokens_per_second": prefill_rate,
        "prefill_ratios": prefill_ratios,
        "ratio": ratios["transformers"],
        "ratio_to_plain": ratios["kvforge, plain torch"],
        "identical_continuations": same,
    }
    title = (
        f"{model.info.name} {arguments.dtype}, {len(prompts)} prompts x {arguments.tokens} tokens, "
        f"{torch.get_num_threads()} threads; {same} of {len(prompts)} continuations identical"
    )
    report(title, ["tokens/s", "decode, median", "lowest", "highest", "prefill, median"], rows, results, arguments.json)


def _default_model() -> Path:
    from kvforge.models.store import pull

    return Path(pull("smollm2-135m"))


if __name__ == "__main__":
    main()
