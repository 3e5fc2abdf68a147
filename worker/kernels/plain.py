"""The operations of a decoder layer in plain torch: right everywhere, and the yardstick for every kernel.

They round where transformers' own layers round (Llama, Mistral, Qwen2, Qwen3): a norm ends in the weights' dtype
before its weight is applied, a sum is rounded before the next norm reads it, and so is SiLU before it multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, pad, silu

from .packed_table import look_up
from .partition import apply_aligned
from .row_counts import padded

MKL_ROWS = 16  # fewer than that take it as long as that many: see `Device.product_rows`


class PlainOperations:
    """See LayerOperations. kernels: the self-test's names of those that are kernels."""

    kernels: tuple[str, ...] = ()

    def embed(
        self, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = look_up(tokens, table)
        return residual, rms_norm(residual, weight, epsilon)

    def add_norm(
        self, addend: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        residual += sum_parts(addend, residual.dtype)
        return rms_norm(residual, weight, epsilon)

    def head_norm(
        self,
        projected: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        heads: int,
        kv_heads: int,
        epsilon: float,
    ) -> None:
        by_head = projected.view(len(projected), -1, len(query_weight))
        query, key = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
        query.copy_(rms_norm(query, query_weight, epsilon))
        key.copy_(rms_norm(key, key_weight, epsilon))

    def gated(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self.product(x, weight, bias).chunk(2, dim=-1)
        return apply_aligned(silu, gate) * up

    def rotary(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output is None:
            return self.product(x, weight, bias)
        if bias is None and output.dtype == x.dtype and not _is_compiled_by_rows(x) and not _missing(x):
            return torch.mm(x, weight.t(), out=output)
        return output.copy_(self.product(x, weight, bias))

    def project(self, *_: Any) -> None:
        """Product, rotation and storing are three operations here."""

    def decode(self, *_: Any) -> torch.Tensor | None:
        """The operations are called one by one."""
        return None

    def linear_parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.product(x, weight, bias)[None]

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x weight^T + bias [tokens, n], new: what all the products here are made of."""
        if _is_compiled_by_rows(x):
            return linear(padded(x), weight, bias)[: len(x)]
        missing = _missing(x)
        return linear(pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)] if missing else linear(x, weight, bias)


def _missing(x: torch.Tensor) -> int:
    """Rows of zeros behind x without which MKL, on a CPU, sums the last ones in another order: it takes four at a time,
    of those that each thread gets."""
    if x.device.type != "cpu" or len(x) >= MKL_ROWS * torch.get_num_threads():
        return 0
    return -len(x) % 4 if len(x) <= 4 or len(x) >= MKL_ROWS else MKL_ROWS - len(x)


def _is_compiled_by_rows(x: torch.Tensor) -> bool:
    """Whether torch leaves a product with x to oneDNN, which keeps what it compiles: of 16 bits on a CPU."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467). Same shape and dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[parts, tokens, n] -> [tokens, n] dtype, summed in float32 in the order of the parts."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)
