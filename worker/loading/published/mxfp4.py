"""mxfp4 as gpt-oss publishes its experts (OCP Microscaling Formats, version 1.0).

    gate_up_proj_blocks  U8 [experts, 2n, k / 32, 16]   two codes in a byte, the lower bits first
    gate_up_proj_scales  U8 [experts, 2n, k / 32]       exponent + 127 of the factor of 32 numbers

and `down_proj` likewise. A code is a float of 4 bits: 1 of sign, 2 of exponent, 1 of mantissa.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.kernels.code_tables import pack
from kvforge.worker.kernels.stored import Codes

from .format import Tensors, Wanted

GROUP = 32
BIAS = 127


@dataclass(frozen=True)
class Mxfp4:
    """The format. The name of a projection ends with _blocks and _scales in place of a dot and another name."""

    kind: str = "mxfp4"
    label: str = "mxfp4"

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:  # noqa: ARG002
        """Implement `PublishedFormat.covers`: no Linear is stored in mxfp4."""
        return False

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:  # noqa: ARG002
        """Implement `PublishedFormat.wanted`."""
        return ()

    def ignored(self, path: str) -> Sequence[str]:  # noqa: ARG002
        """Implement `PublishedFormat.ignored`."""
        return ()

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:  # noqa: ARG002
        """Implement `PublishedFormat.codes`: of all experts; the tensors are named blocks and scales."""
        return codes_of_experts(tensors["blocks"], tensors["scales"])


def codes_of_experts(blocks: torch.Tensor, scales: torch.Tensor) -> Codes:
    """Return the codes of experts.

    Args:
        blocks: [experts, n, k / 32, 16] uint8.
        scales: [experts, n, k / 32] uint8.

    Raises:
        ValueError: A factor is NaN.
    """
    if bool((scales == 255).any()):
        raise ValueError("scales holds NaN")
    words = [pack(torch.stack((each & 15, each >> 4), -1).flatten(-3), "e2m1", scales.shape[-1]) for each in blocks]
    factors = torch.exp2(scales.float() - BIAS).transpose(1, 2).contiguous()
    return Codes("e2m1", torch.stack(words), factors)


def parse(values: Mapping[str, Any], model: str) -> Mxfp4:  # noqa: ARG001
    """Parse the configuration, which has no settings that matter."""
    return Mxfp4()
