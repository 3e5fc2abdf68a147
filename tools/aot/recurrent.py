"""Configurations of the steps of layers with a recurrent state: see `aot_attention`."""

from __future__ import annotations

from itertools import product

import torch

from kvforge.worker.attention.states import ALIGNMENT, StateRows, StateTensor
from kvforge.worker.device.target import Target
from kvforge.worker.kernels.recurrent import CONVOLUTION, RECURRENT, Convolution, DeltaInputs, GatedDelta
from kvforge.worker.kernels.recurrent_kernels import advance_delta, convolve

from .compilation import BF16, DTYPE_NAMES, F16, F32, FAR_BYTES, Configuration, distinct, launched_on, meta_tensor
from .specialise import recorded

FLOATS = (BF16, F16, F32)
KEPT = [(dtype, dtype) for dtype in FLOATS] + [(F32, BF16), (F32, F16)]  # of a model and its convolutions' states
# Channels, taps, whether it is gated, has SiLU and a bias.
CONVOLUTIONS = {
    "LFM2": (2048, 3, True, False, False),
    "LFM2 with biases": (2048, 3, True, False, True),
    "Qwen3-Next": (8192, 4, False, True, False),
    "Granite 4": (3328, 4, False, True, True),
}
# Heads of keys and of values, numbers of a key and of a value, and whether each number of a key has a decay.
DELTAS = {
    "Qwen3-Next": (16, 32, 128, 128, False),
    "odd sizes": (2, 4, 24, 40, False),
    "Kimi Linear": (32, 32, 128, 128, True),
}


def convolve_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `convolve_kernel` on `target`."""
    return distinct(_convolution(target, *each) for each in product(KEPT, CONVOLUTIONS, (False, True)))


def delta_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `delta_kernel` on `target`."""
    return distinct(_delta(target, *each) for each in product(FLOATS, FLOATS, DELTAS, (False, True)))


def gated_norm_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `gated_norm_kernel` on `target`."""
    return distinct(_delta(target, dtype, F32, model, False, kernel=1) for dtype, model in product(FLOATS, DELTAS))


def states_of_a_row(name: str, shape: tuple[int, ...], dtype: torch.dtype, kept: torch.dtype, far: bool) -> StateRows:
    """Return the states of one row. far: the pool has more than 2 GiB."""
    page = 1 << 16
    memory = meta_tensor(1 + FAR_BYTES // page if far else 64, page, dtype=torch.uint8)
    lines, pages = meta_tensor(shape[1], 2, dtype=torch.int32), meta_tensor(1, 64, dtype=torch.int32)
    return StateRows(memory, pages, StateTensor(0, name, shape, dtype, kept), (), lines)


def _convolution(target: Target, dtypes: tuple[torch.dtype, torch.dtype], model: str, far: bool) -> Configuration:
    channels, taps, gated, silu, biased = CONVOLUTIONS[model]
    dtype, kept = dtypes
    bias = meta_tensor(channels, dtype=dtype) if biased else None
    convolution = Convolution(meta_tensor(channels, taps, dtype=dtype), bias, gated, silu)
    x = meta_tensor(1, convolution.inputs, dtype=dtype)
    with recorded(target) as launched:
        convolve(
            launched_on(target), x, states_of_a_row(CONVOLUTION, (1, channels, taps), dtype, kept, far), convolution
        )
    label = f"convolution {DTYPE_NAMES[dtype]}, {DTYPE_NAMES[kept]} {model}{' far' * far}"
    return Configuration(label, launched[0], matrix=False)


def delta_of(model: str, dtype: torch.dtype) -> GatedDelta:
    """Return the rule of a model in DELTAS, without memory."""
    key_heads, heads, key_size, value_size, by_channel = DELTAS[model]
    rates, weight = meta_tensor(heads, dtype=F32), meta_tensor(value_size, dtype=dtype)
    biases = meta_tensor(heads * key_size, dtype=F32) if by_channel else rates
    return GatedDelta(key_heads, key_size, rates, biases, weight, 1e-6, by_channel, by_channel)


def _delta(
    target: Target, dtype: torch.dtype, kept: torch.dtype, model: str, far: bool, kernel: int = 0
) -> Configuration:
    """Return the configuration of a launch of `advance_delta`. kernel: 0, or 1 for the gated norm."""
    delta = delta_of(model, dtype)
    inputs = DeltaInputs(*(meta_tensor(1, width, dtype=dtype) for width in delta.widths))
    with recorded(target) as launched:
        advance_delta(launched_on(target), inputs, states_of_a_row(RECURRENT, delta.state, F32, kept, far), delta)
    assert delta.value_size * kept.itemsize % ALIGNMENT == 0, "sizes of models are multiples"
    what = ("gated delta", "gated norm")[kernel]
    label = f"{what} {DTYPE_NAMES[dtype]}, {DTYPE_NAMES[kept]} {model}{' far' * far}"
    return Configuration(label, launched[kernel], matrix=False)
