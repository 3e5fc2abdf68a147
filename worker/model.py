"""A transformers decoder whose attention is ours.

kvforge registers one attention function with transformers (`AttentionInterface.register`). A forward pass takes a
flattened ragged batch [1, tokens] with position ids; the function finds the batch's structure and the layer's place in
the pool through a `ForwardContext` that hangs on each attention module. No transformers cache and no mask is used:
causality comes from the batch alone. What a model must be like for that to be right is checked in `probe`, and what it
computes in `verification`.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from kvforge.protocol.errors import UnsupportedModel
from kvforge.protocol.messages import ModelInfo

from .attention import AttentionOptions, PagedAttention, PagedBatch, choose_attention
from .attention.targets import check_dtypes
from .device import Device
from .fusion import FusedDecoder, fuse
from .kernels import choose_operations
from .kernels.registry import Serving, check_kernels
from .loading import (
    Progress,
    build,
    context_tokens,
    find_source,
    fingerprint,
    gguf_read_once,
    model_dtype,
    model_sampling,
    read_config,
)
from .pool import KV_DTYPES, KvGeometry, KvPool

log = logging.getLogger(__name__)

ATTENTION_NAME = "kvforge_paged"
BINDING = "kvforge_binding"


class ForwardContext:
    """What the attention function of every layer reads during one forward pass; empty between passes."""

    def __init__(self, attention: PagedAttention) -> None:
        self.attention = attention
        self.batch: PagedBatch | None = None
        self.pool: KvPool | None = None


@dataclass(frozen=True)
class LayerBinding:
    """Hangs on an attention module: which layer of the pool it is, with how many query heads, and how it attends."""

    index: int
    heads: int
    options: AttentionOptions
    context: ForwardContext


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls. query: [1, heads, tokens, head_size]; key, value: [1, kv_heads, ...].

    Returns [1, tokens, heads, head_size]. The keywords were read and judged once, when the model was loaded.
    """
    binding: LayerBinding = module.__dict__[BINDING]
    context = binding.context
    assert context.batch is not None and context.pool is not None, "attention outside LoadedModel.forward"
    assert attention_mask is None, "transformers made a mask for an attention that takes none"
    layer = context.pool.layers[binding.index]
    context.attention.write(key[0].transpose(0, 1), value[0].transpose(0, 1), layer, context.batch)
    output = context.attention.attend(query[0].transpose(0, 1), layer, context.batch, binding.options)
    return output.unsqueeze(0), None


# No mask function is registered under this name, so transformers makes no mask for it.
transformers.AttentionInterface.register(ATTENTION_NAME, _attention_forward)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    info: what the worker announces. geometry: what its KV blocks hold. vocab_size: token ids are below it (the size of
    the input embedding). module: the transformers model; nothing but this class calls it. fused: what runs in its
    place, with the same weights, where its layers are known (see `fusion`).
    """

    info: ModelInfo
    geometry: KvGeometry
    device: Device
    dtype: torch.dtype
    vocab_size: int
    module: Any
    context: ForwardContext
    takes_logits_to_keep: bool
    fused: FusedDecoder | None = None

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
    ) -> torch.Tensor:
        """One pass: writes K and V of the batch's tokens to `pool`, and computes the logits that are asked for.

        token_ids, positions: [tokens] int64 device. logit_tokens: [sampled] int64 device, places in the flat batch.
        Returns raw logits [sampled, vocab] float32 device, in memory of its own. Errors: whatever torch raises.
        """
        wanted = len(logit_tokens)
        if (padding := self.device.product_rows(wanted) - wanted) > 0:
            logit_tokens = torch.cat((logit_tokens, logit_tokens[-1:].expand(padding)))
        if self.fused is not None:
            return self.fused.forward(token_ids, positions, logit_tokens, batch, pool)[:wanted]
        return self._through_transformers(token_ids, positions, logit_tokens, batch, pool)[:wanted]

    @torch.inference_mode()
    def decode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `forward`, for the logits of every token, in order; `logits` [tokens, vocab] float32: where they go.

        Where `fused` is there, every shape follows from the arguments' shapes and nothing waits for the device, so that
        it can be captured in a graph.
        """
        if self.fused is not None:
            return self.fused.forward(token_ids, positions, None, batch, pool, logits)
        every = torch.arange(len(token_ids), device=token_ids.device)
        found = self._through_transformers(token_ids, positions, every, batch, pool)
        return found if logits is None else logits.copy_(found)

    def _through_transformers(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
    ) -> torch.Tensor:
        self.context.batch, self.context.pool = batch, pool
        keywords: dict[str, Any] = {"logits_to_keep": logit_tokens} if self.takes_logits_to_keep else {}
        try:
            output = self.module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **keywords
            )
        finally:
            self.context.batch = self.context.pool = None
        logits: torch.Tensor = output.logits[0]
        return (logits if self.takes_logits_to_keep else logits[logit_tokens]).float()


def load_model(
    source: str | Path,
    *,
    load_format: str = "auto",
    dtype: str = "auto",
    device: Device,
    block_size: int,
    kv_dtype: str = "auto",
    attention: str = "auto",
    progress: Progress = lambda _phase, _fraction: None,
    seed: int = 0,
    context_tokens_max: int = 0,
) -> LoadedModel:
    """Loads a model and proves that what will run computes what transformers' own layers and attention do.

    source: a GGUF file, a Hugging Face folder, or (load_format "dummy") a config.json or a folder with one.
    dtype: float32, float16, bfloat16, or auto (see `loading.model_dtype`).
    kv_dtype: a name in `pool.KV_DTYPES`, or auto (that of the weights). attention: see `choose_attention`. seed: of
    dummy weights. context_tokens_max: positions to serve, 0: what the model is said to have (see `loading.rope`).
    progress(phase, fraction): phase is a few words, fraction of the whole load from 0 to 1, never falling.
    Errors: ModelNotFound; UnsupportedModel, which names the architecture; InvalidConfiguration (load_format, dtype,
    kv_dtype, attention, block_size, context_tokens_max); KernelError where one is wrong or does not compile;
    WorkerError or GpuError where memory runs out.
    """
    from .probe import bind_layers, bound_options, bound_shapes  # these two need our classes
    from .verification import verify

    progress("reading the configuration", 0.0)
    found = find_source(source, load_format)
    with gguf_read_once():
        config = read_config(found)
        served_tokens = context_tokens(config, context_tokens_max)
        torch_dtype = model_dtype(dtype, config, found, device)
        dtype_name = str(torch_dtype).removeprefix("torch.")
        kv_dtype = dtype_name if kv_dtype == "auto" else kv_dtype
        # Its errors come before the wait.
        KvGeometry.uniform(layers=1, kv_heads=1, head_size=1, block_size=block_size, kv_dtype=kv_dtype)
        if device.runs_kernels:
            check_dtypes(device, torch_dtype, KV_DTYPES[kv_dtype].torch_dtype)
        chosen = choose_attention(device, attention)

        progress("loading weights", 0.05)
        module = build(found, config, torch_dtype, device, lambda p, f: progress(p, 0.05 + 0.8 * f), seed)

    progress("checking weights", 0.87)
    digest = fingerprint(module, dtype_name)
    progress("checking attention", 0.9)
    context = ForwardContext(chosen)
    shapes = bind_layers(module, context, served_tokens, device)
    geometry = KvGeometry(shapes, block_size, kv_dtype)
    stored = geometry.dtype.torch_dtype
    kinds = bound_shapes(module, shapes)
    fused = fuse(module, bound_options(module), choose_operations(device), context.attention)
    vocab_size = int(module.get_input_embeddings().num_embeddings)
    check_kernels(Serving(device, chosen, kinds, torch_dtype, stored, block_size, vocab_size, fused))
    device.release_cached()
    architecture = type(module).__name__
    info = ModelInfo(
        name=found.name,
        source=str(found.path),
        architecture=architecture,
        fingerprint=digest,
        vocab_size=vocab_size,
        context_tokens_max=served_tokens,
        eos_tokens=_eos_tokens(module),
        sampling=model_sampling(found),
    )
    model = LoadedModel(
        info=info,
        geometry=geometry,
        device=device,
        dtype=torch_dtype,
        vocab_size=info.vocab_size,
        module=module,
        context=context,
        takes_logits_to_keep="logits_to_keep" in inspect.signature(module.forward).parameters,
        fused=fused,
    )
    with device.errors("comparing the model with transformers' own"):
        try:
            verify(model)
        except UnsupportedModel as error:
            if fused is None:
                raise
            log.warning("%s; its layers are run one operation at a time", error)
            model = replace(model, fused=None)
            verify(model)
    progress("model loaded", 1.0)
    return model


def use_attention(module: Any, name: str) -> None:
    """Switches a transformers model to the attention function registered as `name`. Errors: UnsupportedModel."""
    try:
        module.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise UnsupportedModel(type(module).__name__, f"transformers cannot change its attention: {error}") from error


def _eos_tokens(module: Any) -> tuple[int, ...]:
    generation = getattr(module, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = module.config.get_text_config(decoder=True).eos_token_id
    tokens = eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
    return tuple(int(token) for token in tokens)
