"""Configurations of Mamba 1's state spaces, of steps and of prompts: see `aot_attention`."""

from __future__ import annotations

from itertools import product

import torch

from kvforge.worker.device.target import Target
from kvforge.worker.kernels.prompt_delta import choose_tiles
from kvforge.worker.kernels.prompt_selective import advance_selective_prompts
from kvforge.worker.kernels.recurrent import RECURRENT
from kvforge.worker.kernels.selective import SelectiveInputs, SelectiveSpace
from kvforge.worker.kernels.selective_kernels import advance_selective

from .compilation import BF16, DTYPE_NAMES, F16, F32, Configuration, distinct, launched_on, meta_tensor
from .recurrent import FLOATS, states_of_a_row
from .recurrent_prompts import TOKENS, rows_of
from .specialise import recorded

# Channels, numbers of a channel's state.
MODELS = {"Jamba": (8192, 16), "odd sizes": (72, 12), "RecurrentGemma": (2560, 1)}
WIDE = ("RecurrentGemma",)  # given float32


def step_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `selective_kernel` on `target`."""
    return distinct(_advance(target, *each) for each in product(FLOATS, FLOATS, MODELS, (False, True)))


def prompt_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `selective_scan_kernel` on `target`."""
    if choose_tiles(target, F16) is None:  # T4
        return []
    return distinct(
        _advance(target, *each, prompts=True) for each in product((BF16, F16), FLOATS, MODELS, (False, True))
    )


def space_of(channels: int, state_size: int) -> SelectiveSpace:
    """Return state spaces without memory."""
    numbers = meta_tensor(channels, dtype=F32)
    return SelectiveSpace(meta_tensor(channels, state_size, dtype=F32), numbers, numbers)


def _advance(
    target: Target, dtype: torch.dtype, kept: torch.dtype, model: str, far: bool, prompts: bool = False
) -> Configuration:
    space, dtype = space_of(*MODELS[model]), F32 if model in WIDE else dtype
    tokens = TOKENS if prompts else 1
    inputs = SelectiveInputs(*(meta_tensor(tokens, width, dtype=dtype) for width in space.widths))
    with recorded(target) as launched:
        held = states_of_a_row(RECURRENT, space.state, F32, kept, far)
        if prompts:
            advance_selective_prompts(launched_on(target), inputs, held, space, rows_of(1))
        else:
            advance_selective(launched_on(target), inputs, held, space)
    label = f"selective {'prompts ' * prompts}{DTYPE_NAMES[dtype]}, {DTYPE_NAMES[kept]} {model}{' far' * far}"
    return Configuration(label, launched[0], matrix=False)
