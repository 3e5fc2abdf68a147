"""The multi-token prediction module of a checkpoint: where it lies, and its layer as a model of one layer.

transformers leaves these tensors out. The module's layer is one of the model's own kind, so that it is loaded, checked
and described as a model is: with one layer, the module's final norm, and the embeddings and the vocabulary head that it
has in common with the model. `mtp_heads` adds what the module computes before.

A checkpoint may have several modules, each for one further token. The first one serves for all drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvforge.models.files import read_config, stored_tensors
from kvforge.models.safetensors_header import StoredTensor
from kvforge.protocol.errors import InvalidConfiguration

from .report import PLAIN
from .source import CheckpointPart, Source

# Tensors that a module has in common with its model: their names in a decoder, and those that files use.
SHARED = {
    "model.embed_tokens.weight": ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    "lm_head.weight": ("lm_head.weight",),
}


@dataclass(frozen=True)
class MtpNames:
    """Names of a module's tensors, and their order.

    Attributes:
        module: The beginning of all of its names; {layers} is the number of the model's layers.
        layer: The beginning of the names of its layer, behind that.
        embedding_norm: The norm of the embedding.
        hidden_norm: The norm of the hidden state.
        projection: The projection of both.
        final_norm: The norm before the vocabulary head.
        copies: Copies of the model's embedding and head, which are not read.
        hidden_first: Whether the hidden state comes first in what is projected.
        renamed: Parts of the names of its layer's tensors, and transformers' names for these parts.
        fields: Fields of the configuration that differ from those of the model's last layer.
    """

    module: str = "model.layers.{layers}."
    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")
    hidden_first: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


DEEPSEEK = MtpNames()
MIMO = MtpNames(
    "model.mtp_layers.0.", "", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", (), True
)
MIMO_V2 = MtpNames(
    "model.mtp.layers.0.",
    final_norm="final_layernorm",
    copies=(),
    renamed={"pre_mlp_layernorm.": "post_attention_layernorm."},
    fields={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
)
QWEN = MtpNames("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", ())
# Its final norm is that of the model, and its layer has no experts.
ERNIE = MtpNames(
    "model.",
    "mtp_block.0.",
    "mtp_emb_norm.0",
    "mtp_hidden_norm.0",
    "mtp_linear_proj.0",
    "norm",
    (),
    fields={"moe_layer_start_index": 1},
)
# By the model type of config.json.
FAMILIES = {
    "deepseek_v3": DEEPSEEK,
    "ernie4_5_moe": ERNIE,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "mimo": MIMO,
    "mimo_v2_flash": MIMO_V2,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_next": QWEN,
}


def mtp_part(source: Source, config: Any) -> tuple[Source, Any]:
    """Return the source and the configuration of a module's layer as a model.

    Args:
        source: The model's files; with dummy weights a layer of the model's own kind is made up.
        config: The model's configuration.

    Raises:
        InvalidConfiguration: Names `draft_model`: no names of modules are known for this kind of model.
    """
    if source.format == "dummy":
        return source, config_of_layer(config, FAMILIES.get(config.model_type, DEEPSEEK))
    names = names_of(source, config)
    module, stored = _module(names, config), stored_tensors(source.model_files)
    others = {f"{module}{names.final_norm}.weight": "model.norm.weight"}
    others |= {next((each for each in places if each in stored), own): own for own, places in SHARED.items()}
    front = (names.embedding_norm, names.hidden_norm, names.projection, *names.copies)
    left_out = frozenset(f"{module}{name}.weight" for name in front)
    part = CheckpointPart(module + names.layer, others, left_out, names.renamed)
    return replace(source, part=part), config_of_layer(config, names)


def names_of(source: Source, config: Any) -> MtpNames:
    """Return the names of a model's module.

    Raises:
        InvalidConfiguration: Names `draft_model`: no names are known for this kind of model.
    """
    if source.format == "safetensors":
        kind = model_type(source, config)
        if kind in FAMILIES:
            return FAMILIES[kind]
        problem = f"heads are known of {', '.join(FAMILIES)}, and {source.name} is a model of type {kind}"
        raise InvalidConfiguration("draft_model", f"'mtp', but {problem}: leave it out")
    problem = f"{source.name} is no folder with safetensors: its multi-token prediction module is not read"
    raise InvalidConfiguration("draft_model", f"'mtp', but {problem}")


def front_tensors(source: Source, config: Any) -> dict[str, StoredTensor]:
    """Return the stored norm of the embedding, the norm of the hidden state, and the projection, in this order.

    Raises:
        InvalidConfiguration: Names `draft_model`: there is no module, or names its tensor that is missing, of another
            shape or quantised.
    """
    names, text = names_of(source, config), config.get_text_config(decoder=True)
    module, hidden, stored = _module(names, config), text.hidden_size, stored_tensors(source.model_files)
    if not any(name.startswith(module + names.layer) for name in stored):
        problem = f"{source.name} has no tensors {module}{names.layer}*: leave it out, or use a checkpoint with them"
        raise InvalidConfiguration("draft_model", f"'mtp', but {problem}")
    if getattr(text, "mtp_use_dedicated_embeddings", False):
        problem = f"{source.name} has embeddings of its own for it (mtp_use_dedicated_embeddings), which are not read"
        raise InvalidConfiguration("draft_model", f"'mtp', but {problem}: leave it out")
    wanted = {names.embedding_norm: (hidden,), names.hidden_norm: (hidden,), names.projection: (hidden, 2 * hidden)}
    found: dict[str, StoredTensor] = {}
    for name, shape in wanted.items():
        whole = f"{module}{name}.weight"
        tensor = stored.get(whole)
        if tensor is None or tuple(tensor.shape) != shape or tensor.type_name not in PLAIN:
            has = "missing" if tensor is None else f"{tensor.type_name} {list(tensor.shape)}"
            problem = f"the tensor {whole} of {source.name} is {has}, and has to be plain numbers {list(shape)}"
            raise InvalidConfiguration("draft_model", f"'mtp', but {problem}: use another checkpoint")
        found[whole] = tensor
    if f"{module}{names.projection}.bias" in stored:
        problem = f"the tensor {module}{names.projection}.bias of {source.name} is not one of a known module"
        raise InvalidConfiguration("draft_model", f"'mtp', but {problem}: leave it out")
    return found


def _module(names: MtpNames, config: Any) -> str:
    """Return the beginning of the names of a module's tensors."""
    return names.module.format(layers=config.get_text_config(decoder=True).num_hidden_layers)


def config_of_layer(config: Any, names: MtpNames) -> Any:
    """Return the configuration of a model of the module's layer alone: a layer like the last one.

    Of a model of more than text it is that of the text part, with what the whole states of the weights.
    """
    text = config.get_text_config(decoder=True)
    own, layers = copy.deepcopy(text), text.num_hidden_layers
    if text is not config:
        own.dtype, own.tie_word_embeddings = config.dtype or own.dtype, config.tie_word_embeddings
        if (declared := getattr(config, "quantization_config", None)) is not None:
            own.quantization_config = declared
    for name, value in list(vars(own).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(own, name, value[-1:])
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0  # the module has experts
    if "linear_attention" in (getattr(own, "layer_types", None) or ()):
        own.layer_types = ["full_attention"]  # a module has no recurrent layer
    for name, value in names.fields.items():
        setattr(own, name, value)
    own.num_hidden_layers = 1
    return own


def model_type(source: Source, config: Any) -> str:
    """Return the model type that config.json states, before it is taken as another one."""
    return str(read_config(source.path).get("model_type", config.model_type))
