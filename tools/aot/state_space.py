"""Configurations of the step of Mamba 2's state spaces: see `aot_attention`."""

from __future__ import annotations

from itertools import product

import torch

from kvforge.worker.attention.states import ALIGNMENT
from kvforge.worker.device.target import Target
from kvforge.worker.kernels.recurrent import RECURRENT
from kvforge.worker.kernels.state_space import StateSpace, StateSpaceInputs
from kvforge.worker.kernels.state_space_kernels import advance_state_space

from .compilation import DTYPE_NAMES, F32, Configuration, distinct, launched_on, meta_tensor
from .recurrent import FLOATS, states_of_a_row
from .specialise import Specialisation, recorded

# Heads, numbers of a head, groups, numbers of B, whether a norm follows.
MODELS = {
    "Granite 4": (48, 64, 1, 128, True),
    "Nemotron-H": (128, 64, 8, 128, True),
    "Falcon-H1": (24, 128, 1, 256, False),
    "MiniMax": (64, 128, 64, 128, False),
    "odd sizes": (4, 24, 2, 40, True),
}
NORMED = tuple(model for model, sizes in MODELS.items() if sizes[4])


def state_space_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `state_space_kernel` on `target`."""
    return distinct(_advance(target, *each) for each in product(FLOATS, FLOATS, MODELS, (False, True)))


def group_norm_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `group_norm_kernel` on `target`."""
    return distinct(_norm(target, *each) for each in product(FLOATS, NORMED))


def _advance(target: Target, dtype: torch.dtype, kept: torch.dtype, model: str, far: bool) -> Configuration:
    assert MODELS[model][3] * kept.itemsize % ALIGNMENT == 0, "sizes of models are multiples"
    label = f"state space {DTYPE_NAMES[dtype]}, {DTYPE_NAMES[kept]} {model}{' far' * far}"
    return Configuration(label, _launched(target, dtype, kept, model, far)[0], matrix=False)


def _norm(target: Target, dtype: torch.dtype, model: str) -> Configuration:
    launched = _launched(target, dtype, F32, model, far=False)
    return Configuration(f"norm of groups {DTYPE_NAMES[dtype]} {model}", launched[1], matrix=False)


def _launched(target: Target, dtype: torch.dtype, kept: torch.dtype, model: str, far: bool) -> list[Specialisation]:
    heads, head_size, groups, state_size, has_norm = MODELS[model]
    numbers, weight = meta_tensor(heads, dtype=F32), meta_tensor(heads * head_size, dtype=dtype)
    space = StateSpace(groups, state_size, numbers, numbers, numbers, weight, 1e-6, has_norm)
    inputs = StateSpaceInputs(*(meta_tensor(1, width, dtype=dtype) for width in (sum(space.parts), len(weight), heads)))
    with recorded(target) as launched:
        states = states_of_a_row(RECURRENT, space.state, F32, kept, far)
        advance_state_space(launched_on(target), inputs, states, space)
    return launched
