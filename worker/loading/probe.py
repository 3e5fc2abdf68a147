"""Finds each layer's attention parameters by running the model; `verification` then compares its results.

One pass runs with an attention function that only records its arguments. Every layer must call it exactly once, with
supported keywords, and with a mask that is causal, or causal within a window. Models request their mask through
transformers' mask interface, which provides the mask as a function of two positions. Evaluating it at distant positions
yields windows longer than any probe, and exposes chunked attention.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers
from transformers import masking_utils

from kvforge.protocol.errors import KvforgeError, UnsupportedModel
from kvforge.worker.attention import AttentionOptions
from kvforge.worker.attention.pool import KvGeometry, LayerShape
from kvforge.worker.attention.reference import ReferenceAttention
from kvforge.worker.attention.selftest import AttentionShape
from kvforge.worker.attention.states import StateTensor
from kvforge.worker.device.device import Device

from .description import Latent
from .families import counts_positions, latent_of
from .forward_context import ForwardContext
from .latents import sizes_of
from .mixers import Recorder, bind_mixers, check_version, mixers_of
from .model import ATTENTION_NAME, BINDING, LayerBinding, use_attention
from .rope import context_range

RECORDING_NAME = "kvforge_recording"
RECORDED_TOKENS = 4
ATTENDING = frozenset({"attention", "full_attention", "sliding_attention"})
MASK_POSITIONS_MAX = 1 << 18
PACKED_SEQUENCES = "find_packed_sequence_indices"
# Keywords without effect on attention; all others must be absent, None or False.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"})
log = logging.getLogger("worker")
SINKS = ("s_aux", "sinks")
HONOURED = frozenset({"scaling", "sliding_window", "softcap", "dropout", "is_causal", *SINKS})


@dataclass(frozen=True)
class _Call:
    """Arguments of a layer's call of the attention function. Shapes are [1, heads, tokens, head_size]."""

    module: torch.nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    key_value: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None
    keywords: dict[str, Any]
    norms: torch.Tensor  # of each token's query, [tokens] float32


_calls: list[_Call] = []  # calls of the recording pass in progress: transformers registers functions, not objects


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    norms = query[0].float().square().sum((0, 2)).sqrt()
    _calls.append(_Call(module, query.shape, key.shape, value.shape, (key, value), attention_mask, keywords, norms))
    batch, heads, tokens, _ = query.shape
    return value.new_zeros((batch, tokens, heads, value.shape[-1])), None


def _mask_window(*, mask_function: Any, config: Any, device: Any, **_: Any) -> torch.Tensor:
    """Return the window of `mask_function` (0: none) in place of a mask, as a tensor [1, 1, 1, 1] int64.

    mask_function(batch, head, query position, key position) -> bool tensor, as in transformers' masking_utils.
    """
    positions = min(context_range(config).most, MASK_POSITIONS_MAX)
    # A mask function may hold tensors of the model's device; masks of models on the meta device hold none.
    place = torch.device("cpu") if torch.device(device).type == "meta" else device
    zero = torch.tensor(0, device=place)
    keys = torch.arange(positions, device=place)

    def visible(query: int) -> torch.Tensor:
        allowed = mask_function(zero, zero, torch.tensor(query, device=place), keys)
        return torch.as_tensor(allowed, device=place).expand(positions)

    try:
        window = int(visible(positions - 1).sum())
        for query in sorted({0, 1, positions // 3, positions // 2, 2 * positions // 3, positions - 1}):
            expected = (keys <= query) & (keys > query - window)
            if query < positions and not torch.equal(visible(query), expected):
                raise UnsupportedModel(_name(config), "its attention mask is neither causal nor a sliding window")
    except (IndexError, RuntimeError, TypeError) as error:
        raise UnsupportedModel(_name(config), f"its attention mask cannot be evaluated: {error}") from error
    return torch.full((1, 1, 1, 1), 0 if window >= positions else window, dtype=torch.int64, device=place)


transformers.AttentionInterface.register(RECORDING_NAME, _record)
transformers.AttentionMaskInterface.register(RECORDING_NAME, _mask_window)


@dataclass(frozen=True)
class BoundLayers:
    """The memory that a model's layers need.

    Attributes:
        shapes: KV shape of each layer that attends, in order.
        states: The recurrent state of a sequence; none for most models.
        prompt_chunk: Chunks of a prompt begin and end at multiples of this many tokens; 1 for models without a state.
    """

    shapes: tuple[LayerShape, ...]
    states: tuple[StateTensor, ...] = ()
    prompt_chunk: int = 1


@torch.inference_mode()
def bind_layers(module: Any, context: ForwardContext, context_tokens: int, device: Device) -> BoundLayers:
    """Run the recording pass, bind attention modules and layers with a recurrent state, and select paged attention.

    Args:
        module: The transformers model.
        context: Inputs of attention, shared by all layers.
        context_tokens: Positions to serve.
        device: The device that computes.

    Returns:
        The memory that the layers need.

    Raises:
        UnsupportedModel: A layer needs something that kvforge does not support.
    """
    name = _name(module.config)
    mixers = mixers_of(module)
    if not mixers and getattr(module, "_is_stateful", False) and not _attends_alone(module.config):
        raise UnsupportedModel(name, "its layers keep a recurrent state in a cache of their own")
    if mixers:
        check_version(name)
    with Recorder(module) as recorder:
        calls = _recording_pass(module, name, min(RECORDED_TOKENS, context_tokens), device)
    layers = int(module.config.get_text_config(decoder=True).num_hidden_layers)
    if not calls and not mixers:
        raise UnsupportedModel(name, "it never calls the attention function that transformers lets us register")
    if len({id(call.module) for call in calls}) != len(calls):
        raise UnsupportedModel(name, "a layer attends more than once")
    if len(calls) != layers and not mixers:
        problem = f"{len(calls)} of its {layers} layers attend through the registered function"
        raise UnsupportedModel(name, problem)
    shapes = []
    is_described, latent = counts_positions(module), latent_of(module)
    for index, call in enumerate(calls):
        options, shape = _read_call(call, name, is_described, latent)
        call.module.__dict__[BINDING] = LayerBinding(index, call.query[1], options, context)
        shapes.append(replace(shape, shared_with=_same_key_value(calls[:index], call)))
    use_attention(module, ATTENTION_NAME)
    states = recorder.states(name)
    _check_pages(tuple(shapes), states, name)
    return BoundLayers(tuple(shapes), states, bind_mixers(module, context, states, recorder))


def _check_pages(shapes: tuple[LayerShape, ...], states: tuple[StateTensor, ...], name: str) -> None:
    """Check that a block's K and V are equal parts of a page, if pages hold states too.

    Raises:
        UnsupportedModel: They are not.
    """
    if states and any(shape != shapes[0] for shape in shapes):
        raise UnsupportedModel(name, "its layers keep a recurrent state, and its layers that attend differ in shape")


def foresee(module: Any, device: Device) -> tuple[LayerShape, ...]:
    """Check a model on the meta device before its weights are read, as far as possible.

    Returns:
        Each layer's KV shape, in order; none if the model does not run without weights.

    Raises:
        UnsupportedModel: A layer needs something that attention does not support. Code that fails without weights is
            tolerated.
    """
    try:
        return bind_layers(module, ForwardContext(ReferenceAttention()), RECORDED_TOKENS, device).shapes
    except UnsupportedModel as error:
        if error.__cause__ is None:
            raise
    except Exception as error:  # noqa: BLE001 - foreign code without numbers
        log.debug("not checked before loading: %s: %s", type(error).__name__, error)
    return ()


def _attends_alone(config: Any) -> bool:
    """Return whether every layer attends, for a family that may keep recurrent state.

    The logits of such a model are then compared in chunks, like those of any model.
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return (
        isinstance(kinds, list | tuple)
        and bool(kinds)
        and all(isinstance(kind, str) and kind in ATTENDING for kind in kinds)
    )


def bound_shapes(module: Any, shapes: tuple[LayerShape, ...]) -> tuple[AttentionShape, ...]:
    """Return the attention shape of each layer that attends, in order, after `bind_layers` has returned `shapes`."""
    found = zip(_bindings(module), shapes, strict=True)
    return tuple(
        AttentionShape(
            binding.heads,
            shape.kv_heads,
            shape.head_size,
            replace(binding.options, sinks=None),
            sinks=binding.options.sinks is not None,
            latent=shape.latent,
        )
        for binding, shape in found
    )


def bound_options(module: Any) -> tuple[AttentionOptions, ...]:
    """Return the attention options of each layer that attends, in order, after `bind_layers`."""
    return tuple(binding.options for binding in _bindings(module))


def attending(module: Any, geometry: KvGeometry) -> tuple[tuple[LayerShape, AttentionOptions], ...]:
    """Return the shape and options of each layer that attends, in order, after `bind_layers`; none if none attends."""
    found = bound_options(module)
    return tuple(zip(geometry.layers, found, strict=True)) if found else ()


def _bindings(module: Any) -> list[LayerBinding]:
    bindings = [each.__dict__[BINDING] for each in module.modules() if BINDING in each.__dict__]
    return sorted(bindings, key=lambda binding: binding.index)


@torch.inference_mode()
def query_norms(module: Any, first: int, device: Device) -> list[torch.Tensor]:
    """Return the norm of each layer's queries of some tokens, where attention gives zeros, after `bind_layers`.

    A layer's input is then the same at every position, and a rotation changes no norm.

    Args:
        module: The transformers model.
        first: Position of the first of RECORDED_TOKENS tokens.
        device: The device that computes.

    Returns:
        One tensor [RECORDED_TOKENS] float32 for each layer in order.

    Raises:
        UnsupportedModel: The model cannot run at these positions.
    """
    try:
        calls = _recording_pass(module, _name(module.config), RECORDED_TOKENS, device, first)
    finally:
        use_attention(module, ATTENTION_NAME)
    return [call.norms for call in sorted(calls, key=lambda call: call.module.__dict__[BINDING].index)]


@contextlib.contextmanager
def _one_sequence() -> Iterator[None]:
    """Let transformers find no packed sequences inside, as there are none.

    It compares the positions, and a model on the meta device has no numbers to compare.
    """
    found = getattr(masking_utils, PACKED_SEQUENCES, None)
    if found is not None:
        setattr(masking_utils, PACKED_SEQUENCES, lambda *_, **__: None)
    try:
        yield
    finally:
        if found is not None:
            setattr(masking_utils, PACKED_SEQUENCES, found)


def _recording_pass(module: Any, name: str, tokens: int, device: Device, first: int = 0) -> list[_Call]:
    use_attention(module, RECORDING_NAME)
    _calls.clear()
    table = module.get_input_embeddings()
    place = torch.device("meta") if table.weight.is_meta else device.torch_device
    token_ids = torch.arange(tokens, device=place) % table.num_embeddings
    positions = torch.arange(first, first + tokens, device=place)
    try:
        with _one_sequence():
            module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True)
        return list(_calls)
    except KvforgeError:
        raise
    except Exception as error:  # foreign model code: any failure means that the model is unsupported
        raise UnsupportedModel(name, f"a trial run failed: {type(error).__name__}: {error}") from error
    finally:
        _calls.clear()


def _read_call(
    call: _Call, name: str, is_described: bool, latent: Latent | None
) -> tuple[AttentionOptions, LayerShape]:
    """Check the arguments of one layer's call. With latents, its K and V are those of each head, expanded.

    Raises:
        UnsupportedModel: They are not supported.
    """
    for keyword, value in call.keywords.items():
        if keyword not in HONOURED | HARMLESS and value is not None and value is not False:
            problem = f"its layers pass {keyword!r} to attention (a keyword kvforge does not support)"
            raise UnsupportedModel(name, problem)
    if call.keywords.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise UnsupportedModel(name, "its attention is not causal")
    if call.keywords.get("dropout"):
        raise UnsupportedModel(name, "it drops attention weights at inference")
    if not is_described and _reads_length(type(call.module).forward):
        # Without a transformers cache it would count positions within the batch.
        raise UnsupportedModel(name, "its attention computes positions from the length of a transformers cache")
    if latent is None and call.key[:3] != call.value[:3]:
        raise UnsupportedModel(name, f"its K and V differ in shape: {tuple(call.key)} and {tuple(call.value)}")
    if call.key[2] != call.query[2] or call.key[3] != call.query[3] or call.query[1] % call.key[1]:
        raise UnsupportedModel(name, f"its Q and K do not fit: {tuple(call.query)} and {tuple(call.key)}")
    scaling = call.keywords.get("scaling")
    scaling = call.query[3] ** -0.5 if scaling is None else scaling
    softcap = float(call.keywords.get("softcap") or 0.0)
    options = AttentionOptions(float(scaling), _window(call, name), softcap, _sinks(call, name))
    if latent is None:
        return options, LayerShape(kv_heads=call.key[1], head_size=max(call.key[3], call.value[3]))
    size, _, rotated, _ = sizes_of(call.module, latent)
    if options.window or options.softcap or options.sinks is not None:
        raise UnsupportedModel(name, "its attention over latents has windows, soft caps or sinks")
    return options, LayerShape(kv_heads=1, head_size=size + rotated, latent=size)


@cache
def _reads_length(forward: Callable[..., Any]) -> bool:
    """Return whether a module's code asks a cache for its length."""
    return "get_seq_length" in inspect.getsource(forward)


def _same_key_value(earlier: list[_Call], call: _Call) -> int | None:
    """Return the index of the first call with the same K and V (Gemma 4); None: there is none."""
    same = (index for index, each in enumerate(earlier) if all(map(operator.is_, each.key_value, call.key_value)))
    return next(same, None)


def _sinks(call: _Call, name: str) -> torch.Tensor | None:
    """Return the sinks in memory of their own: packing may release the model's weights."""
    given = [each for each in map(call.keywords.get, SINKS) if each is not None]
    if not given:
        return None
    (sinks, *others), heads = given, call.query[1]
    if others or not isinstance(sinks, torch.Tensor) or not sinks.is_floating_point() or sinks.shape != (heads,):
        raise UnsupportedModel(name, f"its attention sinks are not one number for each of its {heads} heads")
    return sinks.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _window(call: _Call, name: str) -> int:
    """Return the window: from the mask if there is one (eager attention reads nothing else), else from the keyword."""
    if call.mask is None:
        return int(call.keywords.get("sliding_window") or 0)
    if call.mask.numel() != 1 or call.mask.dtype != torch.int64:
        raise UnsupportedModel(name, "its layers build an attention mask or bias of their own")
    return int(call.mask)


def _name(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [config.model_type])[0])
