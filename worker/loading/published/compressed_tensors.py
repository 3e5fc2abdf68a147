"""compressed-tensors: fp8, int8, nvfp4, and int4 and int8 in words (github.com/vllm-project/compressed-tensors).

    float-quantized  weight F8_E4M3 [n, k], weight_scale: one, [n, 1], or one for each block
    int-quantized    weight I8 [n, k], weight_scale [n, 1] or one
    pack-quantized   weight_packed I32 [n, k / codes of a word], weight_scale [n, groups], weight_shape I64 [2],
                     weight_zero_point I32 [n / codes of a word, groups], weight_g_idx I32 [k]
    nvfp4-pack-quantized  see `nvfp4`

Packed codes and zeros are stored 2^(bits - 1) higher, the lowest bits first. A number is (code - zero) x scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.kernels.code_tables import pack
from kvforge.worker.kernels.stored import Codes

from .format import FLOATS, GROUP_SIZES, Tensors, Wanted, by_group, refuse, unpacked, whole_number
from .fp8 import Fp8, block_of
from .gptq import order_of
from .nvfp4 import Nvfp4, of_compressed_tensors

STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
NVFP4 = "nvfp4-pack-quantized"
FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", NVFP4)
IGNORED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


@dataclass(frozen=True)
class IntQuantized:
    """int8 with a scale for each row or the whole."""

    kind: str = "int8"
    label: str = "compressed-tensors int8"

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Implement `PublishedFormat.covers`."""
        weight = stored.get(f"{path}.weight")
        return f"{path}.weight_scale" in stored or (weight is not None and weight.type_name == "I8")

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:
        """Implement `PublishedFormat.wanted`."""
        found = stored.get(f"{path}.weight_scale")
        is_one = found is not None and tuple(found.shape) in ((), (1,))
        shape = tuple(found.shape) if found is not None and is_one else (n, 1)
        return Wanted("weight", ("I8",), (n, k)), Wanted("weight_scale", FLOATS, shape)

    def ignored(self, path: str) -> Sequence[str]:  # noqa: ARG002
        """Implement `PublishedFormat.ignored`."""
        return IGNORED

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:  # noqa: ARG002
        """Implement `PublishedFormat.codes`."""
        scales = tensors["weight_scale"].float().reshape(1, -1).expand(1, n).contiguous()
        return Codes("int8", pack(tensors["weight"].view(torch.uint8), "int8"), scales)


@dataclass(frozen=True)
class PackQuantized:
    """int4 or int8 in words. group: columns that share a scale; 0: all. has_zeros: whether groups have zeros."""

    bits: int
    group: int
    has_zeros: bool

    @property
    def kind(self) -> str:
        """Implement `PublishedFormat.kind`."""
        return f"int{self.bits}"

    @property
    def label(self) -> str:
        """Implement `PublishedFormat.label`."""
        return f"compressed-tensors int{self.bits}" + (f" in groups of {self.group}" if self.group else "")

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Implement `PublishedFormat.covers`."""
        return any(f"{path}.{each}" in stored for each in ("weight_packed", "weight_scale", "weight_shape"))

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:
        """Implement `PublishedFormat.wanted`."""
        word, groups = 32 // self.bits, k // (self.group or k)
        more = []
        if self.has_zeros:
            more.append(Wanted("weight_zero_point", ("I32",), (-(-n // word), groups)))
        if f"{path}.weight_g_idx" in stored:
            more.append(Wanted("weight_g_idx", ("I32",), (k,)))
        return (
            Wanted("weight_packed", ("I32",), (n, -(-k // word))),
            Wanted("weight_scale", FLOATS, (n, groups)),
            Wanted("weight_shape", ("I64", "I32"), (2,)),
            *more,
        )

    def ignored(self, path: str) -> Sequence[str]:  # noqa: ARG002
        """Implement `PublishedFormat.ignored`."""
        return IGNORED

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:
        """Implement `PublishedFormat.codes`."""
        group = self.group or k
        if k % group:
            raise ValueError(f"weight_packed has {k} columns, which groups of {group} do not divide")
        if tensors["weight_shape"].tolist() != [n, k]:
            raise ValueError(f"weight_shape is {tensors['weight_shape'].tolist()}, and has to be {[n, k]}")
        codes = unpacked(tensors["weight_packed"], self.bits)[:, :k]
        order = order_of(tensors["weight_g_idx"], group) if "weight_g_idx" in tensors else None
        codes = codes if order is None else codes[:, order]
        scales = by_group(tensors["weight_scale"])
        if self.bits == 8:
            return Codes("int8", pack(codes ^ 128, "int8", len(scales)), scales, order=order)
        zeros = None
        if self.has_zeros:
            zeros = unpacked(tensors["weight_zero_point"].t().contiguous(), 4)[:, :n].contiguous()
        return Codes("int4", pack(codes, "int4", len(scales)), scales, zeros, order=order)


def parse(values: Mapping[str, Any], model: str) -> Fp8 | IntQuantized | PackQuantized | Nvfp4:
    """Parse the configuration.

    Raises:
        UnsupportedModel: It describes numbers or scales that kvforge does not read.
    """
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        refuse(model, "config_groups", groups, "one group for all projections")
    (only,) = groups.values()
    weights = only.get("weights") if isinstance(only, dict) else None
    if not isinstance(weights, dict):
        refuse(model, "config_groups", only, "an object with weights")
    layout = only.get("format") or values.get("format")
    strategy = weights.get("strategy")
    if layout not in FORMATS:
        refuse(model, "format", layout, " or ".join(FORMATS))
    if strategy not in STRATEGIES:
        refuse(model, "strategy", strategy, " or ".join(STRATEGIES))
    if values.get("kv_cache_scheme"):
        refuse(model, "kv_cache_scheme", values["kv_cache_scheme"], "none")
    if values.get("sparsity_config", {}).get("format", "dense") != "dense":
        refuse(model, "sparsity_config", values["sparsity_config"], "none")
    return _of_weights(weights, layout, strategy, model)


def _of_weights(
    weights: Mapping[str, Any], layout: str, strategy: str, model: str
) -> Fp8 | IntQuantized | PackQuantized | Nvfp4:
    kind = weights.get("type")
    if layout == NVFP4:
        return of_compressed_tensors(weights, model)
    if layout == "pack-quantized":
        bits = whole_number(weights, "num_bits", model, (4, 8))
        group = whole_number(weights, "group_size", model, GROUP_SIZES) if strategy == "group" else 0
        if kind != "int" or strategy not in ("group", "channel"):
            refuse(model, "weights", dict(weights), "int in groups or channels")
        has_zeros = weights.get("symmetric", True) is False
        if has_zeros and bits == 8:
            refuse(model, "symmetric", False, "symmetric codes of 8 bits")
        return PackQuantized(bits, group, has_zeros)
    whole_number(weights, "num_bits", model, (8,))
    if weights.get("symmetric", True) is False:
        refuse(model, "symmetric", False, "symmetric codes of 8 bits")
    if kind == "float" and strategy == "block":
        return Fp8(block_of(weights.get("block_structure"), model))
    if kind == "float" and strategy in ("tensor", "channel"):
        return Fp8(None)
    if kind != "int" or strategy not in ("tensor", "channel"):
        refuse(model, "weights", dict(weights), "fp8 or int8 for a tensor, channel or block")
    return IntQuantized()
