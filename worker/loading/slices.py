"""One rank's slice of each weight, by transformers' own plan for the model (`base_model_tp_plan`).

A plan names modules ("layers.*.self_attn.q_proj") and how each is cut. Every rank has the whole of all other modules.
An unknown style or an indivisible shape is rejected by name: a model is served only if the plan covers it.

With expert parallelism each rank has some experts as a whole instead of a part of each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvforge.protocol.errors import InvalidConfiguration, UnsupportedModel
from kvforge.worker.kernels.experts import is_experts

from .description import Family, Mixture
from .families import family_of
from .mixer_slices import MixerPlan, mixer_plans
from .sections import Section, ranges_of

# Styles: the cut, and the exchange around the module. The second names are from earlier transformers.
COLUMNS = "colwise"  # output columns; each rank continues with its own
GATHERED = ("colwise_gather_output", "colwise_rep")  # output columns, gathered afterwards
ROWS = "rowwise"  # input columns, already split between ranks; the results are summed
SPLIT = ("rowwise_split_input", "rowwise_rep")  # the same if every rank has the whole input
VOCABULARY = "embedding_rowwise"  # rows of a table; missing rows are zero, and the results are summed
PACKED_COLUMNS, PACKED_ROWS = "packed_colwise", "packed_rowwise"  # the same for two weights in one
JOINED_HEADS = "joined heads"  # queries, keys and values in one projection; not a style of transformers
EXPERTS = "moe_tp_experts"  # each rank has a slice of all experts; the results are summed
TEXT_PART = "model.language_model."  # the beginning of its names
# Names in files of Granite's experts.
_GRANITE_NAMES = (
    ("experts.gate_up_proj", "input_linear.weight"),
    ("experts.down_proj", "output_linear.weight"),
    ("router.weight", "router.layer.weight"),
)
# What plans leave out beside mixers, in families that are not described: projections, with the last one at the end.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_BESIDE_MIXERS = {
    "FalconH1ForCausalLM": (("self_attn", _ATTENTION), ("feed_forward", ("gate_proj", "up_proj", "down_proj"))),
}
# Modules that every rank has whole, and computes unchanged.
WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj")
LOCAL = "local_params"  # a module with parameters of its own in the plan, if they are cut
QUERIES, KEYS = ("q_proj", "o_proj", "sinks", "q_b_proj", "kv_b_proj"), ("k_proj", "v_proj")


@dataclass(frozen=True)
class TensorSlice:
    """A slice of one tensor.

    Attributes:
        dimension: The dimension that is cut; -1: the whole tensor.
        ranges: Ranges along the dimension, concatenated; none: an empty slice, which stands for zeros.
    """

    dimension: int = -1
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.dimension < 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the slice of a tensor of this shape."""
        if self.is_whole:
            return whole
        width = sum(stop - start for start, stop in self.ranges)
        return (*whole[: self.dimension], width, *whole[self.dimension + 1 :])

    def of(self, tensor: Any) -> torch.Tensor:
        """Return the slice of a tensor, or of a file object that can be sliced; nothing else is read."""
        if self.is_whole:
            found: torch.Tensor = tensor[...]
            return found
        before = (slice(None),) * self.dimension
        parts = [tensor[(*before, slice(start, stop))] for start, stop in self.ranges]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, self.dimension)  # no view of the whole

    def of_rows(self, tensors: list[Any], rows: list[int]) -> torch.Tensor:
        """Return the slice of tensors with these rows that lie one below the other; `dimension` is 0 or -1."""
        assert self.dimension <= 0, "a cut of rows"
        found, first = [], 0
        for tensor, count in zip(tensors, rows, strict=True):
            ranges = ((0, count),) if self.is_whole else [(start - first, stop - first) for start, stop in self.ranges]
            bounds = [(max(start, 0), min(stop, count)) for start, stop in ranges]
            found += [tensor[start:stop] for start, stop in bounds if start < stop]
            first += count
        return torch.cat(found)


@dataclass(frozen=True)
class ExpertRange:
    """The experts of one rank: those from `first` up to, but without, `stop` of `total`."""

    first: int
    stop: int
    total: int


@dataclass(frozen=True)
class Slices:
    """One rank's part of a model.

    Attributes:
        rank: This rank.
        count: Number of ranks.
        styles: Styles by names of modules.
        cuts: Cuts by names of parameters that are not whole.
        whole: Shapes of these parameters in the whole model.
        first_only: Parameters that only rank 0 adds.
        experts: With expert parallelism, this rank's experts by names of modules.
        mixers: How ranks divide mixers, by names of modules.
    """

    rank: int
    count: int
    styles: dict[str, str]
    cuts: dict[str, TensorSlice]
    whole: dict[str, tuple[int, ...]]
    first_only: frozenset[str]
    experts: dict[str, ExpertRange] = field(default_factory=dict)
    mixers: dict[str, MixerPlan] = field(default_factory=dict)

    def cut(self, name: str) -> TensorSlice:
        """Return the cut of a parameter."""
        return self.cuts.get(name, TensorSlice())

    def renamed(self, paths: dict[str, str]) -> Slices:
        """Return the same slices by the names of another model with these modules.

        Args:
            paths: Its paths of modules, by theirs here.
        """

        def full(name: str) -> str:
            """Return the path of a module, or the name of a parameter."""
            owner, _, last = name.rpartition(".")
            return paths[name] if name in paths else f"{paths[owner]}.{last}"

        return replace(
            self,
            styles={full(name): style for name, style in self.styles.items()},
            cuts={full(name): cut for name, cut in self.cuts.items()},
            whole={full(name): shape for name, shape in self.whole.items()},
            first_only=frozenset(full(name) for name in self.first_only),
            experts={full(name): held for name, held in self.experts.items()},
            mixers={full(name): plan for name, plan in self.mixers.items()},
        )


def slices_of(module: Any, rank: int, count: int, expert_parallel: bool = False) -> Slices:
    """Apply transformers' plan to a model without weights.

    Args:
        module: The model.
        rank: This rank.
        count: Number of ranks.
        expert_parallel: Whether ranks divide the experts among them, not each expert.

    Returns:
        The rank's part.

    Raises:
        UnsupportedModel: The plan is missing, unknown, or does not fit the number of ranks.
        InvalidConfiguration: There are no experts, or fewer than ranks, with `expert_parallel`.
    """
    name = type(module).__name__
    plan = plan_of(module)
    experts = _expert_ranges(module, rank, count) if expert_parallel else {}
    mixers = mixer_plans(module, count)
    mixing = {f"{path}.{name}".rstrip(".") for path in mixers for name, _ in module.get_submodule(path).named_modules()}
    styles: dict[str, str] = {}
    cuts: dict[str, TensorSlice] = {}
    first_only: set[str] = set()
    for path, part in module.named_modules():
        style = EXPERTS if path in experts else _style(plan, path)
        if style is None or path in mixing:
            continue
        held = list(part.named_parameters(recurse=False))
        if style in GATHERED and any(len(each) % count for _, each in held):
            continue  # every rank computes the whole, which costs only time
        styles[path] = style
        for which, parameter in held:
            full = f"{path}.{which}"
            cut = _cut(module, path, which, tuple(parameter.shape), style, rank, count)
            if style in (ROWS, *SPLIT) and which == "bias":
                first_only.add(full)
            if not cut.is_whole:
                cuts[full] = cut
    for full, parameter in module.named_parameters():  # experts are parameters with styles of their own
        style = _style(plan, full)
        if full.rpartition(".")[0] in mixing:
            continue
        if (mine := experts.get(full.rpartition(".")[0])) is not None:
            cuts[full] = TensorSlice(0, ((mine.first, mine.stop),))
        elif style is not None:
            cuts[full] = _cut(module, full, "", tuple(parameter.shape), style, rank, count)
    for path, mixer in mixers.items():
        part = module.get_submodule(path)
        cuts |= {f"{path}.{which}": cut for which, cut in _mixer_cuts(part, mixer, rank, count).items()}
        styles |= {f"{path}.{which}": ROWS for which in mixer.sums if hasattr(part, which)}
        first_only |= {f"{path}.{name}" for name, _ in part.named_parameters() if _is_summed_bias(name, mixer)}
    if not cuts:
        raise UnsupportedModel(name, f"transformers has no plan for splitting it: it cannot be served by {count} ranks")
    whole = {full: tuple(module.get_parameter(full).shape) for full in cuts}
    return Slices(rank, count, styles, cuts, whole, frozenset(first_only), experts, mixers)


def _is_summed_bias(name: str, plan: MixerPlan) -> bool:
    path, _, last = name.rpartition(".")
    return last == "bias" and path in plan.sums


def _mixer_cuts(mixer: Any, plan: MixerPlan, rank: int, count: int) -> dict[str, TensorSlice]:
    """Return the cuts of a mixer's parameters, by their names in it."""
    found = {}
    for name, parameter in mixer.named_parameters():
        path, _, last = name.rpartition(".")
        if (total := plan.sums.get(path)) is not None:
            if last != "bias":
                found[name] = TensorSlice(parameter.dim() - 1, (total.part(rank, count),))
        elif sections := plan.rows.get(name) or plan.rows.get(path):
            found[name] = TensorSlice(plan.dimensions.get(name, 0), ranges_of(sections, rank, count))
    return found


def expert_range(total: int, rank: int, count: int) -> ExpertRange:
    """Return a rank's experts. All ranks have equal numbers of them, or differ by one."""
    return ExpertRange(total * rank // count, total * (rank + 1) // count, total)


def _expert_ranges(module: Any, rank: int, count: int) -> dict[str, ExpertRange]:
    """Return the experts of a rank by names of modules.

    Raises:
        InvalidConfiguration: There are no experts, or fewer than ranks.
    """
    family = family_of(module)
    scaled = "experts" if family is not None and family.mixture is not None and family.mixture.scales_input else ""
    found = {}
    for path, part in module.named_modules():
        if not is_experts(part) and not (scaled and path.rpartition(".")[2] == scaled):
            continue
        total = len(part.down_proj)
        if total < count:
            problem = f"true: {path} has {total} experts for {count} ranks; use at most {total} ranks, or false"
            raise InvalidConfiguration("expert_parallel", problem)
        found[path] = expert_range(total, rank, count)
    if not found:
        problem = f"true: {type(module).__name__} has no experts that can be divided; use false"
        raise InvalidConfiguration("expert_parallel", problem)
    return found


def plan_of(module: Any) -> dict[str, str]:
    """Return transformers' plan: names of modules, with * for numbers, and their styles."""
    names = (module.base_model_prefix, "model")  # Llama 4's decoder is not where its prefix says
    prefix = next((f"{name}." for name in names if hasattr(module, name)), "")
    config = module.config.get_text_config(decoder=True)
    plan = {f"{prefix}{path}": style for path, style in (getattr(config, "base_model_tp_plan", None) or {}).items()}
    family = family_of(module)
    if family is not None:
        layer = f"{prefix}layers.*"
        plan |= _missing_cuts(family, family.mixture, layer, plan) | _cuts_of_joined(family, layer)
    for owner, beside in _BESIDE_MIXERS.get(type(module).__name__, ()):
        *first, last = beside
        plan |= {f"{prefix}layers.*.{owner}.{name}": COLUMNS for name in first}
        plan[f"{prefix}layers.*.{owner}.{last}"] = ROWS
    plan |= dict(type(module)._tp_plan or {})
    if family is not None:  # fused layers have the whole table
        plan = {path: style for path, style in plan.items() if style != VOCABULARY}
    return plan


def _missing_cuts(family: Family, mixture: Mixture | None, layer: str, plan: dict[str, str]) -> dict[str, str]:
    """Return the cuts of described parts that transformers' plan leaves whole: it may have none at all."""
    gate_up = PACKED_COLUMNS if family.joins_gate else COLUMNS
    groups: list[tuple[str, tuple[str, ...], str, str]] = []
    added: dict[str, str] = {}
    if family.latent is not None:  # plans differ in which of these they have
        added |= {f"{layer}.self_attn.{name}": COLUMNS for name in family.latent.by_head}
        added[f"{layer}.self_attn.{family.output}"] = ROWS
    elif len(family.projected) == 3:
        groups.append((f"{layer}.{family.attention}", family.projected, COLUMNS, family.output))
    groups.append((f"{layer}.{family.feed}", family.gate_up, gate_up, family.down))
    if mixture is not None and mixture.shared:
        shared = f"{layer}.{mixture.shared}" if mixture.is_shared_outside else f"{layer}.{family.feed}.{mixture.shared}"
        groups.append((shared, family.gate_up, gate_up, family.down))
    for owner, first, style, last in groups:
        if not any(f"{owner}.{name}" in plan for name in first):
            added |= {f"{owner}.{name}": style for name in first} | {f"{owner}.{last}": ROWS}
            added[f"{owner}.sinks"] = COLUMNS
    return added


def _cuts_of_joined(family: Family, layer: str) -> dict[str, str]:
    """Return the cuts of joined projections, which transformers' plans gather: each of the joined is cut alike."""
    found: dict[str, str] = {}
    if len(family.projected) == 1 and family.latent is None:
        attention = f"{layer}.{family.attention}"
        found |= {f"{attention}.{family.projected[0]}": JOINED_HEADS, f"{attention}.{family.output}": ROWS}
    if family.joins_gate and family.mixture is None:
        feed = f"{layer}.{family.feed}"
        found |= {f"{feed}.{family.gate_up[0]}": PACKED_COLUMNS, f"{feed}.{family.down}": ROWS}
    return found


def _style(plan: dict[str, str], path: str) -> str | None:
    return plan.get(path) or plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path))  # w1 is a name


def _cut(module: Any, path: str, which: str, shape: tuple[int, ...], style: str, rank: int, count: int) -> TensorSlice:
    """Return the cut of one parameter.

    Raises:
        UnsupportedModel: The style is unknown or the shape indivisible.
    """
    last = len(shape) - 1
    if style in WHOLE or style in (LOCAL, EXPERTS):
        return TensorSlice()
    if style == COLUMNS or style in GATHERED:
        dimension = 0 if which else max(last - 1, 0)
        return TensorSlice(dimension, (_range(module, path, shape[dimension], rank, count),))
    if style == ROWS or style in SPLIT:
        if which == "bias":
            return TensorSlice()
        return TensorSlice(last, (_range(module, path, shape[last], rank, count),))
    if style == JOINED_HEADS:
        return TensorSlice(0, _ranges_of_heads(module, path, rank, count))
    if style == VOCABULARY:
        return TensorSlice(0, (_range(module, path, shape[0], rank, count),))
    if style in (PACKED_COLUMNS, PACKED_ROWS):
        dimension = last if style == PACKED_ROWS else (0 if which else last - 1)
        half = shape[dimension] // 2
        start, stop = _range(module, path, half, rank, count)
        return TensorSlice(dimension, ((start, stop), (half + start, half + stop)))
    name = type(module).__name__
    raise UnsupportedModel(name, f"transformers' plan splits {path} as {style!r}, which kvforge does not know")


def _range(module: Any, path: str, size: int, rank: int, count: int) -> tuple[int, int]:
    """Return the rank's part of `size`, in whole heads. Ranks that outnumber the K and V heads share them."""
    units, what = _units(module, path, size)
    section = Section(size, units, what, is_shared=what == "K and V heads")
    if problem := section.problem(count):
        raise UnsupportedModel(type(module).__name__, f"{path} has {problem}")
    return section.part(rank, count)


def _ranges_of_heads(module: Any, path: str, rank: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return a rank's rows of a projection to queries, keys and values, in whole heads."""
    attention = module.get_submodule(path.rpartition(".")[0])
    heads = int(module.config.get_text_config(decoder=True).num_attention_heads)
    kv_heads, size = kv_heads_of(module, attention), int(attention.head_dim)
    keys = Section(kv_heads * size, kv_heads, "K and V heads", is_shared=True)
    sections = (Section(heads * size, heads, "attention heads"), keys, keys)
    if problem := next(filter(None, (each.problem(count) for each in sections)), ""):
        raise UnsupportedModel(type(module).__name__, f"{path} has {problem}")
    return ranges_of(sections, rank, count)


def kv_heads_of(module: Any, attention: Any) -> int:
    """Return the K and V heads of an attention module, which may differ from layer to layer."""
    config = module.config.get_text_config(decoder=True)
    if groups := getattr(attention, "num_key_value_groups", None):
        return int(config.num_attention_heads // groups)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _units(module: Any, path: str, size: int) -> tuple[int, str]:
    owner, _, last = path.rpartition(".")
    heads = getattr(module.config.get_text_config(decoder=True), "num_attention_heads", None)
    kv_heads = kv_heads_of(module, module.get_submodule(owner)) if last in KEYS else None
    if last in QUERIES and heads and size % heads == 0:
        return int(heads), "attention heads"
    if last in KEYS and kv_heads and size % kv_heads == 0:
        return int(kv_heads), "K and V heads"
    return size, "rows" if last in ("lm_head", "embed_tokens") else "numbers"


def stored_names(name: str) -> Iterator[str]:
    """Yield the names that files may use for a parameter, the likeliest first."""
    yield name
    yield name.replace(".mlp.", ".block_sparse_moe.")
    yield name.replace(".self_attn.forget_gate.", ".self_attn.")
    yield name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias")
    yield name.replace(".gate.moe_statics.", ".moe_statics.")
    for last, stored in _GRANITE_NAMES:
        if name.endswith(f".block_sparse_moe.{last}"):
            yield name.removesuffix(last) + stored
    if name.startswith(TEXT_PART):  # of a composite model, in files of 2024
        rest = name.removeprefix(TEXT_PART)
        yield f"language_model.model.{rest}"
        yield f"model.{rest}"
    if name.startswith("lm_head."):
        yield f"language_model.{name}"
    if name.startswith("model."):
        yield f"backbone.{name.removeprefix('model.')}"  # Nemotron-H
    yield name.partition(".")[2]  # a base model that was stored alone
