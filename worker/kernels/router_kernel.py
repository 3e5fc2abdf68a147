"""Routers of mixtures of experts as one Triton kernel: scores, the choice of experts, and their weights.

One program computes one token, so the choice cannot depend on other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching
from .linear import SHORT_PARTS_MAX
from .router import AWAY, Router

GATE_BLOCK = 1024  # numbers of x that the gate of shared experts is multiplied with at a time
_AWAY = tl.constexpr(AWAY)
_GATE_BLOCK = tl.constexpr(GATE_BLOCK)
LOWEST = tl.constexpr(-(2**63))  # below the key of every score, NaN included


@triton.jit
def _keys(scores, places):
    """Return int64 keys in the order of the scores. Of equal scores, the one at the lower place has the larger key.

    The bits of a negative number are inverted below its sign, so that the larger number has the larger integer.
    """
    scores = scores + 0.0  # -0.0 and 0.0 are equal
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _place_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _score_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _function(numbers, inside, axis: tl.constexpr, KIND: tl.constexpr):
    """Apply softmax, sigmoid or nothing to the numbers inside."""
    if KIND == "softmax":
        numbers = tl.where(inside, numbers, -float("inf"))
        grown = tl.exp(numbers - tl.max(numbers, axis))
        return grown / tl.sum(grown, axis)
    elif KIND == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-numbers))
    else:
        return numbers


@triton.jit
def _shared_factor(x, gate, hidden, STEPS: tl.constexpr, ROUNDED: tl.constexpr):
    """Return the sigmoid of the product of x and gate [hidden]. STEPS: blocks of numbers."""
    total = tl.zeros([_GATE_BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        columns = step * _GATE_BLOCK + tl.arange(0, _GATE_BLOCK)
        numbers = tl.load(x + columns, mask=columns < hidden, other=0.0).to(tl.float32)
        total += numbers * tl.load(gate + columns, mask=columns < hidden, other=0.0).to(tl.float32)
    logit = tl.sum(total, 0).to(x.dtype.element_ty).to(tl.float32)
    return (1.0 / (1.0 + tl.exp(-logit))).to(ROUNDED).to(tl.float32)


@triton.jit(do_not_specialize=["experts", "first_held", "held", "shared", "parts", "x_stride", "hidden"])
def route_kernel(
    logits,
    bias,
    factors,
    x,
    gate,
    chosen,
    weights,
    experts,
    shared,
    parts,
    x_stride,
    hidden,
    first_held,
    held,
    sum_added,
    sum_min,
    scaling,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    SCORES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    NORMALISES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    GATE_STEPS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PARTS: tl.constexpr,
    SUM_ROUNDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Choose the experts of one token. Grid: [tokens].

    logits: [parts, tokens, experts], contiguous. PARTS: 1, or not less than `parts`. SUM_ROUNDED: the dtype that their
    sum is rounded to. bias, factors: [experts] float32. x: [tokens, hidden], x_stride elements from
    token to token. gate: [hidden], of the shared experts. chosen: [tokens, CHOSEN + shared] int32. weights: likewise,
    float32. GROUP_BLOCK: a power of two that holds the experts of a group. CHOSEN_BLOCK, GROUPS_BLOCK: likewise for the
    choices and the groups. GATE_STEPS: blocks of x; 0: shared experts have no gate. ROUNDED: the dtype that the weights
    are rounded to. held: not 0. Others: see Router.
    """
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    size = experts // GROUPS
    group = tl.arange(0, GROUPS_BLOCK * GROUP_BLOCK) // GROUP_BLOCK
    within = tl.arange(0, GROUPS_BLOCK * GROUP_BLOCK) % GROUP_BLOCK
    inside = (within < size) & (group < GROUPS)
    places = tl.where(inside, group * size + within, experts)
    wait_for_inputs(OVERLAP)
    numbers = tl.load(logits + token * experts + places, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        at = logits + (part * tl.num_programs(0) + token) * experts + places
        numbers += tl.load(at, mask=inside & (part < parts), other=0.0).to(tl.float32)
    numbers = numbers.to(SUM_ROUNDED).to(tl.float32)
    factor = 1.0
    if GATE_STEPS > 0:
        factor = _shared_factor(x + token * x_stride, gate, hidden, GATE_STEPS, ROUNDED)
    scores = _function(numbers, inside, 0, SCORES)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias + places, mask=inside, other=0.0)
    keys = tl.where(inside, _keys(ranked, places), LOWEST)
    if GROUPS > 1:
        by_group = tl.reshape(keys, [GROUPS_BLOCK, GROUP_BLOCK])
        numbers_by_group = tl.reshape(ranked, [GROUPS_BLOCK, GROUP_BLOCK])
        first = tl.max(by_group, 1)
        is_best = by_group == first[:, None]
        if GROUP_BEST == 2:
            second = tl.max(tl.where(is_best, LOWEST, by_group), 1)
            is_best = is_best | ((by_group == second[:, None]) & (by_group != LOWEST))
        best = tl.sum(tl.where(is_best, numbers_by_group, 0.0), 1)
        group_places = tl.arange(0, GROUPS_BLOCK)
        group_keys = tl.where(group_places < GROUPS, _keys(best, group_places), LOWEST)
        kept = group_places < 0
        for _ in tl.static_range(GROUPS_CHOSEN):
            largest = tl.max(group_keys, 0)
            kept = kept | (group_keys == largest)
            group_keys = tl.where(group_keys == largest, LOWEST, group_keys)
        keys = tl.reshape(tl.where(kept[:, None], by_group, LOWEST), [GROUPS_BLOCK * GROUP_BLOCK])
    order = tl.arange(0, CHOSEN_BLOCK)
    found_places = tl.zeros([CHOSEN_BLOCK], tl.int32)
    found = tl.zeros([CHOSEN_BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        largest = tl.max(keys, 0)
        if HAS_BIAS:  # the key is of the biased score
            score = tl.sum(tl.where(keys == largest, scores, 0.0), 0)
        else:
            score = _score_of(largest)
        found_places = tl.where(order == place, _place_of(largest), found_places)
        found = tl.where(order == place, score, found)
        keys = tl.where(keys == largest, LOWEST, keys)
    counted = order < CHOSEN
    found = _function(found, counted, 0, WEIGHTS)
    if NORMALISES:
        total = tl.sum(tl.where(counted, found, 0.0), 0) + sum_added
        found = found / tl.where(total < sum_min, sum_min, total)
    if HAS_FACTORS:
        found = found * tl.load(factors + found_places, mask=counted, other=0.0)
    found = (found * scaling).to(ROUNDED).to(tl.float32)
    found_places -= first_held
    found_places = tl.where((found_places >= 0) & (found_places < held), found_places, _AWAY)
    first = token * (CHOSEN + shared)
    tl.store(chosen + first + order, found_places, mask=counted)
    tl.store(weights + first + order, found, mask=counted)
    if shared > 0:
        for number in range(shared):
            tl.store(chosen + first + CHOSEN + number, experts + number)
            tl.store(weights + first + CHOSEN + number, factor)


ROUNDED = {None: tl.float32, torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def route(
    launch: Launching,
    logits: torch.Tensor,
    router: Router,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `LayerOperations.route`."""
    tokens, experts = logits.shape[-2:]
    parts = len(logits) if logits.dim() == 3 else 1
    is_wide = logits.dim() == 3 and logits.dtype == torch.float32  # and its product not rounded yet
    assert parts <= SHORT_PARTS_MAX and logits.is_contiguous(), (logits.shape, logits.stride())
    shape = (tokens, router.chosen + router.shared)
    chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    read, gate = (logits, logits) if x is None or shared_gate is None else (x, shared_gate)
    assert read.stride(-1) == 1 and gate.is_contiguous(), "the numbers of a row lie apart"
    hidden = read.shape[-1]
    route_kernel[(tokens,)](
        logits,
        logits if bias is None else bias,
        logits if factors is None else factors,
        read,
        gate,
        chosen,
        weights,
        experts,
        router.shared,
        parts,
        read.stride(0),
        hidden,
        router.first_held,
        router.held or experts,
        router.sum_added,
        router.sum_min,
        router.scaling,
        CHOSEN=router.chosen,
        CHOSEN_BLOCK=triton.next_power_of_2(router.chosen),
        SCORES=router.scores,
        WEIGHTS=router.weights,
        NORMALISES=router.normalises,
        HAS_BIAS=bias is not None,
        HAS_FACTORS=factors is not None,
        GROUPS=router.groups,
        GROUPS_BLOCK=triton.next_power_of_2(router.groups),
        GROUPS_CHOSEN=router.groups_chosen,
        GROUP_BEST=router.group_best,
        GROUP_BLOCK=triton.next_power_of_2(experts // router.groups),
        GATE_STEPS=0 if shared_gate is None else ceil_div(hidden, GATE_BLOCK),
        ROUNDED=ROUNDED[router.dtype],
        PARTS=1 if parts == 1 else SHORT_PARTS_MAX,
        SUM_ROUNDED=ROUNDED[x.dtype if x is not None and is_wide else None],
        num_warps=1 if experts <= 256 else 4,
        **launch_options(launch.overlap),
    )
    return chosen, weights
