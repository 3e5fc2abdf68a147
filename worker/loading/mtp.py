"""The multi-token prediction module of a checkpoint: where it lies, and its layer as a model of one layer.

transformers leaves these tensors out. The module's layer is one of the model's own kind, so that it is loaded, checked
and described as a model is: with one layer, the module's final norm, and the embeddings and the vocabulary head that it
has in common with the model. `mtp_heads` adds what the module computes before.

A checkpoint may have several modules, each for one further token. The first one serves for all drafts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from kvforge.models.files import read_config, stored_tensors
from kvforge.models.safetensors_header import StoredTensor
from kvforge.protocol.errors import InvalidConfiguration

from .report import PLAIN
from .source import CheckpointPart, Source

SHARED = ("model.embed_tokens.weight", "lm_head.weight")


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
    """

    module: str = "model.layers.{layers}."
    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")
    hidden_first: bool = False


DEEPSEEK = MtpNames()
MIMO = MtpNames(
    "model.mtp_layers.0.", "", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", (), True
)
QWEN = MtpNames("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", ())
# By the model type of config.json.
FAMILIES = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "mimo": MIMO,
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
    own = config_of_layer(config)
    if source.format == "dummy":
        return source, own
    names = names_of(source, config)
    module = names.module.format(layers=config.num_hidden_layers)
    others = {f"{module}{names.final_norm}.weight": "model.norm.weight"} | {name: name for name in SHARED}
    front = (names.embedding_norm, names.hidden_norm, names.projection, *names.copies)
    left_out = frozenset(f"{module}{name}.weight" for name in front)
    return replace(source, part=CheckpointPart(module + names.layer, others, left_out)), own


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
    names, hidden = names_of(source, config), config.hidden_size
    module, stored = names.module.format(layers=config.num_hidden_layers), stored_tensors(source.model_files)
    if not any(name.startswith(module) for name in stored):
        problem = f"{source.name} has no tensors {module}*: leave it out, or use a checkpoint with them"
        raise InvalidConfiguration("draft_model", f"'mtp', but {problem}")
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
    return found


def config_of_layer(config: Any) -> Any:
    """Return the configuration of a model of the module's layer alone: a layer like the last one."""
    layers, own = config.num_hidden_layers, copy.deepcopy(config)
    for name, value in list(vars(own).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(own, name, value[-1:])
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0  # the module has experts
    if "linear_attention" in (getattr(own, "layer_types", None) or ()):
        own.layer_types = ["full_attention"]  # a module has no recurrent layer
    own.num_hidden_layers = 1
    return own


def model_type(source: Source, config: Any) -> str:
    """Return the model type that config.json states, before it is taken as another one."""
    return str(read_config(source.path).get("model_type", config.model_type))
