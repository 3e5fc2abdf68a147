"""The reference of `benchmarks.gpu_step`: transformers' continuous batching."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

import numpy as np

from .step_plan import VOCABULARY, WARM_STEPS, Plan, Save


def measure_transformers(plan: Plan, save: Save) -> dict[str, Any]:
    """By batch: ms of a step of transformers' continuous batching."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    from kvforge.worker.loading import find_source, read_config

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
        except Exception as error:  # noqa: BLE001 - a failed comparison is reported
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
