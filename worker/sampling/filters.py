"""Filters (top_k, top_p, min_p) and log-probabilities: the parts of sampling that need a whole row.

No result depends on the batch. Everything except elementwise operations and maxima is a sum of integers: the order of
floating-point sums changes with the number of rows, and a token at the edge of a filter would come and go. Weights are
exp(score - highest score) in units of 2^-40, so that 2^22 weights fit an int64 with room to spare.
"""

from __future__ import annotations

import math

import torch

WEIGHT_BITS = 40
NARROW = 1024  # most likely tokens that are searched for the nucleus first
ID_MASK = 0xFFFFFFFF


def most_likely_mask(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
    """Apply top_k, then top_p. At least one token of each row stays. Ties keep the lowest ids.

    Args:
        scores: [n, vocab] float64 on the device, after the temperature.
        top_k: [n] int64 on the device, 0 is off.
        top_p: [n] float64 on the device, 1 is off.
        width: Tokens to sort: the largest top_k, or the vocabulary if one is 0.

    Returns:
        [n, vocab] bool on the device, True for tokens that stay.
    """
    if scores.device.type == "cpu" and width > NARROW and not top_k.any():
        keep = _nucleus(scores, top_p)
        if keep is not None:
            return keep
    ordered = scores.topk(width, dim=-1).values
    limit = torch.where(top_k > 0, top_k, width)[:, None]
    inside = torch.arange(width, device=scores.device) < limit
    weights = _weights(ordered, ordered[:, :1]) * inside
    before = weights.cumsum(dim=-1) - weights
    reached = top_p[:, None] * weights.sum(dim=-1, keepdim=True)
    nucleus = (before < reached) | (top_p[:, None] >= 1)
    count = (inside & nucleus).sum(dim=-1, keepdim=True).clamp_(min=1)
    return _first(scores, ordered.gather(1, count - 1), count)


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor | None:
    """Apply top_p among the NARROW most likely tokens; None if a row keeps more than those.

    Sorting a whole vocabulary takes a CPU four times as long. A GPU would have to wait for the values checked here.
    """
    ordered = scores.topk(NARROW, dim=-1).values
    weights = _weights(ordered, ordered[:, :1])
    reached = top_p[:, None] * _weights(scores, ordered[:, :1]).sum(dim=-1, keepdim=True)
    inside = weights.cumsum(dim=-1) - weights < reached
    if (top_p >= 1).any() or inside[:, -1].any():
        return None
    count = inside.sum(dim=-1, keepdim=True).clamp_(min=1)
    return _first(scores, ordered.gather(1, count - 1), count)


def _first(scores: torch.Tensor, cut: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return a mask of the first `count` tokens with scores of `cut` or more; higher scores precede equal ones."""
    above, ties = scores > cut, scores == cut
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= room))


def min_p_mask(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Select tokens at least min_p times as likely as the most likely one.

    Args:
        scores: [n, vocab] float64 on the device, after the temperature.
        min_p: [n] float64 on the device; 0 keeps all.

    Returns:
        [n, vocab] bool on the device.
    """
    return scores >= scores.amax(dim=-1, keepdim=True) + min_p.log()[:, None]


def log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """Compute log(sum(exp(logits))) of each row, to about 1e-7.

    Args:
        logits: [n, vocab] float32 on the device.

    Returns:
        [n] float64 on the device.
    """
    highest = logits.amax(dim=-1, keepdim=True)
    total = _weights(logits, highest).sum(dim=-1)
    return total.double().log_() - WEIGHT_BITS * math.log(2) + highest.squeeze(1).double()


def top_logprobs(logits: torch.Tensor, normaliser: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` most likely tokens of each row with their log-probabilities; ties order by id.

    torch's topk may return any of equal values, so it sorts distinct keys: the bits of the logit, made to order like
    integers, above the inverted id.

    Args:
        logits: [n, vocab] float32 on the device, raw.
        normaliser: [n] float64 on the device.
        count: Tokens per row.

    Returns:
        Tokens [n, count] int64 and log-probabilities [n, count] float32, on the device.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0: the two zeros are equal here too
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | (ID_MASK - ids)
    tokens = ID_MASK - (keys.topk(count, dim=-1).values & ID_MASK)
    return tokens, (logits.gather(1, tokens).double() - normaliser[:, None]).float()


def _weights(scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - highest) in units of 2^-WEIGHT_BITS as int64; undefined for rows that are not finite."""
    return (scores - highest).exp_().mul_(2.0**WEIGHT_BITS).long()
