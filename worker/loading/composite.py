"""The text part of a multimodal model: an ordinary decoder with other names in its files.

transformers builds the whole model, because its names and conversions belong to the whole. Everything except the text
decoder and its head is removed before weights are read: other towers take no memory, and only their tensors may be left
over in the files. The decoder is then moved into transformers' own class for it (Mistral's for Mistral Small 3.2), or
into `TextDecoder` if there is none (Qwen3-VL), and compared with the whole model.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto import modeling_auto

from kvforge.protocol.errors import UnsupportedModel

from .library_errors import sentence

MAPPINGS = (
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
TRIAL_TOKENS = 7
log = logging.getLogger("worker")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative to the largest logit


def is_composite(config: Any) -> bool:
    """Return whether a transformers configuration has a separate part for its text decoder."""
    return config.get_text_config(decoder=True) is not config


def model_class(config: Any) -> Any:
    """Return the transformers class to build: for a composite, the whole model without the parts that are not text.

    Args:
        config: The transformers configuration.

    Returns:
        The class.

    Raises:
        UnsupportedModel: transformers has no class of this configuration that generates text.
    """
    if is_composite(config):
        for name in MAPPINGS:
            found = _class_in(getattr(modeling_auto, name, {}), config)
            if found is not None and found.config_class is type(config):
                return _narrowed(found)
    found = _class_in(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, config)
    if found is None:
        problem = f"transformers has no decoder of the model type {config.model_type!r} (AutoModelForCausalLM)"
        raise UnsupportedModel(config.model_type, problem)
    return found


def config_for(cls: Any, config: Any) -> Any:
    """Return the configuration for `model_class`: the text part if transformers maps the whole to its decoder."""
    if not issubclass(cls, Narrowed) and is_composite(config) and cls.config_class is not type(config):
        return config.get_text_config(decoder=True)
    return config


def is_removed(module: Any, name: str) -> bool:
    """Return whether a stored tensor belongs to a removed part of the whole model."""
    return isinstance(module, Narrowed) and any(
        name == path or name.startswith(f"{path}.") for path in module.kvforge_removed
    )


class Narrowed:
    """A whole model that removes everything except its text decoder and head once it is built."""

    kvforge_removed: frozenset[str] = frozenset()  # modules and tensors, by their paths

    def _narrow(self: Any) -> None:
        kept = [part for part in _parts(self) if part is not None]
        paths = [name for name, part in self.named_modules() if any(part is each for each in kept)]
        ancestors = {path[: match.start()] for path in paths for match in re.finditer(r"\.|^", path)}
        removed: list[str] = []
        for name in ancestors:
            first = {path[len(name) :].lstrip(".").partition(".")[0] for path in paths if _inside(path, name)}
            removed += [f"{name}.{each}".lstrip(".") for each in _strip(self.get_submodule(name), first)]
        # Files use the names of the base model with or without its prefix.
        prefix = f"{self.base_model_prefix}."
        self.kvforge_removed = frozenset([*removed, *(path.removeprefix(prefix) for path in removed)])
        after = set(self.state_dict())
        tied = self.all_tied_weights_keys
        self.all_tied_weights_keys = {copy: of for copy, of in tied.items() if {copy, of} <= after}


def _inside(path: str, name: str) -> bool:
    return not name or path.startswith(f"{name}.")


def _strip(part: Any, kept: set[str]) -> list[str]:
    """Remove the tensors of `part` itself, and its children except `kept`. Return the removed names."""
    removed = []
    for table in (part._modules, part._parameters, part._buffers):
        for name in [name for name in table if name not in kept]:
            table[name] = None
            removed.append(name)
    return removed


@functools.cache
def _narrowed(cls: Any) -> Any:
    def __init__(self: Any, config: Any, *given: Any, **keywords: Any) -> None:  # noqa: N807 - for the class below
        cls.__init__(self, config, *given, **keywords)
        self._narrow()

    # transformers looks up name conversions by class name, and treats classes of other modules as foreign.
    made = type(cls.__name__, (Narrowed, cls), {"__init__": __init__})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    return made


def _class_in(mapping: Any, config: Any) -> Any:
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    if not isinstance(found, list | tuple):
        return found
    named = {each.__name__: each for each in found}
    return next((named[name] for name in config.architectures or () if name in named), found[0])


def _parts(whole: Any) -> tuple[Any, Any]:
    """Return the text decoder and its head (None if the decoder contains it).

    Raises:
        UnsupportedModel: There is no separate text decoder, or no head.
    """
    text = whole.config.get_text_config(decoder=True)
    found = [part for _, part in whole.named_modules() if part is not whole and _is_of(part, text)]
    if not found:
        problem = "it is a model of more than text, and transformers builds its text decoder in no module of its own"
        raise UnsupportedModel(type(whole).__name__, problem)
    decoder = found[0]
    head = decoder.get_output_embeddings()
    if head is not None:
        return decoder, None
    for _, owner in _owners(whole, decoder):
        head = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else None
        if head is not None:
            return decoder, head
    raise UnsupportedModel(type(whole).__name__, "it is a model of more than text, and its text decoder has no head")


def _is_of(part: Any, text: Any) -> bool:
    return isinstance(part, transformers.PreTrainedModel) and type(part.config) is type(text)


def _owners(whole: Any, decoder: Any) -> list[tuple[str, Any]]:
    """Return the modules that hold the decoder, innermost first."""
    path = next(name for name, part in whole.named_modules() if part is decoder)
    names = [path[: match.start()] for match in re.finditer(r"\.", path)]
    return [(name, whole.get_submodule(name)) for name in (*reversed(names), "")]


# ---------------------------------------------------------------------------------------------------------- extraction


@torch.no_grad()
def text_part(whole: Any, model: str) -> Any:
    """Return the text decoder of a narrowed model as a decoder with its own class, sharing its weights.

    If the weights are loaded, both are compared in eager attention first.

    Args:
        whole: The model of `model_class`, loaded or on the meta device.
        model: The name for errors.

    Returns:
        The decoder; `whole` itself if it is not composite.

    Raises:
        UnsupportedModel: No way of running the decoder alone gives the logits of the whole.
    """
    if not isinstance(whole, Narrowed):
        return whole
    decoder, head = _parts(whole)
    problem = ""
    for make in (_own_class, _generic):
        made = decoder if head is None else make(decoder, head)
        if made is None:
            continue
        _keep_generation(made, whole)
        problem = _difference(made, whole, model, known=make is _own_class)
        if not problem:
            return made
    raise UnsupportedModel(model, f"it is a model of more than text, and its text decoder alone {problem}")


def _own_class(decoder: Any, head: Any) -> Any:
    """Return the decoder in transformers' own class for it; None if there is none that fits."""
    config = decoder.config
    cls = _class_in(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, config)
    if cls is None or cls.config_class is not type(config):
        return None
    with torch.device("meta"):
        made: Any = cls._from_config(config, attn_implementation="eager", dtype=head.weight.dtype)
    inner: Any = getattr(made, made.base_model_prefix, None)
    if type(inner) is not type(decoder):
        return None
    setattr(made, made.base_model_prefix, decoder)
    made.set_output_embeddings(head)
    made.config = config
    if not head.weight.is_meta and any(each.is_meta for each in (*made.parameters(), *made.buffers())):
        return None
    return made.eval()


def _generic(decoder: Any, head: Any) -> Any:
    base = next(each for each in type(decoder).__mro__[1:] if transformers.PreTrainedModel in each.__bases__)
    name = f"{type(decoder).__name__.removesuffix('Model')}ForCausalLM"
    # transformers finds the abilities of a class in the source of its module.
    made: Any = type(name, (TextDecoder, base), {"__module__": type(decoder).__module__})(decoder.config)
    made.model, made.lm_head = decoder, head
    return made.eval()


class TextDecoder:
    """A decoder and its head, with a base class of the decoder's own family."""

    base_model_prefix = "model"
    _tied_weights_keys = None
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012 - as transformers declares it
    _pp_plan = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model: Any = None
        self.lm_head: Any = None
        self.post_init()  # type: ignore[attr-defined]

    def get_input_embeddings(self) -> Any:
        """Return the decoder's embedding table."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Return the head."""
        return self.lm_head

    def set_output_embeddings(self, head: Any) -> None:
        """Replace the head."""
        self.lm_head = head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **keywords: Any,
    ) -> CausalLMOutputWithPast:
        """Run the decoder.

        Args:
            input_ids: [1, tokens] int64.
            position_ids: [1, tokens] int64.
            logits_to_keep: Compute the logits of this many last tokens, or at these indices.
            **keywords: Passed to the decoder.

        Returns:
            Logits [1, kept, vocab].
        """
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **keywords).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, kept, :]))


def _keep_generation(made: Any, whole: Any) -> None:
    generation = getattr(whole, "generation_config", None)
    if generation is not None:
        made.generation_config = generation


def _difference(made: Any, whole: Any, model: str, known: bool) -> str:
    """Return how the decoder alone differs from the whole model on text; "" if it does not.

    known: whether transformers has its own class for the decoder. That class is trusted if the whole model cannot run
    without its other parts.
    """
    table = made.get_input_embeddings()
    if table.weight.is_meta:
        return ""
    tokens = torch.arange(TRIAL_TOKENS, device=table.weight.device)[None] % table.num_embeddings
    try:
        wanted = whole(input_ids=tokens, use_cache=False, return_dict=True).logits.float()
    except Exception as error:  # noqa: BLE001 - foreign code without its other parts
        if known:
            log.info("%s: not compared with the whole model, which needs its other parts: %s", model, sentence(error))
            return ""
        return f"cannot be compared with the whole, which does not run on text: {sentence(error)}"
    try:
        got = made(input_ids=tokens, use_cache=False, return_dict=True).logits.float()
    except Exception as error:  # noqa: BLE001 - foreign code; the next way may run
        return f"cannot be run: {sentence(error)}"
    if got.shape != wanted.shape:
        return f"gives logits of another shape, {list(got.shape)} for {list(wanted.shape)}"
    apart = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    if not apart <= TOLERANCE.get(table.weight.dtype, TOLERANCE[torch.bfloat16]) and wanted.isfinite().all():
        return f"gives other logits than the whole, by {apart:.1e} of the largest"
    return ""
