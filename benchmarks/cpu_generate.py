"""Decode throughput of kvforge's runner and of transformers' `generate`: same weights, same batch, one process, CPU.

    python -m benchmarks.cpu_generate [--model PATH | --shape NAME] [--tokens 64] [--repeats 3] [--rows 8]
                                      [--prompt N] [--dtype float32] [--threads N] [--least] [--json FILE]

Up to eight prompts, of different lengths or all of N tokens, greedy, the end token ignored. kvforge runs twice: by
default, and in plain torch (kernels = "reference"). transformers runs its default way: left padding, its dynamic cache,
its sdpa attention. Decode throughput is (tokens - 1) x prompts over the time between the first and the last token, so
that no side's prefill counts, and prefill throughput the prompts' tokens over the time to the first. They alternate;
medians are compared. Run it on an idle machine: torch's threads wait for each other in every layer, so a busy process
on one core slows all sides tenfold. On a shared machine, --least compares the shortest times instead of the medians.

NAME: a family of `benchmarks.cpu_shapes`, of about half a billion weights, with random ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.cpu_shapes import SHAPES, write_shape
from benchmarks.cpu_steps import BLOCK_SIZE, PROMPT_TOKENS, default_model, prompts_of, run_kvforge
from benchmarks.report import report
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import ATTENTION_NAME, LoadedModel, use_attention


class _Clock(transformers.LogitsProcessor):  # type: ignore[misc]
    """Notes when each token's logits are ready."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self.times.append(time.perf_counter())
        return scores


def run_transformers(model: LoadedModel, prompts: list[list[int]], tokens: int) -> tuple[float, float, list[list[int]]]:
    """Return the same figures for `generate`, on the left-padded batch."""
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
    parser.add_argument("--shape", choices=tuple(SHAPES), help="a shape with random weights, instead of --model")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--repeats", type=int, default=3, help="alternating repeats; medians are compared")
    parser.add_argument("--rows", type=int, default=len(PROMPT_TOKENS), help="prompts, up to 8")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt (default: 5 to 64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice, the cores)")
    parser.add_argument("--least", action="store_true", help="compare the shortest times, not the medians")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    arguments = parser.parse_args()

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    typical = min if arguments.least else statistics.median
    with tempfile.TemporaryDirectory(prefix="kvf-shape-") as folder:
        made = write_shape(arguments.shape, Path(folder)) if arguments.shape else None
        source = made or arguments.model or default_model()
        model, plain = (
            load_model(
                source,
                load_format="auto" if made is None else "dummy",
                dtype=arguments.dtype,
                device=open_device("cpu", kernels=kernels),
                block_size=BLOCK_SIZE,
            )
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
    rate = {name: decoded / typical(times) for name, times in seconds.items()}
    prompt_tokens = sum(map(len, prompts))
    prefill_rate = {name: prompt_tokens / typical(times) for name, times in first_seconds.items()}
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
        "compared": "shortest" if arguments.least else "median",
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
    how = results["compared"]
    header = ["tokens/s", f"decode, {how}", "lowest", "highest", f"prefill, {how}"]
    report(title, header, rows, results, arguments.json)


if __name__ == "__main__":
    main()
