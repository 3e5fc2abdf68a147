"""The interface of what drafts beside a model: a draft model (`LoadedModel`), or heads (`heads.DraftHead`).

Each has K and V of its own in the same blocks (`KvGeometry.beside`). A pass of the model over prompt tokens writes them
too; those of generated tokens are left to the next proposal (`attention.draft_backlog`). A draft model needs the tokens
alone. Heads read hidden states of the model, which every pass stores with each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvforge.protocol.messages import ModelInfo
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvGeometry, KvPool
from kvforge.worker.device.device import Device


class DraftSource(Protocol):
    """Drafts beside a model.

    In the methods, `pool` is the pool of its own K and V (`KvPool.beside`) and `batch` a batch of that pool.
    """

    @property
    def info(self) -> ModelInfo:
        """Describe it: its name, its fingerprint, and the longest row."""

    @property
    def geometry(self) -> KvGeometry:
        """Layout of what it stores in each block."""

    @property
    def device(self) -> Device:
        """The device that computes."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it is fed are below it."""

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads hidden states, and is therefore fed after the model's pass; else before.

        If so, its K and V of a token do not depend on those of other tokens.
        """

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model; it reads the residuals that these read. No layers: it reads the final norm."""

    def keep(self, hidden: Sequence[torch.Tensor], slots: torch.Tensor, pool: KvPool) -> None:
        """Store what it reads of the model's hidden states; nothing if it reads none.

        Args:
            hidden: [tokens, hidden] each.
            slots: [tokens] int64 on the device, the slot of each token.
            pool: Its pool.

        Raises:
            RuntimeError: torch failed.
        """

    def feed(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, pool: KvPool) -> None:
        """Write its K and V of tokens, with the hidden states that are kept.

        Args:
            token_ids: [tokens] int64 on the device.
            positions: [tokens] int64 on the device.
            batch: Structure of the batch.
            pool: Its pool.

        Raises:
            RuntimeError: torch failed.
        """

    def hidden_before(self, batch: PagedBatch, pool: KvPool) -> torch.Tensor | None:
        """Return the hidden states at the positions before the tokens, [tokens, hidden]; None if it reads none."""

    def next_tokens(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        below: int,
        batch: PagedBatch,
        pool: KvPool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one pass over rows of one token: write its K and V, and compute the greedy token behind it.

        Args:
            token_ids: [rows] int64 on the device.
            positions: [rows] int64 on the device.
            hidden: Hidden states at the positions before: of `hidden_before`, or of the pass before.
            below: The tokens to choose from are [0, below).
            batch: Structure of the batch.
            pool: Its pool.

        Returns:
            The tokens [rows] int64, and the hidden states for the next pass, None if it reads none.

        Raises:
            RuntimeError: torch failed.
        """
