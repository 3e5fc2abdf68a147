"""A transformers decoder with kvforge's attention.

kvforge registers one attention function with transformers (`AttentionInterface.register`). A forward pass takes a
flattened ragged batch [1, tokens] with position ids. The function finds the batch's structure and the layer's memory in
the pool through a `ForwardContext` that is attached to each attention module. Neither a transformers cache nor a mask
is
used: the batch alone defines causality. `probe` checks the requirements on the model, `verification` its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import transformers

from kvforge.protocol.errors import UnsupportedModel
from kvforge.protocol.messages import ModelInfo
from kvforge.worker.attention import AttentionOptions, PagedBatch
from kvforge.worker.attention.draft_backlog import slots_or_spare, store_tokens
from kvforge.worker.attention.pool import KvGeometry, KvPool
from kvforge.worker.device.device import Device
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.packed import is_packed, stored_bytes
from kvforge.worker.kernels.taps import Taps

from .beside import DraftSource
from .forward_context import ForwardContext
from .row_independence import packed_weights

ATTENTION_NAME = "kvforge_paged"
BINDING = "kvforge_binding"


@dataclass(frozen=True)
class LayerBinding:
    """Attached to an attention module: its layer in the pool, its query heads, and its attention options."""

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
    """Attention as transformers calls it. Keywords were checked once at load.

    Args:
        module: The attention module.
        query: [1, heads, tokens, head_size].
        key: [1, kv_heads, tokens, head_size].
        value: [1, kv_heads, tokens, value_size].
        attention_mask: Always None.

    Returns:
        [1, tokens, heads, value_size], and no weights.
    """
    binding: LayerBinding = module.__dict__[BINDING]
    context = binding.context
    assert context.batch is not None and context.pool is not None, "attention outside LoadedModel.forward"
    assert attention_mask is None, "transformers passed a mask to an attention without masks"
    layer, batch = context.pool.layers[binding.index], context.pool.batch_of(binding.index, context.batch)
    assert not layer.latent, "attention over latents runs as described only"
    size, wide = value.shape[3], layer.keys.shape[3]
    query, key, value = (_widened(part[0].transpose(0, 1), wide) for part in (query, key, value))
    context.attention.write(key, value, layer, batch)
    output = context.attention.attend(query, layer, batch, binding.options)
    return output[..., :size].unsqueeze(0), None


def _widened(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Append zeros to heads [tokens, heads, n]: the pool stores K and V with the size of the larger one."""
    missing = size - numbers.shape[2]
    return torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers


# No mask function is registered under this name, so transformers builds no mask.
transformers.AttentionInterface.register(ATTENTION_NAME, _attention_forward)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        info: The model as the worker announces it.
        geometry: Layout of its KV blocks.
        device: The device that computes.
        dtype: Dtype of the weights.
        vocab_size: Size of the input embedding; token ids are below it.
        module: The transformers model; only this class calls it.
        context: Inputs of attention during a pass.
        accepts_logits_to_keep: Whether the module can compute the logits of selected tokens only.
        fused: The fused form, which runs instead of the module with the same weights, if its layers are known (see
            `fusion`).
        unsteady: Why a row's bits may depend on other rows; "" if they do not.
        ranks: The group of ranks that compute the model together. All ranks make every pass in the same order.
        prompt_chunk: Chunks of a prompt begin and end at multiples of this many tokens (see `mixers`).
        draft: The draft model or the heads. Each pass over prompt tokens writes their K and V of the same tokens too,
            into `KvPool.beside`; one of generated tokens alone stores what they need later.
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
    prompt_chunk: int = 1
    draft: DraftSource | None = None

    @property
    def wants_kinds(self) -> bool:
        """Whether generated tokens must be distinguished from prompt tokens (see `step.token_kinds`).

        On a CPU both round alike, except in layers with a recurrent state.
        """
        if self.geometry.states:
            return True
        return self.device.steady and not self.unsteady and not self.device.computes_on_cores

    @property
    def can_be_captured(self) -> bool:
        """Whether a step of generated tokens may run from a graph: no recurrent layer runs row by row on the host."""
        if not self.geometry.states:
            return True
        mixers = [] if self.fused is None else [layer.mixer for layer in self.fused.layers if layer.mixer is not None]
        return bool(mixers) and all(mixer.step is not None for mixer in mixers)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
    ) -> torch.Tensor:
        """Run one pass: write K and V of the batch's tokens to `pool`, and compute the requested logits.

        Args:
            token_ids: [tokens] int64 on the device.
            positions: [tokens] int64 on the device.
            logit_tokens: [sampled] int64 on the device, indices in the flat batch.
            batch: Structure of the batch.
            pool: The KV pool.

        Returns:
            Raw logits [sampled, vocab] float32 on the device, in separate memory.

        Raises:
            RuntimeError: torch failed.
        """
        self.write_draft(token_ids, positions, batch, pool)
        wanted, logit_tokens = len(logit_tokens), self._padded(logit_tokens)
        if self.fused is not None:
            return self.run_fused(token_ids, positions, logit_tokens, batch, pool)[:wanted]
        return self._through_transformers(token_ids, positions, logit_tokens, batch, pool)[:wanted]

    @torch.inference_mode()
    def forward_by_parts(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        parts: Sequence[torch.Tensor],
        batch: PagedBatch,
        pool: KvPool,
    ) -> Iterator[torch.Tensor]:
        """Run one pass as `forward` does, and yield the logits of each part, so that only one part's are in memory.

        A model that only transformers can run makes a pass for each part; writing K and V twice gives the same bytes.
        One with a recurrent state computes the decoder once, and its head for each part.

        Args:
            token_ids: [tokens] int64 on the device.
            positions: [tokens] int64 on the device.
            parts: Indices in the flat batch, [n] int64 on the device each.
            batch: Structure of the batch.
            pool: The KV pool.

        Yields:
            Raw logits [n, vocab] float32 on the device.

        Raises:
            RuntimeError: torch failed.
        """
        if self.fused is None:
            with decoder_once(self.module) if self.geometry.states else nullcontext():
                for part in parts:
                    yield self.forward(token_ids, positions, part, batch, pool)
            return
        self.write_draft(token_ids, positions, batch, pool)
        taps = self._taps()
        hidden = self.fused.hidden(token_ids, positions, batch, pool, taps)
        self._feed_heads(token_ids, positions, hidden, taps, batch, pool)
        for part in parts:
            yield self.fused.logits(hidden.index_select(0, self._padded(part)))[: len(part)]

    def _padded(self, logit_tokens: torch.Tensor) -> torch.Tensor:
        """Repeat the last index until the head multiplies as many rows as are fastest."""
        padding = 0 if self._head_is_packed else self.device.product_rows(len(logit_tokens)) - len(logit_tokens)
        return logit_tokens if padding <= 0 else torch.cat((logit_tokens, logit_tokens[-1:].expand(padding)))

    @torch.inference_mode()
    def decode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one pass as `forward` does, and compute the logits of every token in order.

        With `fused`, every shape follows from the shapes of the arguments and nothing waits for the device, so the
        pass can be captured in a graph.

        Args:
            token_ids: [tokens] int64 on the device.
            positions: [tokens] int64 on the device.
            batch: Structure of the batch.
            pool: The KV pool.
            logits: [tokens, vocab] float32 that receives the result; None: allocate it.

        Returns:
            The logits.
        """
        self.write_draft(token_ids, positions, batch, pool)
        if self.fused is not None:
            return self.run_fused(token_ids, positions, None, batch, pool, logits)
        every = torch.arange(len(token_ids), device=token_ids.device)
        found = self._through_transformers(token_ids, positions, every, batch, pool)
        return found if logits is None else logits.copy_(found)

    def run_fused(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor | None,
        batch: PagedBatch,
        pool: KvPool,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one pass of the fused form, and feed heads that read its hidden states.

        For the arguments see `FusedDecoder.forward`. A draft model is fed by `write_draft`.
        """
        assert self.fused is not None, "a model without a description"
        taps = self._taps()
        hidden = self.fused.hidden(token_ids, positions, batch, pool, taps)
        found = self.fused.logits(hidden if logit_tokens is None else hidden.index_select(0, logit_tokens), logits)
        self._feed_heads(token_ids, positions, hidden, taps, batch, pool)
        return found

    def _taps(self) -> Taps | None:
        """Return what keeps the hidden states of a pass for heads; None if they read the final norm."""
        return None if self.draft is None or not self.draft.taps else Taps(self.draft.taps)

    def _feed_heads(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        taps: Taps | None,
        batch: PagedBatch,
        pool: KvPool,
    ) -> None:
        """Feed heads with the hidden states of a pass; without heads do nothing."""
        if self.draft is not None and self.draft.reads_hidden:
            read = [hidden] if taps is None else [taps.found[layer] for layer in taps.layers]
            self._feed(self.draft, token_ids, positions, read, batch, pool)

    def write_draft(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, pool: KvPool) -> None:
        """Write the draft model's K and V of a pass with prompt tokens, and note the generated tokens of any.

        Without a draft model do nothing. `forward`, `forward_by_parts` and `decode` do so. See these for the arguments.
        """
        if self.draft is not None and not self.draft.reads_hidden:
            self._feed(self.draft, token_ids, positions, (), batch, pool)

    def _feed(
        self,
        draft: DraftSource,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: Sequence[torch.Tensor],
        batch: PagedBatch,
        pool: KvPool,
    ) -> None:
        assert pool.beside is not None, "the pool was made without the draft model"
        if draft.info.context_tokens_max < self.info.context_tokens_max:
            positions = positions.clamp(max=draft.info.context_tokens_max - 1)  # nothing is drafted beyond
        if draft.vocab_size < self.vocab_size:
            token_ids = token_ids.clamp(max=draft.vocab_size - 1)  # no text has tokens beyond the tokenizer's
        batch, own = batch.beside or batch, pool.beside
        assert own.tokens is not None, "a pool of another geometry"
        slots = slots_or_spare(batch, (own.blocks - 1) * own.block_size)  # of a scratch block: nothing reads it
        store_tokens(token_ids, own.tokens, batch, slots)
        draft.keep(hidden, slots, own)
        if not batch.generated.all():
            draft.feed(token_ids, positions, batch, own)

    # ---------------------------------------------------------------------------------- as a draft model: DraftSource

    @property
    def bytes(self) -> int:
        """Bytes of parameters, buffers and packed weights. A tensor that layers share counts once."""
        tensors = chain(self.module.parameters(), self.module.buffers())
        plain = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
        return plain + sum(map(stored_bytes, self.packed_weights()))

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads hidden states of another model: never."""
        return False

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of another model that it reads: none."""
        return ()

    def keep(self, hidden: Sequence[torch.Tensor], slots: torch.Tensor, pool: KvPool) -> None:
        """Do nothing: a draft model reads no hidden states."""

    def feed(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, pool: KvPool) -> None:
        """Write its K and V, as a draft model; see `beside.DraftSource`."""
        self.write(token_ids, positions, batch, pool)

    def hidden_before(self, batch: PagedBatch, pool: KvPool) -> None:
        """Return None: a draft model reads no hidden states."""

    def next_tokens(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,  # noqa: ARG002
        below: int,
        batch: PagedBatch,
        pool: KvPool,
    ) -> tuple[torch.Tensor, None]:
        """Run one pass as a draft model; see `beside.DraftSource`."""
        return self.decode(token_ids, positions, batch, pool)[:, :below].argmax(1), None

    @torch.inference_mode()
    def write(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, pool: KvPool) -> None:
        """Run one pass as `forward` does, for its K and V alone.

        Args:
            token_ids: [tokens] int64 on the device.
            positions: [tokens] int64 on the device.
            batch: Structure of the batch.
            pool: The KV pool.

        Raises:
            RuntimeError: torch failed.
        """
        if self.fused is not None:
            self.fused.write(token_ids, positions, batch, pool)
        else:
            self._through_transformers(token_ids, positions, torch.zeros_like(token_ids[:1]), batch, pool)

    def packed_weights(self) -> Iterator[torch.Tensor]:
        """Yield the packed or quantised weights, which are not tensors of the module."""
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


@contextmanager
def decoder_once(module: Any) -> Iterator[None]:
    """Let a transformers model compute its decoder in the first of several passes alone, and its head in each.

    The passes must have the same tokens: a recurrent state would be advanced again by a second one.

    Raises:
        UnsupportedModel: The model has no decoder apart from its head.
    """
    decoder = module.base_model
    if decoder is module:
        raise UnsupportedModel(type(module).__name__, "its decoder cannot be computed apart from its head")
    forward, outputs = decoder.forward, list[Any]()

    def once(*given: Any, **keywords: Any) -> Any:
        if not outputs:
            outputs.append(forward(*given, **keywords))
        return outputs[0]

    replaced = decoder.__dict__.get("forward")
    decoder.forward = once
    try:
        yield
    finally:
        if replaced is None:
            del decoder.forward
        else:
            decoder.forward = replaced


def use_attention(module: Any, name: str) -> None:
    """Switch a transformers model to the attention function registered as `name`.

    Raises:
        UnsupportedModel: transformers cannot switch it.
    """
    try:
        module.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise UnsupportedModel(type(module).__name__, f"transformers cannot change its attention: {error}") from error
