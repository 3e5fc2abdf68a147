"""Sampling on the CPU with the kernels of sampling_kernels.py."""

from __future__ import annotations

import torch

from kvforge.worker.cpu.kernel import threads_for

from .sampling_kernels import choose, draw

NUMBERS_PER_US = 500  # scores that one thread processes


def choose_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    wanted: torch.Tensor,
    values: torch.Tensor,
    seeds: torch.Tensor,
    generated: torch.Tensor,
    last_token: torch.Tensor,
    packed: torch.Tensor,
    masks: torch.Tensor | None = None,
) -> None:
    """Sample a token for each row; see `SamplingState.sample_simple`. `values` to `last_token` are the state's."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    read = logits.data_ptr(), rows, vocab, slots.data_ptr(), wanted.data_ptr()
    state = values.data_ptr(), values.shape[1], seeds.data_ptr(), generated.data_ptr(), last_token.data_ptr()
    allowed = (0, 0) if masks is None else (masks.data_ptr(), masks.stride(0))
    choose(_threads(rows, vocab), *read, *state, packed.data_ptr(), *allowed)


def draw_tokens(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw a token from each row.

    Args:
        scores: [n, vocab] float64, after the temperature; -inf excludes a token.
        seeds: [n] int64, see `draws.uniforms`.
        positions: [n] int64, see `draws.uniforms`.

    Returns:
        [n] int64.
    """
    scores = scores.contiguous()
    (rows, vocab), tokens = scores.shape, torch.empty_like(positions)
    given = scores.data_ptr(), rows, vocab, seeds.data_ptr(), positions.data_ptr()
    draw(_threads(rows, vocab), *given, tokens.data_ptr())
    return tokens


def _threads(rows: int, vocab: int) -> int:
    return threads_for(rows * vocab / NUMBERS_PER_US) if rows > 1 else 1
