"""Heads that draft: a layer of their own that reads hidden states of the model, and the embedding of the next token.

At position p, such a head reads the hidden state at p - 1 and the token at p, and computes the token at p + 1. Before
position 0 the hidden state is zero. The hidden state of each token is stored with it (`attention.hidden_states`), so
that a row goes on from any position with the bits that it would have without a cache.

In a pass of the model over prompt tokens only the K and V of the head are computed, since nothing else of its layer is
read later; in one over generated tokens not even these. A proposal runs the whole layer, from the token that was
sampled last. Behind it the head reads its own result in the place of the model's hidden state, which is not there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvforge.protocol.messages import ModelInfo
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.hidden_states import hidden_before, store_hidden
from kvforge.worker.attention.pool import KvGeometry, KvPool
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import LayerOperations
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.layer_weights import Norm


class Front(Protocol):
    """The first part of a head, before its layer.

    Attributes:
        goes_on_normed: Whether the next draft reads the result behind the head's final norm, not before it.
    """

    @property
    def goes_on_normed(self) -> bool:
        """Which result of the head the next draft reads."""

    def stored(self, ops: LayerOperations, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what is stored of the model's hidden states [tokens, hidden] each: [tokens, size]."""

    def start(
        self, ops: LayerOperations, embedded: torch.Tensor, before: torch.Tensor, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer adds to, [tokens, size], and what it reads.

        Args:
            ops: Operations of the layer.
            embedded: Embeddings of the tokens, [tokens, hidden].
            before: Stored hidden states of the positions before, [tokens, size].
            norm: The norm at the beginning of the layer; None: it has none.
        """

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return its weights."""


def project(ops: LayerOperations, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x weight^T, [tokens, n], of a wide x and a weight of few rows, which kernels multiply in parts.

    Kernels return float32, also in one part.
    """
    parts = ops.linear_parts(x, weight)
    return (parts[0] if len(parts) == 1 else parts.sum(0)).to(x.dtype)


@dataclass(frozen=True)
class MtpFront:
    """The front of a multi-token prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Attributes:
        token_norm: Norm of the embedding.
        hidden_norm: Norm of the hidden state.
        projection: [hidden, 2 x hidden], of both.
        hidden_first: Whether the hidden state comes first in what is projected (MiMo); else the embedding.
    """

    token_norm: Norm
    hidden_norm: Norm
    projection: torch.Tensor
    hidden_first: bool = False
    goes_on_normed: bool = True

    def stored(self, _ops: LayerOperations, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the final norm, as it is; see `Front`."""
        return hidden[0]

    def start(
        self, ops: LayerOperations, embedded: torch.Tensor, before: torch.Tensor, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project both; see `Front`."""
        parts = ops.norm(embedded, self.token_norm), ops.norm(before.to(embedded.dtype), self.hidden_norm)
        residual = project(ops, torch.cat(parts[::-1] if self.hidden_first else parts, 1), self.projection)
        return residual, residual if norm is None else ops.norm(residual, norm)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return its weights; see `Front`."""
        return self.token_norm.weight, self.hidden_norm.weight, self.projection


@dataclass(frozen=True)
class DraftHead:
    """A head of one layer; see `beside.DraftSource`.

    Attributes:
        info: Its description.
        geometry: Layout of its K and V, and of the hidden states behind them.
        device: The device that computes.
        vocab_size: Size of the model's vocabulary.
        model: The model's decoder, which has the embeddings.
        decoder: Its layer, its final norm and its vocabulary head.
        front: Its part before the layer.
        bytes: Bytes of its weights.
        taps: See `beside.DraftSource`.
        drafted: [n] int64 on the device, the model's token of each row of the vocabulary head; None: the same.
    """

    info: ModelInfo
    geometry: KvGeometry
    device: Device
    vocab_size: int
    model: FusedDecoder
    decoder: FusedDecoder
    front: Front
    bytes: int
    taps: tuple[int, ...] = ()
    drafted: torch.Tensor | None = None

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads hidden states: always."""
        return True

    @torch.inference_mode()
    def keep(self, hidden: Sequence[torch.Tensor], slots: torch.Tensor, pool: KvPool) -> None:
        """Store the hidden states; see `beside.DraftSource`."""
        store_hidden(self.front.stored(self.decoder.operations, hidden), pool.layers[-1], slots)

    @torch.inference_mode()
    def feed(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, pool: KvPool) -> None:
        """Write the layer's K and V; see `beside.DraftSource`."""
        _, normed = self._start(token_ids, self.hidden_before(batch, pool))
        self.decoder.write_keys(normed, positions, batch, pool)

    def hidden_before(self, batch: PagedBatch, pool: KvPool) -> torch.Tensor:
        """Return what is stored of the positions before; see `beside.DraftSource`."""
        return hidden_before(pool.layers[-1], batch)

    @torch.inference_mode()
    def next_tokens(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        below: int,
        batch: PagedBatch,
        pool: KvPool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pass; see `beside.DraftSource`."""
        logits, hidden = self.run(token_ids, positions, hidden, batch, pool)
        if self.drafted is not None:
            return self.drafted[logits.argmax(1)], hidden
        return logits[:, :below].argmax(1), hidden

    @torch.inference_mode()
    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        batch: PagedBatch,
        pool: KvPool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits [rows, n] float32 of `next_tokens`, and the hidden states for the next pass."""
        assert hidden is not None, "a head reads hidden states"
        residual, normed = self._start(token_ids, hidden)
        normed = self.decoder.run_layers(residual, normed, positions, batch, pool)
        return self.decoder.logits(normed), normed if self.front.goes_on_normed else residual

    def _start(self, token_ids: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.model.operations.look_up(token_ids, self.model.table)
        if self.model.embedding_scale != 1.0:
            embedded = embedded * self.model.embedding_scale
        return self.front.start(self.decoder.operations, embedded, before, self.decoder.layers[0].input_norm)
