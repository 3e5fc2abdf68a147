"""The step of one token of transformers' mixers, described by their parts: one function for each kind of mixer.

Generated tokens run through these steps (see `kernels.recurrent`), all rows together. Everything else runs through
the mixer itself. A wrong description is caught at load, where a step's logits are compared with those of transformers'
own layers (`verification`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvforge.worker.kernels.recurrent import (
    Convolution,
    ConvolutionStep,
    DeltaStep,
    GatedDelta,
    MixerStep,
    StateSpaceStep,
)
from kvforge.worker.kernels.state_space import StateSpace


def _convolution(part: Any, *, is_gated: bool = False, has_silu: bool = False) -> Convolution:
    """Describe a Conv1d with a group for each channel."""
    bias = None if part.bias is None else part.bias.detach()
    return Convolution(part.weight.detach().squeeze(1), bias, is_gated, has_silu)


def _short_convolution(mixer: Any) -> MixerStep | None:
    return ConvolutionStep(_convolution(mixer.conv, is_gated=True), "in_proj")


def _delta(mixer: Any) -> GatedDelta:
    return GatedDelta(
        mixer.num_k_heads,
        mixer.head_k_dim,
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach().float(),
        mixer.norm.weight.detach(),
        mixer.norm.variance_epsilon,
    )


def _gated_delta(mixer: Any) -> MixerStep | None:
    if mixer.activation != "silu":
        return None
    joined = ("in_proj_qkvz", "in_proj_ba")
    apart = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    names = joined if hasattr(mixer, joined[0]) else apart
    return DeltaStep(_convolution(mixer.conv1d, has_silu=True), _delta(mixer), names)


def _mamba_2(mixer: Any) -> MixerStep | None:
    """As transformers' step of one token, which leaves time steps without limits."""
    if mixer.activation != "silu" or mixer.norm.group_size * mixer.n_groups != mixer.intermediate_size:
        return None  # another activation, or a group whose norm several ranks share
    space = StateSpace(
        mixer.n_groups,
        mixer.ssm_state_size,
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach().float(),
        mixer.D.detach().float(),
        mixer.norm.weight.detach(),
        mixer.norm.variance_epsilon,
    )
    return StateSpaceStep(_convolution(mixer.conv1d, has_silu=True), space, "in_proj")


# By the folder in transformers.models and the class of the mixer.
STEPS: dict[str, Callable[[Any], MixerStep | None]] = {
    "bamba.BambaMixer": _mamba_2,
    "granitemoehybrid.GraniteMoeHybridMambaLayer": _mamba_2,
    "lfm2.Lfm2ShortConv": _short_convolution,
    "lfm2_moe.Lfm2MoeShortConv": _short_convolution,
    "mamba2.Mamba2Mixer": _mamba_2,
    "nemotron_h.NemotronHMamba2Mixer": _mamba_2,
    "qwen3_5.Qwen3_5GatedDeltaNet": _gated_delta,
    "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet": _gated_delta,
    "qwen3_next.Qwen3NextGatedDeltaNet": _gated_delta,
}


def step_of(mixer: Any) -> MixerStep | None:
    """Return the step of a mixer; None: it is not described."""
    kind = type(mixer)
    parts = kind.__module__.split(".")
    describe = STEPS.get(f"{parts[2]}.{kind.__qualname__}") if parts[:2] == ["transformers", "models"] else None
    return None if describe is None else describe(mixer)
