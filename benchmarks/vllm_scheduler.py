"""Cost of a decode step in vLLM's own scheduler: the reference for `benchmarks.control_plane`, where vLLM is installed.

Source: vllm 0.33.0, `Scheduler` of vllm/v1/core/sched/scheduler.py, driven as `EngineCore` of vllm/v1/engine/core.py
builds and steps it: `schedule()`, then `update_from_output()`. Configs, KV-cache manager, prefix cache with its default
hash and structured-output manager are vLLM's own. Stand-ins are a config.json (one Llama layer: the scheduler reads
only a model's type and context length) and the worker, with outputs made in advance. Statistics are off (a server has
them on), and so is asynchronous scheduling (a server has it on where possible). Sockets, encoding and publishing are
excluded, so it compares with the column "core" there, not with "turn".

vLLM is no dependency: it is imported only inside functions.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

VOCABULARY = 128_000
PROMPT_TOKENS = 48
BLOCK_SIZE = 16
WARM_STEPS = 40
CONTEXT_TOKENS_MAX = 1 << 20
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT_TOKENS_MAX,
}


def reason() -> str:
    """Return why vLLM cannot be measured here, or an empty string."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm.v1.core.sched.scheduler  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a missing shared library
        return f"vllm cannot be imported: {error}"
    return ""


def _config(sequences: int, blocks: int, step_tokens: int, context_tokens_max: int) -> Any:
    """Return a VllmConfig with vLLM's defaults and these limits."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=context_tokens_max, seed=0
        )
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = blocks
        scheduler = SchedulerConfig(
            max_model_len=context_tokens_max,
            is_encoder_decoder=False,
            max_num_seqs=sequences,
            max_num_batched_tokens=step_tokens,
            async_scheduling=False,
        )
        return VllmConfig(
            model_config=model, cache_config=cache, scheduler_config=scheduler, device_config=DeviceConfig("cpu")
        )


def make_scheduler(sequences: int, blocks: int, step_tokens: int, context_tokens_max: int) -> tuple[Any, Any]:
    """Return a scheduler with these limits, and the hasher of its requests' blocks."""
    import torch
    from vllm import envs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    config = _config(sequences, blocks, step_tokens, context_tokens_max)
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv, config)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(hash_block_size, hash_function, config.num_hash_lookahead_tokens)
    envs.enable_envs_cache()  # as the engine does
    return scheduler, hasher


def make_request(name: str, prompt: list[int], answer: int, hasher: Any) -> Any:
    """Return a greedy request that generates `answer` tokens."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(temperature=0.0, seed=1, ignore_eos=True, max_tokens=answer)
    return Request(
        request_id=name, prompt_token_ids=prompt, sampling_params=sampling, pooling_params=None, block_hasher=hasher
    )


def _busy_scheduler(sequences: int, steps: int) -> Any:
    """Return a scheduler with N waiting requests that prefill in one step, and enough blocks for all."""
    blocks = sequences * ((PROMPT_TOKENS + WARM_STEPS + steps) // BLOCK_SIZE + 3) + 1  # one is vLLM's null block
    step_tokens = max(8192, sequences * (PROMPT_TOKENS + BLOCK_SIZE))
    scheduler, hasher = make_scheduler(sequences, blocks, step_tokens, CONTEXT_TOKENS_MAX)
    draw = np.random.default_rng(0)
    for i in range(sequences):
        prompt = draw.integers(0, VOCABULARY, PROMPT_TOKENS + i % BLOCK_SIZE).tolist()
        scheduler.add_request(make_request(str(i), prompt, CONTEXT_TOKENS_MAX, hasher))
    return scheduler


def decode_step_us(sequences: int, steps: int) -> list[float] | None:
    """Microseconds that `schedule` and `update_from_output` take together, step by step; None without vLLM."""
    if reason():
        return None
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler = _busy_scheduler(sequences, steps)
    ids = [str(i) for i in range(sequences)]
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (1 + WARM_STEPS + steps, sequences)).tolist()
    outputs = [
        ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=[[t] for t in row]
        )
        for row in tokens
    ]
    taken: list[float] = []
    gc.collect()
    gc.freeze()
    for done, output in enumerate(outputs):
        started = perf_counter_ns()
        step = scheduler.schedule()
        answers = scheduler.update_from_output(step, output)
        ended = perf_counter_ns()
        assert len(step.num_scheduled_tokens) == len(answers[0].outputs) == sequences
        if done > WARM_STEPS:  # the first step of all is the prefill
            assert step.total_num_scheduled_tokens == sequences
            taken.append((ended - started) / 1e3)
        del step, answers  # freeing them is not measured
    gc.unfreeze()
    scheduler.shutdown()
    return taken
