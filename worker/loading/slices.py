"""Which part of each weight is one rank's, by transformers' own plan for the model (`base_model_tp_plan`).

A plan names modules ("layers.*.self_attn.q_proj") and how each is cut. What it does not name every rank has whole. A
style that is not known here, or a shape that cannot be divided, is refused by name: nothing is served that no plan
covers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.protocol.errors import UnsupportedModel

# What is cut, and what is exchanged around the module. Names in brackets are those of earlier transformers.
COLUMNS = "colwise"  # output numbers; each rank goes on with its own
GATHERED = ("colwise_gather_output", "colwise_rep")  # output numbers, gathered behind it
ROWS = "rowwise"  # input numbers, of which each rank has its own; the sums are added up
SPLIT = ("rowwise_split_input", "rowwise_rep")  # the same where every rank has all of the input
VOCABULARY = "embedding_rowwise"  # rows of a table; what is not there is zero, and added up
PACKED_COLUMNS, PACKED_ROWS = "packed_colwise", "packed_rowwise"  # as columns, rows: of two weights in one
EXPERTS = "moe_tp_experts"  # of the module that holds them: what each rank's slices of all experts give is added up
# What every rank has whole, and computes as it is.
WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel")
QUERIES, KEYS = ("q_proj", "o_proj"), ("k_proj", "v_proj")


@dataclass(frozen=True)
class Cut:
    """Of one tensor: these ranges along one dimension, one behind the other. dimension: -1: all of it; ranges: none:
    nothing of it is this rank's, which has zeros."""

    dimension: int = -1
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.dimension < 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """What is left of a tensor of a shape."""
        if self.is_whole:
            return whole
        width = sum(stop - start for start, stop in self.ranges)
        return (*whole[: self.dimension], width, *whole[self.dimension + 1 :])

    def of(self, tensor: Any) -> torch.Tensor:
        """The part of a tensor, or of what can be read in slices as one: no more is read than that."""
        if self.is_whole:
            found: torch.Tensor = tensor[...]
            return found
        before = (slice(None),) * self.dimension
        parts = [tensor[(*before, slice(start, stop))] for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)


@dataclass(frozen=True)
class Slices:
    """One rank's part of a model. styles: by the names of modules. cuts: by the names of parameters that are not whole;
    whole: their shapes in the model. first_only: of parameters that rank 0 alone adds."""

    rank: int
    count: int
    styles: dict[str, str]
    cuts: dict[str, Cut]
    whole: dict[str, tuple[int, ...]]
    first_only: frozenset[str]

    def cut(self, name: str) -> Cut:
        return self.cuts.get(name, Cut())


def slices_of(module: Any, rank: int, count: int) -> Slices:
    """What transformers' plan makes of a model without weights. Errors: UnsupportedModel."""
    name = type(module).__name__
    plan = plan_of(module)
    styles: dict[str, str] = {}
    cuts: dict[str, Cut] = {}
    first_only: set[str] = set()
    for path, part in module.named_modules():
        style = _style(plan, path)
        if style is None:
            continue
        held = list(part.named_parameters(recurse=False))
        if style in GATHERED and any(len(each) % count for _, each in held):
            continue  # every rank computes all of it: nothing is lost but time
        styles[path] = style
        for which, parameter in held:
            full = f"{path}.{which}"
            cut = _cut(module, path, which, tuple(parameter.shape), style, rank, count)
            if style in (ROWS, *SPLIT) and which == "bias":
                first_only.add(full)
            if not cut.is_whole:
                cuts[full] = cut
    for full, parameter in module.named_parameters():  # experts are parameters, and their styles stand beside them
        style = _style(plan, full)
        if style is not None:
            cuts[full] = _cut(module, full, "", tuple(parameter.shape), style, rank, count)
    if not cuts:
        raise UnsupportedModel(name, f"transformers has no plan for splitting it: it cannot be served by {count} ranks")
    whole = {full: tuple(module.get_parameter(full).shape) for full in cuts}
    return Slices(rank, count, styles, cuts, whole, frozenset(first_only))


def plan_of(module: Any) -> dict[str, str]:
    """Names of modules, with * for numbers, and how they are cut."""
    prefix = f"{module.base_model_prefix}." if hasattr(module, module.base_model_prefix) else ""
    config = module.config.get_text_config(decoder=True)
    plan = {f"{prefix}{path}": style for path, style in (getattr(config, "base_model_tp_plan", None) or {}).items()}
    return plan | dict(type(module)._tp_plan or {})


def _style(plan: dict[str, str], path: str) -> str | None:
    return plan.get(path) or plan.get(re.sub(r"\d+", "*", path))


def _cut(module: Any, path: str, which: str, shape: tuple[int, ...], style: str, rank: int, count: int) -> Cut:
    """Of one parameter. Errors: UnsupportedModel."""
    last = len(shape) - 1
    if style in WHOLE or style == EXPERTS:
        return Cut()
    if style == COLUMNS or style in GATHERED:
        dimension = 0 if which else last - 1
        return Cut(dimension, (_range(module, path, shape[dimension], rank, count),))
    if style == ROWS or style in SPLIT:
        if which == "bias":
            return Cut()
        return Cut(last, (_range(module, path, shape[last], rank, count),))
    if style == VOCABULARY:
        return Cut(0, (_range(module, path, shape[0], rank, count),))
    if style in (PACKED_COLUMNS, PACKED_ROWS):
        dimension = last if style == PACKED_ROWS else (0 if which else last - 1)
        half = shape[dimension] // 2
        start, stop = _range(module, path, half, rank, count)
        return Cut(dimension, ((start, stop), (half + start, half + stop)))
    name = type(module).__name__
    raise UnsupportedModel(name, f"transformers' plan splits {path} as {style!r}, which kvforge does not know")


def _range(module: Any, path: str, size: int, rank: int, count: int) -> tuple[int, int]:
    """The rank's part of `size`, in whole heads; ranks that outnumber those of K and V share them."""
    units, what = _units(module, path, size)
    if units % count == 0:
        width = size // count
        return rank * width, (rank + 1) * width
    if what == "K and V heads" and count % units == 0:
        width, mine = size // units, rank * units // count
        return mine * width, (mine + 1) * width
    good = [str(each) for each in range(2, units + 1) if units % each == 0][:6]
    problem = f"{path} has {units} {what}, which {count} ranks cannot divide: {', '.join(good) or 'no number'} could"
    raise UnsupportedModel(type(module).__name__, problem)


def _units(module: Any, path: str, size: int) -> tuple[int, str]:
    config, last = module.config.get_text_config(decoder=True), path.rpartition(".")[2]
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if last in QUERIES and heads and size % heads == 0:
        return int(heads), "attention heads"
    if last in KEYS and kv_heads and size % kv_heads == 0:
        return int(kv_heads), "K and V heads"
    return size, "rows" if last in ("lm_head", "embed_tokens") else "numbers"


def stored_names(name: str) -> Iterator[str]:
    """Under which names files may have a parameter, the likeliest first."""
    yield name
    yield name.replace(".mlp.", ".block_sparse_moe.")
    yield name.partition(".")[2]  # of a base model that was stored by itself
