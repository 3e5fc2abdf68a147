"""The step of one token of transformers' mixers, described by their parts: one function for each kind of mixer.

Generated tokens run through these steps (see `kernels.recurrent`), all rows together. Everything else runs through
the mixer itself. A wrong description is caught at load, where a step's logits are compared with those of transformers'
own layers (`verification`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from kvforge.worker.kernels.activations import NAMES, Activation
from kvforge.worker.kernels.channel_delta_step import ChannelDeltaStep
from kvforge.worker.kernels.gated_unit_step import GatedUnitStep
from kvforge.worker.kernels.layer_weights import Norm
from kvforge.worker.kernels.lightning_step import LightningStep
from kvforge.worker.kernels.recurrent import (
    Convolution,
    ConvolutionStep,
    DeltaStep,
    GatedDelta,
    MixerStep,
    StateSpaceStep,
    orders_of,
)
from kvforge.worker.kernels.selective import SelectiveSpace
from kvforge.worker.kernels.selective_step import SelectiveStep
from kvforge.worker.kernels.state_space import StateSpace

SHARED_BY = "kvforge_ranks"  # of a norm over numbers of several ranks: the ranks


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
    convolution, delta = _convolution(mixer.conv1d, has_silu=True), _delta(mixer)
    if hasattr(mixer, joined[0]):
        return DeltaStep(convolution, delta, joined, orders_of(delta, convolution.weight.device))
    return DeltaStep(convolution, delta, apart)


def _kimi_delta(mixer: Any) -> MixerStep | None:
    if mixer.activation != "silu":
        return None
    forget = mixer.forget_gate
    delta = GatedDelta(
        mixer.num_heads,
        mixer.head_dim,
        -forget.A_log.detach().flatten().float().exp(),
        forget.dt_bias.detach().float(),
        mixer.o_norm.weight.detach(),
        mixer.o_norm.variance_epsilon,
        is_by_channel=True,
        has_sigmoid=True,
    )
    return ChannelDeltaStep(
        _convolution(mixer.conv1d, has_silu=True),
        delta,
        ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
        forget.f_b_proj.weight.detach(),
        mixer.g_b_proj.weight.detach(),
    )


def _mamba_2(mixer: Any) -> MixerStep | None:
    """As transformers' step of one token, which leaves time steps without limits; those of prompts have some."""
    if mixer.activation != "silu" or mixer.norm.group_size * mixer.n_groups != mixer.intermediate_size:
        return None  # another activation, or a norm that ranks share
    return _space_step(mixer, mixer.norm.weight.detach(), mixer.norm.variance_epsilon)


def _space_step(mixer: Any, weight: torch.Tensor | None, epsilon: float) -> StateSpaceStep:
    """Describe Mamba 2. weight: of the norm; None: there is none."""
    convolution = _convolution(mixer.conv1d, has_silu=True)
    space = StateSpace(
        mixer.n_groups,
        mixer.ssm_state_size,
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach().float(),
        mixer.D.detach().float(),
        convolution.weight.new_ones(mixer.intermediate_size) if weight is None else weight,
        epsilon,
        normalises=weight is not None,
        limits=tuple(mixer.time_step_limit),
    )
    return StateSpaceStep(convolution, space, "in_proj")


def _falcon_h1(mixer: Any) -> MixerStep | None:
    """Mamba 2 with factors of its projections, and a norm in some models."""
    norm, has_norm = mixer.norm, mixer.mamba_rms_norm
    if mixer.activation != "silu" or (has_norm and (norm.norm_before_gate or "forward" in vars(norm))):
        return None  # another activation, another order, or a norm that ranks share
    step = _space_step(mixer, norm.weight.detach() if has_norm else None, mixer.layer_norm_epsilon)
    factors = mixer.mup_vector.detach().flatten().to(mixer.in_proj.weight.dtype)
    return step if bool((factors == 1).all()) else replace(step, factors=factors)


def _mamba_1(mixer: Any) -> MixerStep | None:
    if mixer.activation != "silu" or mixer.x_proj._forward_hooks:
        return None  # another activation, or ranks that add up this projection
    convolution = _convolution(mixer.conv1d, has_silu=True)
    selective = SelectiveSpace(
        -mixer.A_log.detach().float().exp(),
        mixer.dt_proj.bias.detach().float(),
        mixer.D.detach().float(),
    )
    shared, time_steps = mixer.x_proj.weight.detach(), mixer.dt_proj.weight.detach()
    return SelectiveStep(convolution, selective, "in_proj", shared, time_steps, _norms_of_mamba_1(mixer))


def _norms_of_mamba_1(mixer: Any) -> tuple[Norm, Norm, Norm] | None:
    """Describe the norms of Jamba, with weights, and of Falcon-Mamba, without."""
    if not hasattr(mixer, "dt_layernorm"):
        return None
    made = []
    for name, size in (("dt", mixer.time_step_rank), ("b", mixer.ssm_state_size), ("c", mixer.ssm_state_size)):
        norm, like = getattr(mixer, f"{name}_layernorm"), mixer.x_proj.weight
        has_weight = "weight" in norm._parameters
        weight = norm.weight.detach() if has_weight else like.new_ones(size)
        made.append(Norm(weight, norm.variance_epsilon if has_weight else norm.eps))
    return made[0], made[1], made[2]


def _lightning(mixer: Any) -> MixerStep | None:
    activation = _activation(mixer.act_fn)
    if activation is None:
        return None  # another one
    norm = Norm(mixer.norm.weight.detach(), mixer.norm.variance_epsilon)
    step = LightningStep.of(-_slopes(mixer), norm, activation, ("qkv_proj", "output_gate"))
    return replace(step, ranks=vars(mixer.norm).get(SHARED_BY))


def _activation(part: Any) -> Activation | None:
    return next((Activation(kind) for name, kind in NAMES.items() if type(part) is type(ACT2FN[name])), None)


def _slopes(mixer: Any) -> torch.Tensor:
    """Return the slopes of lightning attention, [heads] float32.

    The model has them in its own dtype. If they are the published ones, rounded, their float32 numbers are meant: in
    16 bits, decays of many tokens are wrong.
    """
    kept = mixer.slope_rate.detach().flatten()
    if kept.is_meta:
        return kept.float()
    meant = mixer.get_slope_rate().flatten().to(kept.device, torch.float32)
    return meant if torch.allclose(meant, kept.float(), rtol=torch.finfo(kept.dtype).eps, atol=0.0) else kept.float()


def _gated_unit(mixer: Any) -> MixerStep | None:
    unit, activation = mixer.rg_lru, _activation(mixer.act_fn)
    if activation is None:
        return None  # another one
    rates = -8.0 * softplus(unit.recurrent_param.detach().float())
    zeros = torch.zeros_like(rates)
    weights, biases = (
        (unit.input_gate_weight, unit.recurrent_gate_weight),
        (unit.input_gate_bias, unit.recurrent_gate_bias),
    )
    return GatedUnitStep(
        _convolution(mixer.conv_1d),
        SelectiveSpace(rates[:, None].contiguous(), zeros, zeros, is_wide=True),
        torch.cat([each.detach() for each in weights], dim=2),
        torch.cat([each.detach() for each in biases], dim=1),
        activation,
        ("linear_x", "linear_y"),
    )


# By the folder in transformers.models and the class of the mixer.
STEPS: dict[str, Callable[[Any], MixerStep | None]] = {
    "bamba.BambaMixer": _mamba_2,
    "falcon_h1.FalconH1Mixer": _falcon_h1,
    "falcon_mamba.FalconMambaMixer": _mamba_1,
    "granitemoehybrid.GraniteMoeHybridMambaLayer": _mamba_2,
    "jamba.JambaMambaMixer": _mamba_1,
    "kimi_linear.KimiLinearDeltaAttention": _kimi_delta,
    "lfm2.Lfm2ShortConv": _short_convolution,
    "lfm2_moe.Lfm2MoeShortConv": _short_convolution,
    "mamba.MambaMixer": _mamba_1,
    "mamba2.Mamba2Mixer": _mamba_2,
    "minimax.MiniMaxLightningAttention": _lightning,
    "nemotron_h.NemotronHMamba2Mixer": _mamba_2,
    "qwen3_5.Qwen3_5GatedDeltaNet": _gated_delta,
    "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet": _gated_delta,
    "qwen3_next.Qwen3NextGatedDeltaNet": _gated_delta,
    "recurrent_gemma.RecurrentGemmaRecurrentBlock": _gated_unit,
}


def step_of(mixer: Any) -> MixerStep | None:
    """Return the step of a mixer; None: it is not described."""
    kind = type(mixer)
    parts = kind.__module__.split(".")
    describe = STEPS.get(f"{parts[2]}.{kind.__qualname__}") if parts[:2] == ["transformers", "models"] else None
    return None if describe is None else describe(mixer)
