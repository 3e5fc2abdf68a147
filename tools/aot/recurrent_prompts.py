"""Configurations of layers with a recurrent state over prompt tokens: see `aot_attention`."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from kvforge.worker.device.target import Target
from kvforge.worker.kernels.prompt_convolution import convolve_prompts
from kvforge.worker.kernels.prompt_delta import advance_prompts, choose_tiles
from kvforge.worker.kernels.prompt_rows import PromptRows, prompt_rows
from kvforge.worker.kernels.prompt_state_space import advance_spaces_of_prompts
from kvforge.worker.kernels.recurrent import CONVOLUTION, RECURRENT, Convolution, DeltaInputs
from kvforge.worker.kernels.state_space import StateSpace, StateSpaceInputs

from .compilation import BF16, DTYPE_NAMES, F16, F32, Configuration, distinct, launched_on, meta_tensor
from .recurrent import CONVOLUTIONS, FLOATS, delta_of, states_of_a_row
from .specialise import recorded
from .state_space import MODELS as SPACES

TOKENS = 70  # of the row that is launched: two tiles
MODELS = ("LFM2", "Qwen3-Next", "Granite 4", "Kimi Linear")


def rows_of(count: int) -> PromptRows:
    """Return `count` rows of TOKENS tokens, without memory."""
    starts = np.zeros(count, np.int64)
    firsts, counts = np.arange(count) * TOKENS, np.full(count, TOKENS)
    return prompt_rows(starts, firsts, counts, lambda array: torch.from_numpy(array).to("meta"))


def convolution_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `convolve_tiles_kernel` on `target`."""
    return _kernels_of(target, 0)


def convolution_state_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `convolve_states_kernel` on `target`."""
    return _kernels_of(target, 1)


def tiles_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `delta_tiles_kernel` on `target`."""
    return _kernels_of_delta(target, "tiles")


def pairs_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `channel_pairs_kernel` on `target`."""
    return _kernels_of_delta(target, "pairs")


def scan_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `delta_scan_kernel` on `target`."""
    return _kernels_of_delta(target, "scan")


def spaces_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `state_space_scan_kernel` on `target`."""
    made = []
    for dtype, kept, model, far in product((BF16, F16), FLOATS, SPACES, (False, True)):
        if choose_tiles(target, dtype) is None:
            continue
        heads, head_size, groups, state_size, has_norm = SPACES[model]
        numbers, weight = meta_tensor(heads, dtype=F32), meta_tensor(heads * head_size, dtype=dtype)
        space = StateSpace(groups, state_size, numbers, numbers, numbers, weight, 1e-6, has_norm)
        widths = (sum(space.parts), len(weight), heads)
        inputs = StateSpaceInputs(*(meta_tensor(TOKENS, width, dtype=dtype) for width in widths))
        with recorded(target) as launched:
            held = states_of_a_row(RECURRENT, space.state, F32, kept, far)
            advance_spaces_of_prompts(launched_on(target), inputs, held, space, rows_of(1))
        label = f"state space of prompts {DTYPE_NAMES[dtype]}, {DTYPE_NAMES[kept]} {model}{' far' * far}"
        made.append(Configuration(label, launched[0], matrix=True))
    return distinct(made)


def _kernels_of(target: Target, which: int) -> list[Configuration]:
    made = []
    if choose_tiles(target, F16) is None:  # T4
        return []
    convolutions = [model for model in CONVOLUTIONS if model in MODELS]
    for dtype, model, far in product((BF16, F16), convolutions, (False, True)):
        channels, taps, gated, silu, biased = CONVOLUTIONS[model]
        bias = meta_tensor(channels, dtype=dtype) if biased else None
        convolution = Convolution(meta_tensor(channels, taps, dtype=dtype), bias, gated, silu)
        x, states = meta_tensor(TOKENS, convolution.inputs, dtype=dtype), (1, channels, taps)
        with recorded(target) as launched:
            held = states_of_a_row(CONVOLUTION, states, dtype, dtype, far)
            convolve_prompts(launched_on(target), x, held, convolution, rows_of(1))
        label = f"convolution of prompts {'states ' * which}{DTYPE_NAMES[dtype]} {model}"
        made.append(Configuration(label + " far" * far, launched[which], matrix=False))
    return distinct(made)


def _kernels_of_delta(target: Target, kind: str) -> list[Configuration]:
    """Return the configurations of a kernel of gated delta rules: "tiles" or "scan", or "pairs", by channel alone."""
    made = []
    for model, dtype, kept, far in product(("Qwen3-Next", "Kimi Linear"), (BF16, F16), FLOATS, (False, True)):
        delta = delta_of(model, dtype)
        if choose_tiles(target, dtype) is None or (kind == "pairs" and not delta.is_by_channel):
            continue
        inputs = DeltaInputs(*(meta_tensor(TOKENS, width, dtype=dtype) for width in delta.widths))
        with recorded(target) as launched:
            held = states_of_a_row(RECURRENT, delta.state, F32, kept, far)
            advance_prompts(launched_on(target), inputs, held, delta, rows_of(1))
        which = ("pairs", "tiles", "scan").index(kind) - (not delta.is_by_channel)
        label = f"gated delta of prompts {kind} {DTYPE_NAMES[dtype]}, {DTYPE_NAMES[kept]} {model}{' far' * far}"
        made.append(Configuration(label, launched[which], matrix=True))
    return distinct(made)
