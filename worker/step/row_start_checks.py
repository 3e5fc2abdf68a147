"""Validation of a RowStart before any state is changed."""

from __future__ import annotations

import math

import numpy as np

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import (
    LOGIT_BIAS_MAX,
    SAMPLING_RANGES,
    TOP_LOGPROBS_MAX,
    Int32Array,
    RowStart,
    SamplingParams,
    Step,
)

SEED_MAX = 2**64 - 1
Histories = tuple[tuple[Int32Array, Int32Array], ...]


def split_history(step: Step) -> Histories | None:
    """Split the step's history among its begins.

    Returns:
        For each begin, the tokens of its prompt and of its answer so far that penalties count. None if the counts do
        not add up to the length of `history`.
    """
    counts = [count for start in step.begins for count in (start.prompt_history, start.generated_history)]
    if min(counts, default=0) < 0 or sum(counts) != len(step.history):
        return None
    parts = np.split(step.history, np.cumsum(counts)[:-1]) if counts else []
    return tuple(zip(parts[0::2], parts[1::2], strict=True))


def problem_of(
    start: RowStart, history: tuple[Int32Array, Int32Array], slots_max: int, vocab_size: int
) -> InvalidRequest | None:
    """Return the first fault of a start, naming the field; None if it is valid."""
    if not 0 <= start.slot < slots_max:
        return InvalidRequest("slot", f"{start.slot} must be less than slots_max = {slots_max}")
    if not 0 <= start.seed <= SEED_MAX:
        return InvalidRequest("seed", f"{start.seed} is not an unsigned 64-bit number")
    if not 0 <= start.generated < 1 << 31:
        return InvalidRequest("generated", f"{start.generated} is out of range")
    if start.drafts < 0:
        return InvalidRequest("drafts", f"{start.drafts} tokens to propose; 0 proposes none")
    if not 0 <= start.shared_drafts < 1 << 63:
        return InvalidRequest("shared_drafts", f"{start.shared_drafts} is not an unsigned 63-bit number")
    for tokens in history:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            return InvalidRequest("history", f"a token id is outside the vocabulary of {vocab_size}")
    return _sampling_problem(start.sampling, vocab_size)


def _sampling_problem(sampling: SamplingParams, vocab_size: int) -> InvalidRequest | None:
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        return InvalidRequest("sampling.temperature", f"{sampling.temperature} is not a finite number >= 0")
    for name, (low, high) in SAMPLING_RANGES.items():
        if not low <= getattr(sampling, name) <= high:
            return InvalidRequest(f"sampling.{name}", f"{getattr(sampling, name)} is not {low:g} to {high:g}")
    wanted = sampling.prompt_logprobs
    if wanted is not None and not 0 <= wanted <= TOP_LOGPROBS_MAX:
        return InvalidRequest("sampling.prompt_logprobs", f"{wanted} is not 0 to {TOP_LOGPROBS_MAX}")
    ids = [token for token, _ in sampling.logit_bias]
    if len(ids) > LOGIT_BIAS_MAX or len(set(ids)) != len(ids):
        return InvalidRequest("sampling.logit_bias", f"more than {LOGIT_BIAS_MAX} entries, or a token id twice")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        return InvalidRequest("sampling.logit_bias", f"a token id is outside the vocabulary of {vocab_size}")
    if any(not value < math.inf for _, value in sampling.logit_bias):
        return InvalidRequest("sampling.logit_bias", "a value must be a finite number or -inf")
    return None
