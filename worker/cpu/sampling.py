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
    choose(
        _threads(rows, vocab),
        logits=logits.data_ptr(),
        rows=rows,
        vocab=vocab,
        slots=slots.data_ptr(),
        wanted=wanted.data_ptr(),
        values=values.data_ptr(),
        columns=values.shape[1],
        seeds=seeds.data_ptr(),
        generated=generated.data_ptr(),
        last_token=last_token.data_ptr(),
        packed=packed.data_ptr(),
        masks=0 if masks is None else masks.data_ptr(),
        words=0 if masks is None else masks.stride(0),
    )


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
    draw(
        _threads(rows, vocab),
        scores=scores.data_ptr(),
        rows=rows,
        vocab=vocab,
        seeds=seeds.data_ptr(),
        positions=positions.data_ptr(),
        tokens=tokens.data_ptr(),
    )
    return tokens


def _threads(rows: int, vocab: int) -> int:
    return threads_for(rows * vocab / NUMBERS_PER_US) if rows > 1 else 1
