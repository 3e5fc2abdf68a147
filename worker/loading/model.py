"""A transformers decoder whose attention is ours.

kvforge registers one attention function with transformers (`AttentionInterface.register`). A forward pass takes a
flattened ragged batch [1, tokens] with position ids; the function finds the batch's structure and the layer's place in
the pool through a `ForwardContext` that hangs on each attention module. No transformers cache and no mask is used:
causality comes from the batch alone. What a model must be like for that to be right is checked in `probe`, and what it
computes in `verification`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from kvforge.protocol.errors import UnsupportedModel
from kvforge.protocol.messages import ModelInfo
from worker.attention import AttentionOptions, PagedAttention, PagedBatch
from worker.attention.pool import KvGeometry, KvPool
from worker.device.device import Device
from worker.device.ranks import Ranks
from worker.kernels.decoder import FusedDecoder
from worker.kernels.packed import is_packed

from .steadied import packed_weights

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
    place, with the same weights, where its layers are known (see `fusion`). unsteady: why a row's bits may depend on
    the rows beside it; "" where they do not. ranks: this process's place where several compute it together: each of
    them makes every pass, in the same order, or none can.
    """

    info: ModelInfo
    geometry: KvGeometry
    device: Device
    dtype: torch.dtype
    vocab_size: int
    module: Any
    context: ForwardContext
    accepts_logits_to_keep: bool
    fused: FusedDecoder | None = None
    unsteady: str = ""
    ranks: Ranks | None = None

    @property
    def wants_kinds(self) -> bool:
        """Whether it matters which tokens were generated and which are of a prompt (see `step.kinds`): on a CPU both
        are rounded alike."""
        return self.device.steady and not self.unsteady and not self.device.computes_on_cores

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
        padding = 0 if self._head_is_packed else self.device.product_rows(wanted) - wanted
        if padding > 0:
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

    def packed_weights(self) -> Iterator[torch.Tensor]:
        """Those that are no tensors of the module: packed, or quantised."""
        if self.fused is None:
            return packed_weights(self.module)
        return filter(is_packed, self.fused.product_weights())

    @property
    def _head_is_packed(self) -> bool:
        return self.fused is not None and is_packed(self.fused.head.weight)

    def _through_transformers(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
    ) -> torch.Tensor:
        self.context.batch, self.context.pool = batch, pool
        keywords: dict[str, Any] = {"logits_to_keep": logit_tokens} if self.accepts_logits_to_keep else {}
        try:
            output = self.module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **keywords
            )
        finally:
            self.context.batch = self.context.pool = None
        logits: torch.Tensor = output.logits[0]
        return (logits if self.accepts_logits_to_keep else logits[logit_tokens]).float()


def use_attention(module: Any, name: str) -> None:
    """Switches a transformers model to the attention function registered as `name`. Errors: UnsupportedModel."""
    try:
        module.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise UnsupportedModel(type(module).__name__, f"transformers cannot change its attention: {error}") from error
