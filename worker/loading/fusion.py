"""Fused decoder layers: fewer and larger operations, for architectures with exactly known layers.

Q, K and V are one matrix product, and so are gate and up. A norm includes the residual sum before it. The rotary
embedding is part of the KV write, and both are part of the product for few tokens. An explicit table lists the
transformers classes that are fused, with layers that compute exactly

    x += output(attention(rotate(q_norm(q)), rotate(k_norm(k)), v));  x += down(silu(gate(norm x)) * up(norm x))

with q, k and v projected from norm x, with or without biases, q and k norms, and rotation. Any other class runs through
transformers. `verification` compares both paths with transformers' own attention before a model is served.

No weight is stored twice: the parts of a fused matrix become views, layer by layer, of the fused or packed matrix (see
`kernels.packed`). The transformers module stays whole: it computes the same results, and its state keeps its names. An
embedding that is tied to the head is read from the packed head (see `kernels.packed_table`). If that is impossible, a
packed head that is a small part of the model is kept beside the embedding; a quantised one always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvforge.worker.attention import AttentionOptions, PagedAttention
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.device.target import HEAD_UNIT
from kvforge.worker.kernels import HEAD_SIZE_MAX, HIDDEN_MAX, LayerOperations
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.layer_weights import FusedLayer, Projection
from kvforge.worker.kernels.packed import PackedRows
from kvforge.worker.kernels.packed_table import PackedEmbedding, PackedTable, table_of

from .quantisation import Packer
from .rope import STATIC_ROPE

# Share of all weights' bytes: 0.21 for SmolLM2-135M and Llama-3.2-1B, 0.28 for Qwen2.5-0.5B. A worker may hold 1.3
# times its weights.
TIED_HEAD_SHARE_MAX = 0.29

FUSIBLE = frozenset(
    {
        "transformers.models.llama.modeling_llama.LlamaForCausalLM",
        "transformers.models.mistral.modeling_mistral.MistralForCausalLM",
        "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM",
        "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM",
        "transformers.models.smollm3.modeling_smollm3.SmolLM3ForCausalLM",
    }
)


def fuse(
    module: Any,
    options: Sequence[AttentionOptions],
    operations: LayerOperations,
    attention: PagedAttention,
    packer: Packer | None = None,
    ranks: Ranks | None = None,
) -> FusedDecoder | None:
    """Make the fused form of a transformers model, which shares its weights.

    Args:
        module: The transformers model.
        options: Attention options of each layer, in order.
        operations: Operations of the layers.
        attention: Paged attention.
        packer: Makes the weights that `operations` multiply (see `quantisation`). The original weights are released one
            by one, so no other object may hold them, such as an earlier fused form. None: use the weights as they are.
        ranks: The ranks with the other parts of the weights (see `split`).

    Returns:
        The fused form; None if the table does not list the class.

    Raises:
        KvforgeError: As raised by `packer`.
    """
    if not is_known(module):
        return None
    decoder, config = module.model, module.config
    split = len(module.lm_head.weight) < module.get_input_embeddings().num_embeddings
    head, table = _head(module, packer)  # first: later the module's original size is unknown
    layers = tuple(_fuse_layer(layer, each, packer) for layer, each in zip(decoder.layers, options, strict=True))
    return FusedDecoder(
        operations=operations,
        attention=attention,
        table=decoder.embed_tokens.weight if table is None else table,
        layers=layers,
        final_norm=decoder.norm.weight,
        head=head,
        frequencies=decoder.rotary_emb.inv_freq.float(),
        rotary_scaling=float(decoder.rotary_emb.attention_scaling),
        epsilon=float(config.rms_norm_eps),
        ranks=ranks,
        head_is_split=split,
    )


def is_known(module: Any) -> bool:
    """Return whether `fuse` supports a transformers model."""
    kind, config = type(module), module.config
    if f"{kind.__module__}.{kind.__qualname__}" not in FUSIBLE or config.hidden_act not in ("silu", "swish"):
        return False
    if module.model.rotary_emb.rope_type not in STATIC_ROPE:
        return False
    head_sizes = {layer.self_attn.head_dim for layer in module.model.layers}
    if config.hidden_size > HIDDEN_MAX or config.hidden_size % HEAD_UNIT or max(head_sizes) > HEAD_SIZE_MAX:
        return False
    norms = [part for part in module.modules() if type(part).__name__.endswith("RMSNorm")]
    linears = [part for part in module.modules() if hasattr(part, "in_features")]
    return (
        all(type(part) is torch.nn.Linear for part in linears)  # not replaced, for example by a quantised one
        and all(part.variance_epsilon == config.rms_norm_eps for part in norms)
        and len({weight.dtype for weight in module.parameters()}) == 1
    )


@torch.no_grad()
def _head(module: Any, packer: Packer | None) -> tuple[Projection, PackedTable | None]:
    """Return the vocabulary head, and the embedding table if it is read from the packed head."""
    weight, bias = module.lm_head.weight, module.lm_head.bias
    if packer is None or weight is not module.model.embed_tokens.weight:
        return _join(module, ("lm_head",), packer), None
    packed = packer.pack(weight, [module.lm_head])
    if (table := table_of(packed, weight)) is not None:
        module.lm_head = in_place_of(module.lm_head, PackedRows(packed, slice(0, len(weight)), bias))
        module.model.embed_tokens = PackedEmbedding(table)
        return Projection(packed, bias), table
    whole = sum(each.nbytes for each in module.parameters())
    if weight.nbytes > TIED_HEAD_SHARE_MAX * whole and not packer.quantises:
        return Projection(weight, bias), None
    return Projection(packed, bias), None


def _fuse_layer(layer: Any, options: AttentionOptions, packer: Packer | None) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    head_size = attention.head_dim
    has_norms = hasattr(attention, "q_norm")
    return FusedLayer(
        options=options,
        rotates=bool(getattr(attention, "use_rope", True)),
        heads=attention.q_proj.out_features // head_size,
        kv_heads=attention.k_proj.out_features // head_size,
        head_size=head_size,
        input_norm=layer.input_layernorm.weight,
        projected=_join(attention, ("q_proj", "k_proj", "v_proj"), packer),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if has_norms else None,
        output=_join(attention, ("o_proj",), packer),
        inner_norm=layer.post_attention_layernorm.weight,
        gate_up=_join(mlp, ("gate_proj", "up_proj"), packer),
        down=_join(mlp, ("down_proj",), packer),
    )


@torch.no_grad()
def _join(owner: Any, names: Sequence[str], packer: Packer | None) -> Projection:
    """Join the projections of these names into one; the parts become views of its rows."""
    parts = [getattr(owner, name) for name in names]
    weight, bias = parts[0].weight, parts[0].bias
    if len(parts) > 1:
        weight = torch.cat([part.weight for part in parts])
        bias = None if bias is None else torch.cat([part.bias for part in parts])
    packed = None if packer is None else packer.pack(weight, parts)
    first = 0
    for name, part in zip(names, parts, strict=True):
        rows = slice(first, first + part.out_features)
        first = rows.stop
        if packed is not None:
            setattr(owner, name, in_place_of(part, PackedRows(packed, rows, None if bias is None else bias[rows])))
        elif len(parts) > 1:
            part.weight = torch.nn.Parameter(weight[rows], requires_grad=False)
            if bias is not None:
                part.bias = torch.nn.Parameter(bias[rows], requires_grad=False)
    return Projection(weight if packed is None else packed, bias)


def in_place_of(part: Any, other: torch.nn.Module) -> torch.nn.Module:
    """Return `other` with the hooks of the part that it replaces (see `split`)."""
    other._forward_hooks.update(part._forward_hooks)
    other._forward_pre_hooks.update(part._forward_pre_hooks)
    return other
