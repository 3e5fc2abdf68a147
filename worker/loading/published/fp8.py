"""fp8 as DeepSeek, Qwen and Mistral publish it: `quant_method` fp8, or the scales in blocks of compressed-tensors.

`X.weight` is e4m3 [n, k]; `X.weight_scale_inv` (or `X.weight_scale`) has one float, or one for each block: a number is
code x scale. Scales of activations (`X.activation_scale`, `X.input_scale`) are not needed: activations keep 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.kernels.code_tables import pack
from kvforge.worker.kernels.stored import Codes

from .format import FLOATS, Tensors, Wanted, refuse

NAMES = ("weight_scale_inv", "weight_scale")
BROKEN = 0x7F  # the code of NaN, without its sign


@dataclass(frozen=True)
class Fp8:
    """The format. block: rows and columns that share a scale; None: one scale, or one for each row."""

    block: tuple[int, int] | None
    kind: str = "fp8"

    @property
    def label(self) -> str:
        """Implement `PublishedFormat.label`."""
        return "fp8" if self.block is None else f"fp8 in blocks of {self.block[0]} x {self.block[1]}"

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Implement `PublishedFormat.covers`: by the type of the weight or the name of a scale."""
        weight = stored.get(f"{path}.weight")
        return (weight is not None and weight.type_name.startswith("F8_")) or any(
            f"{path}.{each}" in stored for each in NAMES
        )

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:
        """Implement `PublishedFormat.wanted`."""
        name = next((each for each in NAMES if f"{path}.{each}" in stored), NAMES[0])
        shape: tuple[int, ...]
        if self.block is not None:
            shape = (-(-n // self.block[0]), -(-k // self.block[1]))
        else:
            found = stored.get(f"{path}.{name}")
            shape = () if found is None else tuple(found.shape)
            if shape not in ((), (1,), (1, 1), (n, 1), (n,)):
                shape = (n, 1)
        return Wanted("weight", ("F8_E4M3",), (n, k)), Wanted(name, FLOATS, shape)

    def ignored(self, path: str) -> Sequence[str]:  # noqa: ARG002
        """Implement `PublishedFormat.ignored`."""
        return "activation_scale", "input_scale"

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:
        """Implement `PublishedFormat.codes`."""
        codes = tensors["weight"].view(torch.uint8)
        if bool((codes & BROKEN == BROKEN).any()):
            raise ValueError("weight holds NaN")
        scales = next(tensors[each] for each in NAMES if each in tensors).float()
        if self.block is None:
            return Codes("e4m3", pack(codes, "e4m3"), scales.reshape(1, -1).expand(1, n).contiguous())
        rows, columns = self.block
        if k % columns:
            raise ValueError(f"weight has {k} columns, which blocks of {columns} do not divide")
        return Codes("e4m3", pack(codes, "e4m3", k // columns), scales.t().contiguous(), scaled_rows=rows)


def parse(values: Mapping[str, Any], model: str) -> Fp8:
    """Parse the configuration.

    Raises:
        UnsupportedModel: It describes other blocks or another format of 8 bits.
    """
    return Fp8(block_of(values.get("weight_block_size"), model))


def block_of(value: Any, model: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None if there are no blocks.

    Raises:
        UnsupportedModel: They are no multiples of 32.
    """
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(b) is int and b > 0 for b in value):
        refuse(model, "weight_block_size", value, "two numbers")
    return int(value[0]), int(value[1])
