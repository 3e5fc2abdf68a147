"""NF4 of bitsandbytes: 16 quantiles of the normal distribution, with a scale for a block of 64 (arXiv 2305.14314).

    weight                              U8 [n k / 2, 1]    two codes a byte, the upper bits first
    weight.absmax                       F32 [blocks]       largest number of a block; U8 where scales are quantised
    weight.quant_map                    F32 [16]           the numbers of the codes
    weight.quant_state.bitsandbytes__nf4  U8               JSON: the shape of the projection and the sizes of blocks

Quantised scales ("double quantisation") are numbers of a table, with a scale for each 256 of them:

    weight.nested_quant_map             F32 [256]
    weight.nested_absmax                F32 [blocks / 256]

A scale is the table's number x its scale + `nested_offset`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.kernels.code_tables import NF4, pack
from kvforge.worker.kernels.stored import Codes

from .format import Tensors, Wanted, by_group, refuse

BLOCKS = (64, 128, 256, 512, 1024)  # 64 unless bitsandbytes runs on ROCm
NESTED_BLOCK = 256
STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclass(frozen=True)
class BitsAndBytes:
    """The format."""

    kind: str = "nf4"
    label: str = "bitsandbytes NF4"

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Implement `PublishedFormat.covers`."""
        weight = stored.get(f"{path}.weight")
        names = ("weight.absmax", "weight.quant_map", STATE)
        return (weight is not None and weight.type_name == "U8") or any(f"{path}.{each}" in stored for each in names)

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:
        """Implement `PublishedFormat.wanted`."""
        scales, state = stored.get(f"{path}.weight.absmax"), stored.get(f"{path}.{STATE}")
        count = n * k // BLOCKS[0]
        if scales is not None and len(scales.shape) == 1:  # any size of blocks that divides a row
            count = next(
                (n * k // each for each in BLOCKS if n * k // each == scales.shape[0] and k % each == 0), count
            )
        wanted = [
            Wanted("weight", ("U8",), (n * k // 2, 1)),
            Wanted("weight.quant_map", ("F32",), (len(NF4),)),
            Wanted(STATE, ("U8",), state.shape if state is not None and len(state.shape) == 1 else (1,)),
        ]
        if scales is not None and scales.type_name == "U8":
            wanted.append(Wanted("weight.nested_quant_map", ("F32",), (256,)))
            wanted.append(Wanted("weight.nested_absmax", ("F32",), (-(-count // NESTED_BLOCK),)))
        return (*wanted, Wanted("weight.absmax", ("F32", "U8"), (count,)))

    def ignored(self, path: str) -> Sequence[str]:  # noqa: ARG002
        """Implement `PublishedFormat.ignored`."""
        return ()

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:
        """Implement `PublishedFormat.codes`."""
        state = _state(tensors[STATE])
        if state.get("shape") != [n, k] or state.get("quant_type") != "nf4":
            found = f"{state.get('quant_type')} {state.get('shape')}"
            raise ValueError(f"{STATE} describes {found}, and has to describe nf4 {[n, k]}")
        table = torch.tensor(NF4, device=tensors["weight.quant_map"].device)
        if not torch.allclose(tensors["weight.quant_map"], table, rtol=0, atol=1e-5):
            raise ValueError("weight.quant_map is not that of NF4")
        scales = tensors["weight.absmax"]
        if scales.dtype == torch.uint8:
            if state.get("nested_blocksize") != NESTED_BLOCK:
                raise ValueError(
                    f"{STATE} has nested_blocksize = {state.get('nested_blocksize')!r}, not {NESTED_BLOCK}"
                )
            nested = tensors["weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(scales)]
            scales = tensors["weight.nested_quant_map"][scales.int()] * nested + _offset(state)
        if state.get("blocksize") != n * k // len(scales):
            raise ValueError(f"weight.absmax has {len(scales)} blocks, and not of {state.get('blocksize')!r} numbers")
        octets = tensors["weight"].view(n, k // 2)
        codes = torch.stack((octets >> 4, octets & 15), -1).flatten(-2)
        scales = by_group(scales.view(n, -1))
        return Codes("nf4", pack(codes, "nf4", len(scales)), scales)


def _state(octets: torch.Tensor) -> dict[str, Any]:
    try:
        found = json.loads(bytes(octets.tolist()))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{STATE} is not a JSON object")
    return found


def _offset(state: Mapping[str, Any]) -> float:
    offset = state.get("nested_offset")
    if not isinstance(offset, int | float):
        raise ValueError(f"{STATE} has nested_offset = {offset!r}, which is not a number")
    return float(offset)


def parse(values: Mapping[str, Any], model: str) -> BitsAndBytes:
    """Parse the configuration.

    Raises:
        UnsupportedModel: It describes 8 bits, or other numbers of 4 bits than NF4.
    """
    if not values.get("load_in_4bit"):
        refuse(model, "load_in_4bit", values.get("load_in_4bit"), "true: of bitsandbytes NF4 is read")
    kind = values.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        refuse(model, "bnb_4bit_quant_type", kind, "nf4")
    storage = values.get("bnb_4bit_quant_storage") or "uint8"
    if storage != "uint8":
        refuse(model, "bnb_4bit_quant_storage", storage, "uint8")
    return BitsAndBytes()
