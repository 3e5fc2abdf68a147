"""One rank's part of each mixer (see `mixers`): its heads or channels, and their numbers of the state.

transformers' plans leave mixers whole or gather what they project. Here a rank computes some heads from the projections
of the input to the last projection, whose results are summed over the ranks, as those of attention are. A projection
to several kinds of numbers is cut in each of them. Some Mamba layers have fewer groups of B and C than there are ranks:
ranks then share a group, and exchange the mean squares of its norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.ranks import Ranks

from .mixer_steps import SHARED_BY
from .mixers import mixers_of
from .sections import Section, ranges_of

Sections = tuple[Section, ...]


@dataclass(frozen=True)
class MixerPlan:
    """How ranks divide a mixer. Names are those of modules or parameters in it.

    Attributes:
        rows: The sections of the first dimension of what is cut there.
        dimensions: The dimension instead of the first, by names in `rows`.
        sums: The section of the last dimension of projections with results that are summed over the ranks.
        sizes: The sections that attributes count.
        buffers: A dimension of buffers, and its sections.
        methods: Methods that return numbers of the whole mixer, and the sections of their first dimension.
        norm: The norm over the numbers of each group, and the groups.
    """

    rows: dict[str, Sections]
    sums: dict[str, Section]
    sizes: dict[str, Sections] = field(default_factory=dict)
    buffers: dict[str, tuple[int, Sections]] = field(default_factory=dict)
    methods: dict[str, Sections] = field(default_factory=dict)
    norm: tuple[str, Section] | None = None
    dimensions: dict[str, int] = field(default_factory=dict)

    def problem(self, count: int) -> str:
        """Return the first section that `count` ranks cannot divide; "" if they can divide all."""
        sections = [*self.sums.values(), *(each for found in self.rows.values() for each in found)]
        return next(filter(None, (each.problem(count) for each in sections)), "")


def _short_convolution(mixer: Any) -> MixerPlan:
    channels = Section(mixer.conv.out_channels, mixer.conv.out_channels, "channels")
    return MixerPlan({"in_proj": (channels,) * 3, "conv": (channels,)}, {"out_proj": channels})


def _delta_rule(mixer: Any) -> MixerPlan:
    """Qwen3-Next joins the projections by head, Qwen3.5 by kind."""
    keys = Section(mixer.key_dim, mixer.num_k_heads, "heads of K")
    values = Section(mixer.value_dim, mixer.num_v_heads, "heads of V")
    heads = Section(mixer.num_v_heads, mixer.num_v_heads, "heads of V")
    by_head = {
        "in_proj_qkvz": (Section(2 * (mixer.key_dim + mixer.value_dim), mixer.num_k_heads, "heads of K"),),
        "in_proj_ba": (Section(2 * mixer.num_v_heads, mixer.num_k_heads, "heads of K"),),
    }
    by_kind = {"in_proj_qkv": (keys, keys, values), "in_proj_z": (values,), "conv1d": (keys, keys, values)}
    of_heads = dict.fromkeys(("in_proj_b", "in_proj_a", "dt_bias", "A_log"), (heads,))
    return MixerPlan(
        rows=by_head | by_kind | of_heads,
        sums={"out_proj": values},
        sizes={
            "num_k_heads": (Section(mixer.num_k_heads, mixer.num_k_heads, "heads of K"),),
            "num_v_heads": (heads,),
            "key_dim": (keys,),
            "value_dim": (values,),
            "conv_dim": (keys, keys, values),
        },
    )


def _kimi_delta(mixer: Any) -> MixerPlan:
    numbers = Section(mixer.qkv_dim, mixer.num_heads, "heads")
    heads: Sections = (Section(mixer.num_heads, mixer.num_heads, "heads"),)
    by_number = ("q_proj", "k_proj", "v_proj", "g_b_proj", "forget_gate.f_b_proj", "forget_gate.dt_bias")
    return MixerPlan(
        rows={
            **dict.fromkeys(by_number, (numbers,)),
            **dict.fromkeys(("b_proj", "forget_gate.A_log"), heads),
            "conv1d": (numbers,) * 3,
        },
        sums={"o_proj": numbers},
        sizes={
            **dict.fromkeys(("num_heads", "forget_gate.num_heads"), heads),
            **dict.fromkeys(("qkv_dim", "forget_gate.qkv_dim"), (numbers,)),
            "conv_dim": (numbers,) * 3,
        },
        dimensions={"forget_gate.A_log": 2},
    )


def _mamba_2(mixer: Any) -> MixerPlan:
    inner = Section(mixer.intermediate_size, mixer.num_heads, "heads")
    heads = Section(mixer.num_heads, mixer.num_heads, "heads")
    groups = Section(mixer.n_groups, mixer.n_groups, "groups", is_shared=True)
    of_groups = Section(mixer.n_groups * mixer.ssm_state_size, mixer.n_groups, "groups", is_shared=True)
    projected, convolved = (inner, inner, of_groups, of_groups, heads), (inner, of_groups, of_groups)
    return MixerPlan(
        rows={
            "in_proj": projected,
            "conv1d": convolved,
            "norm": (inner,),
            **dict.fromkeys(("dt_bias", "A_log", "D"), (heads,)),
        },
        sums={"out_proj": inner},
        sizes={
            "intermediate_size": (inner,),
            "num_heads": (heads,),
            "n_groups": (groups,),
            "norm.n_groups": (groups,),
            "groups_time_state_size": (of_groups,),
            "conv_dim": convolved,
        },
        buffers={"mup_vector": (-1, projected)},
        norm=("norm", groups),
    )


def _mamba_1(mixer: Any) -> MixerPlan:
    channels = Section(mixer.intermediate_size, mixer.intermediate_size, "channels")
    one = dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), (channels,))
    return MixerPlan(
        rows={"in_proj": (channels, channels), **one},
        sums={"x_proj": channels, "out_proj": channels},
        sizes={"intermediate_size": (channels,)},
    )


def _gated_unit(mixer: Any) -> MixerPlan:
    count = mixer.rg_lru.num_attention_heads
    whole = Section(mixer.lru_width, count, "heads")
    channels: Sections = (whole,)
    heads: Sections = (Section(count, count, "heads"),)
    gates = [f"rg_lru.{kind}_gate_{part}" for kind in ("input", "recurrent") for part in ("weight", "bias")]
    of_channels = ("linear_x", "linear_y", "conv_1d", "rg_lru.recurrent_param")
    return MixerPlan(
        rows=dict.fromkeys(of_channels, channels) | dict.fromkeys(gates, heads),
        sums={"linear_out": whole},
        sizes={"lru_width": channels, "rg_lru.num_attention_heads": heads},
    )


def _lightning(mixer: Any) -> MixerPlan:
    count = mixer.num_attention_heads
    numbers = Section(count * mixer.head_dim, count, "heads")
    heads: Sections = (Section(count, count, "heads"),)
    return MixerPlan(
        rows={
            "qkv_proj": (Section(3 * count * mixer.head_dim, count, "heads"),),
            "output_gate": (numbers,),
            "norm": (numbers,),
        },
        sums={"out_proj": numbers},
        sizes={"num_attention_heads": heads},
        buffers={
            **dict.fromkeys(("slope_rate", "query_decay", "key_decay"), (0, heads)),
            "diagonal_decay": (1, heads),
        },
        methods={"get_slope_rate": heads},
        norm=("norm", Section(1, 1, "group", is_shared=True)),
    )


# By the folder in transformers.models and the class of the mixer.
PLANS: dict[str, Callable[[Any], MixerPlan]] = {
    "bamba.BambaMixer": _mamba_2,
    "falcon_h1.FalconH1Mixer": _mamba_2,
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
    "qwen3_5.Qwen3_5GatedDeltaNet": _delta_rule,
    "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet": _delta_rule,
    "qwen3_next.Qwen3NextGatedDeltaNet": _delta_rule,
    "recurrent_gemma.RecurrentGemmaRecurrentBlock": _gated_unit,
}


def mixer_plans(module: Any, count: int) -> dict[str, MixerPlan]:
    """Return how ranks divide the mixers of a model without weights, by their names.

    Args:
        module: The transformers model.
        count: Number of ranks.

    Raises:
        UnsupportedModel: A mixer is of a class without a plan, or `count` ranks cannot divide its heads.
    """
    kept, found = {id(part) for part in mixers_of(module)}, {}
    for path, part in module.named_modules():
        if id(part) not in kept:
            continue
        kind = type(part)
        plan = PLANS.get(f"{kind.__module__.split('.')[2]}.{kind.__qualname__}")
        if plan is None:
            problem = f"ranks = {count}: its {kind.__name__} keeps a recurrent state, which several ranks cannot divide"
            raise UnsupportedModel(type(module).__name__, f"{problem}; leave out tensor_parallel and ranks")
        found[path] = plan(part)
        if problem := found[path].problem(count):
            raise UnsupportedModel(type(module).__name__, f"{path} has {problem}")
    return found


def fit_mixer(mixer: Any, plan: MixerPlan, rank: int, count: int) -> None:
    """Adjust the sizes that a mixer and its parts have to those of a rank's slices."""
    for name, sections in plan.methods.items():
        setattr(mixer, name, partial(_whole, _parts(getattr(mixer, name)(), 0, ranges_of(sections, rank, count))))
    for name, sections in plan.sizes.items():
        path, _, last = name.rpartition(".")
        owner = mixer.get_submodule(path)
        if hasattr(owner, last):
            setattr(owner, last, sum(end - first for first, end in ranges_of(sections, rank, count)))
    for name, (dimension, sections) in plan.buffers.items():
        if (whole := getattr(mixer, name, None)) is not None:
            setattr(mixer, name, _parts(whole, dimension, ranges_of(sections, rank, count)))
    for part in mixer.modules():
        if isinstance(part, torch.nn.Linear):
            part.out_features, part.in_features = part.weight.shape
        elif isinstance(part, torch.nn.Conv1d):  # of one channel each
            part.in_channels = part.out_channels = part.groups = len(part.weight)


def _parts(whole: torch.Tensor, dimension: int, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return torch.cat([whole.narrow(dimension, first, end - first) for first, end in ranges], dimension)


def _whole(numbers: torch.Tensor) -> torch.Tensor:
    return numbers


def join_norm(mixer: Any, plan: MixerPlan, ranks: Ranks) -> None:
    """Let the norm of groups that several ranks share exchange its mean squares."""
    if plan.norm is None:
        return
    name, groups = plan.norm
    sharing, norm = groups.sharing(ranks.rank, ranks.count), getattr(mixer, name)
    if len(sharing) == 1 or not hasattr(norm, "weight"):
        return
    norm.__dict__[SHARED_BY] = ranks
    rounds_last = hasattr(norm, "norm_before_gate")  # Falcon-H1
    gates_last = bool(getattr(norm, "norm_before_gate", False))

    def forward(hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        dtype, wide = hidden.dtype, hidden.float()
        factor = None if gate is None else torch.nn.functional.silu(gate.float())
        if factor is not None and not gates_last:
            wide = wide * factor
        means = ranks.gather(wide.pow(2).mean(-1, keepdim=True))
        total = means[sharing.start]
        for place in sharing[1:]:
            total = total + means[place]
        wide = wide * torch.rsqrt(total / len(sharing) + norm.variance_epsilon)
        found: torch.Tensor = norm.weight * (wide if rounds_last else wide.to(dtype))
        return (found if factor is None or not gates_last else found * factor).to(dtype)

    norm.forward = forward
