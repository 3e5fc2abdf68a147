"""Tests whether a row of a transformers model has the same bits in every batch, by running the model's own layers.

One layer of each kind runs (all of them if that fails), between the embedding and the head, for many tokens at once and
for a few. Attention is skipped: its inputs are compared, and the query replaces its output. The attention kernels are
steady and have tests of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from kvforge.worker.kernels.steady import same_bits

from .mixers import MIXING, mixed_of, mixers_of
from .model import ATTENTION_NAME, BINDING, LoadedModel, use_attention
from .single_tokens import SingleTokens

TRIAL_NAME = "kvforge_trial"
# A single token out of many, then a few, then counts at which products and loops take other paths.
LADDER = (1, 2, 3, 5, 7, 16, 17, 33, 50, 65, 129)
MORE = (192, 256, 300, 512)  # on a GPU
SINGLES = 24
OFFSET = 37  # rows before the compared ones: the index of a row must not matter either
PLACES_MAX = 1 << 16
HEAD_ROWS = 200  # most tokens with logits, which take the most memory if the vocabulary is large

_noted: list[tuple[str, torch.Tensor]] = []  # recorded in the pass in progress: description, [tokens, ...]


def _note(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Replaces attention in transformers: record the inputs, return the query in the size of the value."""
    layer = module.__dict__[BINDING].index
    for name, given in (("the query", query), ("the key", key), ("the value", value)):
        _noted.append((f"{name} of layer {layer}", given[0].transpose(0, 1).clone()))
    missing = value.shape[3] - query.shape[3]
    return torch.nn.functional.pad(query, (0, missing)).transpose(1, 2), None  # a negative number removes


transformers.AttentionInterface.register(TRIAL_NAME, _note)


def unsteady_rows(model: LoadedModel) -> str:
    """Return the first result of a row that depends on other rows, for people; "" if none was found.

    All ranks make the same passes, whatever they find.
    """
    rows = max(_ladder(model)) + OFFSET
    generator = torch.Generator().manual_seed(rows)
    places = torch.randint(min(model.info.context_tokens_max, PLACES_MAX), (rows,), generator=generator)
    tokens = torch.randint(model.vocab_size, (rows,), generator=generator)
    device = model.device.torch_device
    problem = ""
    with _attention_left_out(model):
        # A layer may need results of a layer that was left out, as Gemma 4's do: then all of them run.
        for layers in (_few_layers(model.module), contextlib.nullcontext()):
            with layers:
                try:
                    return _difference(model, tokens.to(device), places.to(device))
                except Exception as error:  # noqa: BLE001 - foreign model code
                    problem = f"a trial of the layers failed: {type(error).__name__}: {error}"
    return problem


def unsteady_mixers(model: LoadedModel) -> str:
    """Return the first result of a layer with a recurrent state that depends on other rows; "" if none was found.

    Each token is a row of its own, behind a state of zeros. One layer of each kind is tried.
    """
    kinds = {_kind(part): part for part in reversed(mixers_of(model.module))}
    rows, device, context = max(_ladder(model)) + OFFSET, model.device.torch_device, model.context
    generator = torch.Generator(device).manual_seed(rows)
    shape = (1, rows, int(model.module.config.hidden_size))
    hidden = torch.empty(shape, dtype=model.dtype, device=device).normal_(generator=generator)
    context.single_tokens = SingleTokens(alone=model.ranks is None)
    try:
        for part in kinds.values():
            whole = mixed_of(part(hidden))
            for count in _ladder(model):
                for first in range(SINGLES) if count == 1 else (0, OFFSET):
                    few = slice(first, first + count)
                    if not same_bits(mixed_of(part(hidden[:, few])), whole[:, few]):
                        return f"{type(part).__name__} of {count} tokens has other bits than among {rows}"
    finally:
        context.single_tokens = None
    return ""


def _difference(model: LoadedModel, tokens: torch.Tensor, places: torch.Tensor) -> str:
    """Return the first difference between many tokens at once and a few."""
    problem, whole = "", _run(model, tokens, places)
    for count in _ladder(model):
        for first in range(SINGLES) if count == 1 else (0, OFFSET):
            few = slice(first, first + count)
            got = _run(model, tokens[few], places[few])
            for (name, part), (_, of) in zip(got, whole, strict=True):
                wanted = of[few]
                both = min(len(part), len(wanted))
                if not problem and not same_bits(part[:both], wanted[:both]):
                    problem = f"{name} of {count} tokens has other bits than among {len(tokens)}"
            if problem and model.ranks is None:
                return problem
    return problem


def _ladder(model: LoadedModel) -> tuple[int, ...]:
    return LADDER if model.device.computes_on_cores else LADDER + MORE


def _run(model: LoadedModel, tokens: torch.Tensor, places: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the inputs of each layer's attention, and the logits."""
    _noted.clear()
    keywords: dict[str, Any] = {}
    if model.accepts_logits_to_keep:
        keywords["logits_to_keep"] = torch.arange(min(len(tokens), HEAD_ROWS), device=tokens.device)
    output = model.module(
        input_ids=tokens[None], position_ids=places[None], use_cache=False, return_dict=True, **keywords
    )
    found = [*_noted, ("the logits", output.logits[0].float())]
    _noted.clear()
    return found


@contextlib.contextmanager
def _attention_left_out(model: LoadedModel) -> Iterator[None]:
    use_attention(model.module, TRIAL_NAME)
    model.context.single_tokens = SingleTokens(alone=model.ranks is None)
    try:
        yield
    finally:
        model.context.single_tokens = None
        use_attention(model.module, ATTENTION_NAME)


@contextlib.contextmanager
def _few_layers(module: Any) -> Iterator[None]:
    """Reduce the model to one layer of each kind, if its layers are in one list."""
    mixes = any(MIXING in part.__dict__ for part in module.modules())  # then some layers may do neither
    found = [
        (owner, name, layers)
        for owner in module.modules()
        for name, layers in owner.named_children()
        if isinstance(layers, torch.nn.ModuleList)
        and len(layers) > 1
        and (any if mixes else all)(_attends(layer) for layer in layers)
    ]
    if len(found) != 1:
        yield
        return
    owner, name, layers = found[0]
    kinds: dict[Any, Any] = {}
    for layer in layers:
        kinds.setdefault(_kind(layer), layer)
    setattr(owner, name, torch.nn.ModuleList(kinds.values()))
    try:
        yield
    finally:
        setattr(owner, name, layers)


def _attends(layer: Any) -> bool:
    return any(BINDING in part.__dict__ or MIXING in part.__dict__ for part in layer.modules())


def _kind(layer: Any) -> tuple[Any, ...]:
    """Return a key that is equal for layers that compute alike."""
    parts = tuple(
        (name, type(part), getattr(part, "in_features", 0), getattr(part, "out_features", 0))
        for name, part in layer.named_modules()
    )
    return parts, tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
