"""Log-probabilities of prompt tokens: from logits to what the host gets.

As in `filters`, no result depends on the batch: the order of tokens compares logits exactly, and the normaliser is a
sum of integers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, Float32Array, Int32Array
from kvforge.worker.device.queue import AsyncCopy

from .filters import log_normaliser, top_logprobs

FINITE_COLUMN, COLUMNS = (
    2,
    3,
)  # log-probability, rank and whether the logits were finite; then the top tokens and theirs
LOGITS_MAX = 1 << 24  # logits that are held at a time: 64 MiB


def tokens_at_a_time(vocab_size: int) -> int:
    """Return for how many prompt tokens logits are computed at a time."""
    return max(1, LOGITS_MAX // vocab_size)


def score(logits: torch.Tensor, following: torch.Tensor, width: int) -> torch.Tensor:
    """Compute the log-probability and the rank of given tokens, and the most likely tokens.

    Args:
        logits: [m, vocab] float32 on the device, raw.
        following: [m] int64 on the device.
        width: Top tokens of each row, at most the vocabulary.

    Returns:
        [m, COLUMNS + 2 * width] int32 on the device, log-probabilities as their bits; read by `ScoredPart.rows`.
    """
    normaliser = log_normaliser(logits)
    own = logits.gather(1, following[:, None])
    logprobs = (own.squeeze(1).double() - normaliser).float()
    ids = torch.arange(logits.shape[1], device=logits.device)
    above = (logits > own) | ((logits == own) & (ids < following[:, None]))
    finite = torch.isfinite(logits.sum(dim=-1))
    columns = [logprobs.view(torch.int32), above.sum(dim=-1).int() + 1, finite.int()]
    packed = torch.stack(columns, dim=1)
    if not width:
        return packed
    tokens, top = top_logprobs(logits, normaliser, width)
    return torch.cat([packed, tokens.int(), top.contiguous().view(torch.int32)], dim=1)


@dataclass(frozen=True)
class ScoredPart:
    """Scored prompt tokens on their way to the host.

    Attributes:
        slots: Their rows' slots, [m] int32.
        places: Their indices in `Step.scored`, [m] int32.
        top_counts: Top tokens that each wants, [m] int32.
        fetched: [m * (COLUMNS + 2 * width)] int32, as `score` returns them.
    """

    slots: Int32Array
    places: Int32Array
    top_counts: Int32Array
    fetched: AsyncCopy

    def rows(self) -> Int32Array:
        """Return the rows, [m, COLUMNS + 2 * width] int32. Call it after the step's end has passed."""
        return self.fetched.array().reshape(len(self.slots), -1)


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of prompt tokens on the host, in the format of StepResult."""

    logprobs: Float32Array
    ranks: Int32Array
    top_counts: Int32Array
    top_tokens: Int32Array
    top_logprobs: Float32Array


NO_SCORES = PromptScores(NO_FLOAT32, NO_INT32, NO_INT32, NO_INT32, NO_FLOAT32)


def unpacked(parts: list[tuple[ScoredPart, Int32Array]], failed: Collection[int]) -> PromptScores:
    """Join the parts of a step in the order of `Step.scored`, without the rows that failed.

    Args:
        parts: Each part with its rows, which have the same width.
        failed: Slots.
    """
    if not parts:
        return NO_SCORES
    places = np.concatenate([part.places for part, _ in parts])
    slots = np.concatenate([part.slots for part, _ in parts])
    order = np.argsort(places, kind="stable")
    if failed:
        order = order[~np.isin(slots[order], np.fromiter(failed, np.int64, len(failed)))]
    rows = np.concatenate([rows for _, rows in parts])[order]
    counts = np.concatenate([part.top_counts for part, _ in parts])[order]
    width = (rows.shape[1] - COLUMNS) // 2
    held = np.arange(width) < counts[:, None]
    floats = rows.view(np.float32)
    return PromptScores(
        floats[:, 0].copy(),
        rows[:, 1].copy(),
        counts,
        rows[:, COLUMNS : COLUMNS + width][held],
        floats[:, COLUMNS + width :][held],
    )
