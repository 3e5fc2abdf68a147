"""The step of one token of transformers' mixers, described by their parts: one function for each kind of mixer.

In a described decoder, generated tokens run through these steps (see `kernels.recurrent`), all rows together.
Everything else runs through the mixer itself. A wrong description is caught at load, where a step's logits are compared
with those of transformers' own layers (`verification`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvforge.worker.kernels.recurrent import Convolution, ConvolutionStep, MixerStep


def _convolution(part: Any, *, is_gated: bool = False, has_silu: bool = False) -> Convolution:
    """Describe a Conv1d with a group for each channel."""
    bias = None if part.bias is None else part.bias.detach()
    return Convolution(part.weight.detach().squeeze(1), bias, is_gated, has_silu)


def _short_convolution(mixer: Any) -> MixerStep:
    return ConvolutionStep(_convolution(mixer.conv, is_gated=True), "in_proj")


# By the folder in transformers.models and the class of the mixer.
STEPS: dict[str, Callable[[Any], MixerStep]] = {
    "lfm2.Lfm2ShortConv": _short_convolution,
    "lfm2_moe.Lfm2MoeShortConv": _short_convolution,
}


def step_of(mixer: Any) -> MixerStep | None:
    """Return the step of a mixer; None: it is not described."""
    kind = type(mixer)
    parts = kind.__module__.split(".")
    describe = STEPS.get(f"{parts[2]}.{kind.__qualname__}") if parts[:2] == ["transformers", "models"] else None
    return None if describe is None else describe(mixer)
