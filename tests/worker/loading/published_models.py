"""Small checkpoints of each published format, made from its specification, with the numbers that they stand for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from .random_models import PIXTRAL

Weights = dict[str, torch.Tensor]
TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NF4 = torch.tensor(  # of bitsandbytes/functional.py
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
FIELDS = {
    "vocab_size": 130,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
QUANTISED = ("_proj.weight", "_with_mqa.weight", "in_proj_qkvz.weight", "experts.gate_up_proj", "experts.down_proj")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}


@dataclass(frozen=True)
class Case:
    """A format. pack(name, weight) returns its tensors by name, and the numbers that they stand for."""

    name: str
    config: dict[str, Any]
    pack: Callable[[str, torch.Tensor], tuple[Weights, torch.Tensor]]
    kind: str
    model_type: str = "llama"
    fields: dict[str, Any] = field(default_factory=dict)


_made: dict[str, tuple[dict[Path, bytes], Any]] = {}  # files and plain model by case


def write_checkpoint(case: Case, folder: Path) -> Any:
    """Write the quantised model, made once in a process.

    Args:
        case: The format.
        folder: Where to write.

    Returns:
        transformers' plain model with the numbers of its codes. Tests share it.
    """
    if case.name not in _made:
        with tempfile.TemporaryDirectory(prefix="kvf-") as name:
            plain, root = _make_checkpoint(case, Path(name)), Path(name)
            files = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        _made[case.name] = files, plain
    files, plain = _made[case.name]
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
    return plain


def _make_checkpoint(case: Case, folder: Path) -> Any:
    torch.manual_seed(0)
    made_by = AutoModelForCausalLM
    if "vision_config" in case.fields:
        made_by, rest = AutoModelForImageTextToText, dict(case.fields)
        config = AutoConfig.for_model(case.model_type, text_config={**FIELDS, **rest.pop("text")}, **rest)
    else:
        config = AutoConfig.for_model(case.model_type, **{**FIELDS, **case.fields})
    made = made_by.from_config(config).float().eval()
    with torch.no_grad():
        for each in made.parameters():
            if each.dim() > 1:
                each.normal_(std=0.08)
    made.save_pretrained(folder)
    file = folder / "model.safetensors"
    packed: Weights = {}
    plain: Weights = {}
    for name, weight in load_file(file).items():
        plain[name] = weight
        if not name.endswith(QUANTISED) or "vision" in name or "visual" in name:
            packed[name] = weight
            continue
        tensors, plain[name] = case.pack(name, weight)
        packed |= tensors
    save_file({name: each.contiguous() for name, each in packed.items()}, file, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": case.config}))
    other = folder / "plain"
    other.mkdir()
    made.config.save_pretrained(other)
    save_file({name: each.contiguous() for name, each in plain.items()}, other / "model.safetensors", {"format": "pt"})
    return made_by.from_pretrained(other, dtype=torch.float32, attn_implementation="eager").eval()


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack [..., m] codes into int32 words, the lowest bits first, one by one."""
    count = 32 // bits
    parts = codes.long().unflatten(-1, (-1, count))
    total = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for place in range(count):
        total += parts[..., place] << (bits * place)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def fp8_tensor(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, codes.float() * scale


def fp8_blocks(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """Blocks of 64 x 64; the last ones may be cut."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 64, 0, -rows % 64))
    tiles = padded.unflatten(1, (-1, 64)).unflatten(0, (-1, 64))
    scales = tiles.abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(64, 0).repeat_interleave(64, 1)[:rows, :columns]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, codes.float() * wide


def fp8_channels(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales.float()


def int8_channels(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales


def grouped(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [n, k], scales [n, groups] float16 and zeros [n, groups] of 4 bits."""
    parts = weight.unflatten(1, (-1, group))
    if symmetric:
        scales = (parts.abs().amax(2) / 7).half()
        zeros = torch.full(scales.shape, 8.0)
    else:
        low, high = parts.aminmax(dim=2)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return codes.flatten(1), scales, zeros


def numbers_of(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the numbers. groups: [k] the group of each column."""
    return (codes - zeros[:, groups]) * scales.float()[:, groups]


def in_groups(k: int, group: int) -> torch.Tensor:
    return torch.arange(k) // group


def awq(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """As AutoAWQ packs: the rows of a result in the order 0 2 4 6 1 3 5 7."""
    codes, scales, zeros = grouped(weight, 64, symmetric=False)

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        return words_of(numbers.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    path = name.removesuffix(".weight")
    tensors = {f"{path}.qweight": packed(codes), f"{path}.qzeros": packed(zeros), f"{path}.scales": scales.t()}
    return tensors, numbers_of(codes, scales, zeros, in_groups(weight.shape[1], 64))


def gptq(ordered: bool, symmetric: bool) -> Callable[[str, torch.Tensor], tuple[Weights, torch.Tensor]]:
    def pack(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        k = weight.shape[1]
        order = torch.arange(k)
        if ordered:  # the same of projections with the same input
            order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
        codes, scales, zeros = grouped(weight[:, order], 64, symmetric)
        inverse = order.argsort()
        codes, groups = codes[:, inverse], in_groups(k, 64)[inverse]
        path = name.removesuffix(".weight")
        tensors = {
            f"{path}.qweight": words_of(codes, 4).t(),
            f"{path}.qzeros": words_of(zeros.t() - 1, 4),
            f"{path}.scales": scales.t(),
            f"{path}.g_idx": groups.int(),
        }
        return tensors, numbers_of(codes, scales, zeros, groups)

    return pack


def pack_quantized(symmetric: bool) -> Callable[[str, torch.Tensor], tuple[Weights, torch.Tensor]]:
    def pack(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        codes, scales, zeros = grouped(weight, 32 if symmetric else 64, symmetric)
        tensors = {
            f"{name}_packed": words_of(codes, 4),
            f"{name}_scale": scales.bfloat16(),
            f"{name}_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors[f"{name}_zero_point"] = words_of(zeros.t(), 4).t()
        group = weight.shape[1] // scales.shape[1]
        return tensors, numbers_of(codes, scales.bfloat16(), zeros, in_groups(weight.shape[1], group))

    return pack


def int8_packed(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    shape = torch.tensor(weight.shape)
    tensors = {f"{name}_packed": words_of(codes + 128, 8), f"{name}_scale": scales, f"{name}_shape": shape}
    return tensors, codes * scales


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """Experts [experts, k, n] or a dense projection, which gpt-oss keeps plain."""
    if weight.dim() == 2:
        return {name: weight}, weight
    parts = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (parts.abs().amax(3) / 6).log2().ceil().clamp(-20, 20)
    scaled = parts / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - TABLE).abs().argmin(-1)
    codes = nearest + 8 * (scaled < 0)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    numbers = (TABLE[nearest] * torch.where(scaled < 0, -1, 1) * exponents.exp2()[..., None]).flatten(2)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}
    return tensors, numbers.transpose(1, 2)


def nearest_e2m1(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes of 4-bit floats, and their numbers."""
    nearest = (scaled.abs()[..., None] - TABLE).abs().argmin(-1)
    return nearest + 8 * (scaled < 0), TABLE[nearest] * torch.where(scaled < 0, -1, 1)


def nvfp4(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bytes, the scales, the scale of the whole and the numbers."""
    parts = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * 448)
    scales = (parts.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    wide = scales.float()[..., None] * whole
    codes, numbers = nearest_e2m1(parts / wide.clamp_min(1e-20))
    codes = codes.flatten(1)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), scales, whole, (numbers * wide).flatten(1)


def nvfp4_packed(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """As compressed-tensors stores it: the scale of the whole divides, and that of activations is stored too."""
    octets, scales, whole, numbers = nvfp4(name, weight)
    tensors = {f"{name}_packed": octets, f"{name}_scale": scales, f"{name}_global_scale": 1 / whole[None]}
    return tensors | {f"{name.removesuffix('.weight')}.input_global_scale": torch.tensor([3.0])}, numbers


def nvfp4_modelopt(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    octets, scales, whole, numbers = nvfp4(name, weight)
    tensors = {name: octets, f"{name}_scale": scales, f"{name}_scale_2": whole}
    return tensors | {f"{name.removesuffix('.weight')}.input_scale": torch.tensor(3.0)}, numbers


def nf4(nested: bool) -> Callable[[str, torch.Tensor], tuple[Weights, torch.Tensor]]:
    """As bitsandbytes stores it, in blocks of 64; nested: with scales of 8 bits."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        blocks = weight.reshape(-1, 64)
        scales = blocks.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        tensors: Weights = {}
        if nested:
            table, offset = torch.linspace(-1, 1, 256), float(scales.mean())
            apart = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
            of_256 = apart.abs().amax(1)
            chosen = (apart[..., None] / of_256[:, None, None] - table).abs().argmin(-1).flatten()[: len(scales)]
            scales = table[chosen] * of_256.repeat_interleave(256)[: len(scales)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {f"{name}.absmax": chosen.to(torch.uint8), f"{name}.nested_absmax": of_256}
            tensors[f"{name}.nested_quant_map"] = table
        else:
            tensors[f"{name}.absmax"] = scales
        codes = (blocks[..., None] / scales[:, None, None] - NF4).abs().argmin(-1)
        pairs = codes.flatten().to(torch.uint8)
        tensors[name] = (pairs[::2] * 16 + pairs[1::2])[:, None]
        tensors[f"{name}.quant_map"] = NF4.clone()
        octets = list(json.dumps(state).encode())
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(octets, dtype=torch.uint8)
        return tensors, (NF4[codes] * scales[:, None]).view(weight.shape)

    return pack


def compressed(weights: dict[str, Any], layout: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq"}
IN_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
OF_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}},
}
BITSANDBYTES = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "layer_types": ["full_attention"] * 2}
LATENTS = {  # rotary keys fill half a block
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CASES = (
    Case("fp8-tensor", {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor, "fp8"),
    Case("fp8-blocks", BLOCKS, fp8_blocks, "fp8", "qwen3"),
    Case(
        "fp8-channels",
        compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
        fp8_channels,
        "fp8",
    ),
    Case(
        "int8-channels",
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
        int8_channels,
        "int8",
        "qwen2",
    ),
    Case("awq", AWQ, awq, "int4"),
    Case("gptq", {**GPTQ, "sym": True, "desc_act": False}, gptq(False, True), "int4"),
    Case("gptq-act-order", {**GPTQ, "sym": False, "desc_act": True}, gptq(True, False), "int4"),
    Case("packed", compressed({**IN_GROUPS, "group_size": 32}, "pack-quantized"), pack_quantized(True), "int4"),
    Case(
        "packed-zeros",
        compressed({**IN_GROUPS, "group_size": 64, "symmetric": False}, "pack-quantized"),
        pack_quantized(False),
        "int4",
    ),
    Case(
        "packed-int8",
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "pack-quantized"),
        int8_packed,
        "int8",
    ),
    Case("mxfp4", {"quant_method": "mxfp4"}, mxfp4, "mxfp4", "gpt_oss", OSS),
    Case("experts-blocks", BLOCKS, fp8_blocks, "fp8", "qwen3_moe", MOE),
    Case("latents-blocks", BLOCKS, fp8_blocks, "fp8", "deepseek_v3", LATENTS),
    Case("experts-awq", AWQ, awq, "int4", "qwen3_moe", MOE),
    Case("nvfp4", compressed(OF_NVFP4, "nvfp4-pack-quantized"), nvfp4_packed, "nvfp4"),
    Case("nvfp4-modelopt", MODELOPT, nvfp4_modelopt, "nvfp4", "qwen3"),
    Case("experts-nvfp4", MODELOPT, nvfp4_modelopt, "nvfp4", "qwen3_moe", MOE),
    Case("nf4", BITSANDBYTES, nf4(nested=False), "nf4"),
    Case("nf4-nested", BITSANDBYTES | {"bnb_4bit_use_double_quant": True}, nf4(nested=True), "nf4"),
    Case("experts-nf4", BITSANDBYTES, nf4(nested=False), "nf4", "qwen3_moe", MOE),
)
# Qwen3-Next as it is published in fp8, also in its recurrent layers.
RECURRENT = {
    **MOE,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
OF_STATES = Case("states-blocks", BLOCKS, fp8_blocks, "fp8", "qwen3_next", RECURRENT)
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 14,
    "num_position_embeddings": 16,
}
_MISTRAL = {
    "text": {"model_type": "mistral", "sliding_window": None},
    "vision_config": PIXTRAL,
    "image_token_index": 96,
}
_QWEN35 = {
    "text": {**RECURRENT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "vision_config": _QWEN_VISION,
    "image_token_id": 96,
    "video_token_id": 95,
    "vision_start_token_id": 94,
    "vision_end_token_id": 93,
}
# The text parts of models with images: Mistral Small 3.2 has the older names in its files.
OF_TEXT = (
    Case("text-awq", AWQ, awq, "int4", "mistral3", _MISTRAL),
    Case("text-fp8", BLOCKS, fp8_blocks, "fp8", "mistral3", _MISTRAL),
    Case("text-states-fp8", BLOCKS, fp8_blocks, "fp8", "qwen3_5_moe", _QWEN35),
)
