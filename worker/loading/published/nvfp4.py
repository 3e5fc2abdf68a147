"""nvfp4, weights only: 4-bit floats with an e4m3 scale for 16 columns and one float32 scale for the projection.

                        compressed-tensors       ModelOpt
    two codes a byte    weight_packed            weight          U8 [n, k / 2], the lower bits first
    scales              weight_scale             weight_scale    F8_E4M3 [n, k / 16]
    the projection's    weight_global_scale      weight_scale_2  F32, one; the first divides, the second multiplies

A code is a float of 4 bits: 1 of sign, 2 of exponent, 1 of mantissa. Activations keep 16 bits, whatever the
configuration plans for them, so that their scales (`X.input_global_scale`, `X.input_scale`) are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.kernels.code_tables import pack
from kvforge.worker.kernels.stored import Codes

from .format import Tensors, Wanted, refuse
from .fp8 import BROKEN, Fp8

GROUP = 16
IGNORED = ("input_global_scale", "input_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Nvfp4:
    """The format. codes_name, scale_name: tensors of the codes and of the projection's scale. divides: see above."""

    codes_name: str
    scale_name: str
    divides: bool
    kind: str = "nvfp4"
    label: str = "nvfp4"

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Implement `PublishedFormat.covers`."""
        weight = stored.get(f"{path}.{self.codes_name}")
        has_codes = weight is not None and (self.codes_name != "weight" or weight.type_name == "U8")
        return has_codes or any(f"{path}.{each}" in stored for each in ("weight_scale", self.scale_name))

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:
        """Implement `PublishedFormat.wanted`."""
        found = stored.get(f"{path}.{self.scale_name}")
        of_scale = () if found is not None and not found.shape else (1,)
        return (
            Wanted(self.codes_name, ("U8",), (n, k // 2)),
            Wanted("weight_scale", ("F8_E4M3",), (n, k // GROUP)),
            Wanted(self.scale_name, ("F32",), of_scale),
        )

    def ignored(self, path: str) -> Sequence[str]:  # noqa: ARG002
        """Implement `PublishedFormat.ignored`."""
        return IGNORED

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:  # noqa: ARG002
        """Implement `PublishedFormat.codes`."""
        octets = tensors[self.codes_name]
        codes = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
        factors = tensors["weight_scale"].view(torch.uint8)
        if bool((factors & BROKEN == BROKEN).any()):
            raise ValueError("weight_scale holds NaN")
        four = factors.contiguous().view(torch.int32).t().contiguous()
        scale = tensors[self.scale_name].float().reshape(1, 1)
        scales = (1 / scale if self.divides else scale).expand(1, n).contiguous()
        return Codes("e2m1", pack(codes, "e2m1"), scales, factors=four, format="nvfp4")


def of_compressed_tensors(weights: Mapping[str, Any], model: str) -> Nvfp4:
    """Return the format of weights that compressed-tensors describes as nvfp4-pack-quantized.

    Raises:
        UnsupportedModel: They have other groups or numbers.
    """
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP}
    for name, value in wanted.items():
        if weights.get(name) != value:
            refuse(model, name, weights.get(name), f"{value!r} of nvfp4-pack-quantized")
    return Nvfp4("weight_packed", "weight_global_scale", divides=True)


def parse_modelopt(values: Mapping[str, Any], model: str) -> Nvfp4 | Fp8:
    """Parse the configuration of ModelOpt, from config.json or from its own hf_quant_config.json.

    Raises:
        UnsupportedModel: It describes another algorithm.
    """
    own = values.get("quantization")
    values = own if isinstance(own, dict) else values
    algorithm = values.get("quant_algo")
    if algorithm == "FP8":
        return Fp8(None)
    if algorithm != "NVFP4":
        refuse(model, "quant_algo", algorithm, "NVFP4 or FP8")
    groups = values.get("config_groups")
    described = list(groups.values()) if isinstance(groups, dict) else [{"weights": values}]
    for each in described:
        weights = each.get("weights") if isinstance(each, dict) else None
        size = weights.get("group_size", GROUP) if isinstance(weights, dict) else None
        if size != GROUP:
            refuse(model, "group_size", size, str(GROUP))
    return Nvfp4("weight", "weight_scale_2", divides=False)
