"""Logits that transformers computes with its own cache, for models that keep a recurrent state."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from kvforge.worker.loading.mixers import chunks
from kvforge.worker.loading.model import ATTENTION_NAME, LoadedModel, use_attention


def empty_cache(module: Any) -> Any:
    """Return transformers' cache of a model without a token."""
    if hasattr(module, "_setup_cache"):  # its layers have their states
        module._setup_cache(module.config, 1, module.device, module.dtype)
    own = getattr(sys.modules[type(module).__module__], "MiniMaxCache", None)
    return transformers.DynamicCache(config=module.config) if own is None else own()


@torch.inference_mode()
def cached_logits(model: LoadedModel, sequence: npt.NDArray[np.int64], counts: list[int]) -> torch.Tensor:
    """Return transformers' own logits [tokens, vocab], with its cache, for one sequence in the chunks of ours."""
    cache, parts, start, place = empty_cache(model.module), [], 0, model.device.torch_device
    named = inspect.signature(model.module.forward).parameters
    (name,) = (each for each in ("cache", "past_key_values") if each in named)
    use_attention(model.module, "eager")
    try:
        for count in counts:
            for begin, end in chunks(start, start + count, model.prompt_chunk):
                ids = torch.as_tensor(sequence[begin:end], device=place)[None]
                places = torch.arange(begin, end, device=place)[None]
                output = model.module(input_ids=ids, position_ids=places, use_cache=True, **{name: cache})
                parts.append(output.logits[0].float())
            start += count
        return torch.cat(parts)
    finally:
        use_attention(model.module, ATTENTION_NAME)
