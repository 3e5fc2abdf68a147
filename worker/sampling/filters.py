"""Which tokens stay in play, and log-probabilities: the parts of sampling that look at a whole row.

No result depends on the batch. What is not elementwise or a maximum is a sum of integers: floating-point sums are
taken in another order where there are other rows beside one, and a token at the edge of a filter would come and go.
Weights are exp(score - highest score) in units of 2^-40, so that 2^22 of them fit an int64 with room to spare.
"""

from __future__ import annotations

import math

import torch

WEIGHT_BITS = 40
NARROW = 1024  # tokens that the nucleus of a distribution is sought among first
ID_MASK = 0xFFFFFFFF


def most_likely_mask(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
    """What top_k and then top_p leave: [n, vocab] bool device. At least one token of each row stays.

    scores: [n, vocab] float64 device, tempered. top_k: [n] int64 device, 0 is off. top_p: [n] float64 device, 1 is
    off. width: how many tokens may have to be put in order: the largest top_k, or the vocabulary where one is 0.
    Of equal scores the lowest ids stay.
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
    """What top_p leaves, found among the NARROW most likely tokens; None where a row keeps more than those. Putting a
    whole vocabulary in order takes a CPU four times as long. It has to look at numbers, for which a GPU would wait."""
    ordered = scores.topk(NARROW, dim=-1).values
    weights = _weights(ordered, ordered[:, :1])
    reached = top_p[:, None] * _weights(scores, ordered[:, :1]).sum(dim=-1, keepdim=True)
    inside = weights.cumsum(dim=-1) - weights < reached
    if (top_p >= 1).any() or inside[:, -1].any():
        return None
    count = inside.sum(dim=-1, keepdim=True).clamp_(min=1)
    return _first(scores, ordered.gather(1, count - 1), count)


def _first(scores: torch.Tensor, cut: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The first `count` tokens that score as much as `cut` or more, those above it before those that equal it."""
    above, ties = scores > cut, scores == cut
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= room))


def min_p_mask(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Tokens at least min_p times as likely as the likeliest: [n, vocab] bool device.

    scores: [n, vocab] float64 device, tempered. min_p: [n] float64 device; 0 leaves all.
    """
    return scores >= scores.amax(dim=-1, keepdim=True) + min_p.log()[:, None]


def log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) of each row, to about 1e-7: [n] float64 device. logits: [n, vocab] float32 device."""
    highest = logits.amax(dim=-1, keepdim=True)
    total = _weights(logits, highest).sum(dim=-1)
    return total.double().log_() - WEIGHT_BITS * math.log(2) + highest.squeeze(1).double()


def top_logprobs(logits: torch.Tensor, normaliser: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most likely tokens of each row, the lowest id first among equals, and their log-probabilities.

    logits: [n, vocab] float32 device, raw. normaliser: [n] float64 device. Returns [n, count] int64 and float32 device.
    topk alone leaves open which of equal values it takes, so it is given distinct keys: the bits of the logit, made to
    order like integers, above the inverted id.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0: the two zeros are equal here too
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | (ID_MASK - ids)
    tokens = ID_MASK - (keys.topk(count, dim=-1).values & ID_MASK)
    return tokens, (logits.gather(1, tokens).double() - normaliser[:, None]).float()


def _weights(scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """exp(scores - highest) in units of 2^-WEIGHT_BITS: int64. Where a row is not finite the result means nothing."""
    return (scores - highest).exp_().mul_(2.0**WEIGHT_BITS).long()
