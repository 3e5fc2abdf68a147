"""Loads EAGLE-3 heads (arXiv 2503.01840) from a folder with a config.json and safetensors.

The head reads the residuals of a low, a middle and a high layer of the model, projected to one hidden state (`fc`). Its
one layer is Llama's, but Q, K and V are projected from the normed embedding and the normed hidden state together. Its
vocabulary head may have fewer tokens than the model: `d2t` is what has to be added to the number of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvforge.models.files import read_config, stored_tensors
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import ModelInfo
from kvforge.worker.attention import AttentionOptions, choose_attention
from kvforge.worker.attention.hidden_states import hidden_shape
from kvforge.worker.attention.pool import KvGeometry, LayerShape
from kvforge.worker.attention.selftest import AttentionShape
from kvforge.worker.kernels import LayerOperations, PlainOperations, choose_operations
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.layer_weights import FeedForward, FusedLayer, Norm, Projection
from kvforge.worker.kernels.packed import PackedOperations
from kvforge.worker.kernels.positions import RotaryTable
from kvforge.worker.kernels.registry import Serving, check_attention

from .heads import DraftHead, project
from .library_errors import refusing
from .model import LoadedModel
from .mtp_heads import STD, read_tensors, refuse_unfit
from .report import PLAIN
from .source import Source, find_source

ARCHITECTURE = "LlamaForCausalLMEagle3"
TABLE, IDS, MASK = "embed_tokens.weight", "d2t", "t2d"


@dataclass(frozen=True)
class EagleFront:
    """The front of an EAGLE-3 head; see `heads.Front`.

    Attributes:
        fc: [hidden, 3 x hidden of the model], of the three residuals.
        token_norm: Norm of the embedding.
        hidden_norm: Norm of the hidden state.
        adds_to_norm: Whether the layer adds to the norm of the hidden state, not to the hidden state.
    """

    fc: torch.Tensor
    token_norm: Norm
    hidden_norm: Norm
    adds_to_norm: bool = False
    goes_on_normed: bool = False

    def stored(self, ops: LayerOperations, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Project the residuals; see `heads.Front`."""
        return project(ops, torch.cat(tuple(hidden), 1), self.fc)

    def start(
        self, ops: LayerOperations, embedded: torch.Tensor, before: torch.Tensor, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer adds to, and both norms side by side; see `heads.Front`."""
        assert norm is None, "both parts have their own norms"
        before = before.to(embedded.dtype)
        normed = ops.norm(before, self.hidden_norm)
        joined = torch.cat((ops.norm(embedded, self.token_norm), normed), 1)
        return normed if self.adds_to_norm else before.clone(), joined

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return its weights; see `heads.Front`."""
        return self.fc, self.token_norm.weight, self.hidden_norm.weight


@dataclass(frozen=True)
class EagleShape:
    """The sizes in a head's configuration."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    tokens: int
    epsilon: float
    adds_to_norm: bool
    taps: tuple[int, ...]

    def tensors(self, model_hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that every head has. model_hidden: the model's hidden size."""
        hidden, attended, kv = self.hidden, self.heads * self.head_size, self.kv_heads * self.head_size
        attention, feed = "midlayer.self_attn.", "midlayer.mlp."
        return {
            "fc.weight": (hidden, 3 * model_hidden),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            f"{attention}q_proj.weight": (attended, 2 * hidden),
            f"{attention}k_proj.weight": (kv, 2 * hidden),
            f"{attention}v_proj.weight": (kv, 2 * hidden),
            f"{attention}o_proj.weight": (hidden, attended),
            f"{feed}gate_proj.weight": (self.inner, hidden),
            f"{feed}up_proj.weight": (self.inner, hidden),
            f"{feed}down_proj.weight": (hidden, self.inner),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.tokens, hidden),
        }


def is_eagle_head(source: str | Path, load_format: str) -> bool:
    """Return whether a source is the folder of an EAGLE-3 head."""
    found = find_source(source, load_format)
    return found.format != "gguf" and ARCHITECTURE in (_config_of(found).get("architectures") or ())


def load_eagle_head(
    source: str | Path, model: LoadedModel, load_format: str, attention: str = "auto", seed: int = 0
) -> DraftHead:
    """Load a head for a model.

    Args:
        source: Its folder.
        model: The model, loaded.
        load_format: One of LOAD_FORMATS.
        attention: See `choose_attention`.
        seed: Seed of random weights.

    Returns:
        The head.

    Raises:
        InvalidConfiguration: Names `draft_model`, and the field or the tensor that does not fit.
        ModelNotFound: There is no such head, or its files cannot be read.
        UnsupportedModel: A file is damaged, or the configuration cannot be read.
        KernelError: Attention of its shape is wrong or does not compile.
        WorkerError: There is not enough memory.
    """
    found = find_source(source, load_format)
    refuse_unfit(model, found.name)
    with refusing(found.name, "its EAGLE-3 head cannot be loaded"), model.device.errors("loading an EAGLE-3 head"):
        return _load(found, model, attention, seed)


def _load(found: Source, model: LoadedModel, attention: str, seed: int) -> DraftHead:
    assert model.fused is not None, "refused otherwise"
    config, fused = _config_of(found), model.fused
    shape = _shape_of(found, config, model)
    hidden = len(fused.final_norm.weight)
    tensors = _random(shape, hidden, model, seed) if found.format == "dummy" else _read(found, shape, hidden, model)
    ids = tensors.pop(IDS, None)
    place, dtype = model.device.torch_device, model.dtype
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        digest.update(f" {name} ".encode() + tensors[name].float().numpy().tobytes())
    weights = {name: tensor.to(place, dtype) for name, tensor in tensors.items()}
    decoder = _decoder(weights, shape, config, model, attention)
    layer = decoder.layers[0]
    kind = AttentionShape(layer.heads, layer.kv_heads, layer.head_size, layer.options)
    own = model.device, decoder.attention, (kind,), dtype, dtype
    check_attention(Serving(*own, model.geometry.block_size, model.vocab_size, None))
    front = EagleFront(
        weights["fc.weight"],
        Norm(weights["midlayer.input_layernorm.weight"], shape.epsilon),
        Norm(weights["midlayer.hidden_norm.weight"], shape.epsilon),
        shape.adds_to_norm,
    )
    dtype_name = str(dtype).removeprefix("torch.")
    layers = LayerShape(shape.kv_heads, shape.head_size), hidden_shape(shape.hidden)
    info = ModelInfo(
        name=found.name,
        source=str(found.path),
        architecture=ARCHITECTURE,
        fingerprint=digest.hexdigest(),
        vocab_size=shape.tokens,
        context_tokens_max=model.info.context_tokens_max,
        eos_tokens=(),
        dtype=dtype_name,
        weight_dtype=dtype_name,
    )
    table = replace(fused, embedding_scale=1.0) if TABLE not in weights else replace(decoder, table=weights[TABLE])
    return DraftHead(
        info=info,
        geometry=KvGeometry(layers, model.geometry.block_size, dtype_name),
        device=model.device,
        vocab_size=model.vocab_size,
        model=table,
        decoder=decoder,
        front=front,
        bytes=sum(weight.nbytes for weight in weights.values()),
        taps=shape.taps,
        drafted=None if ids is None else (torch.arange(shape.tokens) + ids.long()).to(place),
    )


def _config_of(source: Source) -> dict[str, Any]:
    if source.format == "safetensors":
        return read_config(source.path)
    return dict(json.loads(source.files[0].read_text(encoding="utf-8")))


def _shape_of(source: Source, config: Mapping[str, Any], model: LoadedModel) -> EagleShape:
    """Return the sizes of a head.

    Raises:
        InvalidConfiguration: Names `draft_model`, and the field that does not fit the model.
    """
    assert model.fused is not None, "refused otherwise"
    layers, extra = len(model.fused.layers), config.get("eagle_config") or {}
    sizes = {name: config.get(name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    sizes["num_key_value_heads"] = config.get("num_key_value_heads", sizes["num_attention_heads"])
    vocabulary = config.get("vocab_size")
    sizes["draft_vocab_size"] = config.get("draft_vocab_size") or vocabulary
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise _unfit(source, f"{name} = {size!r}: expected a whole number of at least 1")
    hidden, inner, heads, kv_heads, tokens = (int(size or 0) for size in sizes.values())
    if vocabulary != model.info.vocab_size:
        raise _unfit(source, f"vocab_size = {vocabulary!r}, and {model.info.name} has {model.info.vocab_size} tokens")
    if heads % kv_heads or (config.get("num_hidden_layers", 1) != 1):
        raise _unfit(source, f"num_hidden_layers = {config.get('num_hidden_layers')!r}: expected one layer")
    if config.get("hidden_act", "silu") != "silu" or config.get("attention_bias") or config.get("mlp_bias"):
        raise _unfit(source, "hidden_act, attention_bias or mlp_bias: expected silu, and no biases")
    if "eagle_aux_hidden_state_layer_ids" in extra:  # their results are read
        taps = tuple(layer + 1 for layer in extra["eagle_aux_hidden_state_layer_ids"])
    else:
        taps = tuple(config.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3))
    if len(set(taps)) != 3 or min(taps) < 0 or max(taps) >= layers:
        problem = f"reads what the layers {list(taps)} read, and {model.info.name} has {layers}"
        raise _unfit(source, f"{problem}: expected three of these")
    return EagleShape(
        hidden=hidden,
        inner=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_size=int(config.get("head_dim") or hidden // heads),
        tokens=tokens,
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
        adds_to_norm=bool(config.get("norm_before_residual", extra.get("norm_before_residual", False))),
        taps=taps,
    )


def _read(source: Source, shape: EagleShape, model_hidden: int, model: LoadedModel) -> dict[str, torch.Tensor]:
    """Read the tensors of a head.

    Raises:
        InvalidConfiguration: Names `draft_model`, and the tensor that is missing, left over or of another shape.
    """
    stored = stored_tensors(source.model_files)
    wanted = shape.tensors(model_hidden)
    if TABLE in stored or shape.hidden != model_hidden:
        wanted[TABLE] = (model.info.vocab_size, shape.hidden)
    if IDS in stored or shape.tokens != model.info.vocab_size:
        wanted[IDS] = (shape.tokens,)
    for name, sizes in wanted.items():
        tensor = stored.get(name)
        types = ("I64", "I32") if name == IDS else PLAIN
        if tensor is None or tuple(tensor.shape) != sizes or tensor.type_name not in types:
            has = "missing" if tensor is None else f"{tensor.type_name} {list(tensor.shape)}"
            kind = "integers" if name == IDS else "plain numbers"
            raise _unfit(source, f"the tensor {name} is {has}, and has to be {kind} {list(sizes)}")
    if others := sorted(stored.keys() - wanted.keys() - {MASK}):
        raise _unfit(source, f"the tensor {others[0]} is not one of an EAGLE-3 head")
    found = dict(zip(wanted, read_tensors(source, [*wanted]), strict=True))
    for name, weight in found.items():
        if name != IDS and not bool(weight.isfinite().all()):
            raise _unfit(source, f"the tensor {name} holds NaN or infinity")
    if IDS in found:
        ids = torch.arange(shape.tokens) + found[IDS].long()
        if int(ids.min()) < 0 or int(ids.max()) >= model.info.vocab_size:
            raise _unfit(source, f"the tensor {IDS} leads to token {int(ids.max())} of {model.info.vocab_size}")
    return found


def _random(shape: EagleShape, model_hidden: int, model: LoadedModel, seed: int) -> dict[str, torch.Tensor]:
    """Return random tensors of a head, on the CPU."""
    with model.device.random_state():
        torch.manual_seed(seed)
        sizes = shape.tensors(model_hidden)
        return {
            name: torch.ones(each) if "norm" in name else torch.randn(each).mul_(STD) for name, each in sizes.items()
        }


def _unfit(source: Source, problem: str) -> InvalidConfiguration:
    return InvalidConfiguration("draft_model", f"{source.name!r}, an EAGLE-3 head: {problem}")


def _decoder(
    weights: Mapping[str, torch.Tensor],
    shape: EagleShape,
    config: Mapping[str, Any],
    model: LoadedModel,
    attention: str,
) -> FusedDecoder:
    """Return the head's layer, its final norm and its vocabulary head."""
    assert model.fused is not None, "refused otherwise"
    device = model.device
    operations = choose_operations(device, model.dtype)
    if isinstance(operations, PackedOperations):  # these multiply packed weights
        operations = PlainOperations()
    own, feed = "midlayer.self_attn.", "midlayer.mlp."
    projected = torch.cat([weights[f"{own}{name}_proj.weight"] for name in "qkv"])
    gate_up = torch.cat([weights[f"{feed}{name}_proj.weight"] for name in ("gate", "up")])
    layer = FusedLayer(
        options=AttentionOptions(scaling=shape.head_size**-0.5),
        rotary=0,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        input_norm=None,
        projected=Projection(projected, None),
        head_norms=None,
        output=Projection(weights[f"{own}o_proj.weight"], None),
        inner_norm=Norm(weights["midlayer.post_attention_layernorm.weight"], shape.epsilon),
        feed=FeedForward(Projection(gate_up, None), Projection(weights[f"{feed}down_proj.weight"], None)),
    )
    kept = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**kept))
    table = RotaryTable(rotary.inv_freq.float().to(device.torch_device), float(rotary.attention_scaling))
    return FusedDecoder(
        operations=operations,
        attention=choose_attention(device, attention),
        table=model.fused.table,
        layers=(layer,),
        final_norm=Norm(weights["norm.weight"], shape.epsilon),
        head=Projection(weights["lm_head.weight"], None),
        rotary=(table,),
    )
