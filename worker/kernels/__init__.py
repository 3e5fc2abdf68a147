"""What a decoder layer does between its matrix products, and the small products themselves; the list of all kernels.

`LayerOperations` says what; `plain.py` does it in torch, `fused.py` with one Triton kernel for each operation (norm.py,
rotary.py, activation.py, linear.py, project.py), `packed.py` as plain.py, but with oneDNN's products where a CPU gains
by them (quantised.py: in fewer bits; row_counts.py: of how many rows; packed_table.py: an embedding read out of the
head), `host.py` as packed.py, with one Numba kernel for each operation between them (host_layers.py; host_quantised.py:
around products of int8), one for products in float32 (tiles.py, host_tiles.py), a step of a few decodes laid out
beforehand (host_decoder.py); decoder.py is a whole model of them. For layers that transformers runs: evenly.py puts
functions in the place of torch's, experts.py takes experts one by one.

registry.py     every Triton kernel of the worker, those of attention, sampling and copies too
aot_*.py        what each is compiled for on each architecture; specialise.py: what a launch asks to be compiled
aot.py          compiling for a GPU that is not here; compile.py: all of them, as a command
selftest.py     the kernels of this room against plain torch, at a worker's start

Law: no kernel is launched that the registry does not declare with its configurations, its plain-torch reference and its
check. Outside, `choose_operations`, `decoder.FusedDecoder` and `registry.check_kernels` are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from worker.attention import KvLayer, PagedBatch
from worker.attention.pool import KvPool
from worker.device.device import Device

from .plain import PlainOperations

if TYPE_CHECKING:
    from .decoder import FusedDecoder

__all__ = ["HEAD_SIZE_MAX", "HIDDEN_MAX", "LayerOperations", "PlainOperations", "choose_operations"]
SLAB = 32  # rows of a product that must be the same for any number of rows, where ours and torch's differ
HIDDEN_MAX, HEAD_SIZE_MAX = 16384, 256  # the longest rows of a norm that `fused` is compiled for in the tests


class LayerOperations(Protocol):
    """An implementation. A sum may arrive in parts [parts, tokens, n], added up in their order: see `linear_parts`."""

    def embed(
        self, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of `table`, and their norm.

        tokens: [tokens] int device. table: [vocab, hidden]. weight: [hidden]. Returns two new [tokens, hidden] tensors.
        """

    def add_norm(
        self, addend: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """residual += addend, in place; returns the norm of that [tokens, hidden], new.

        addend: [parts, tokens, hidden]. residual: [tokens, hidden], contiguous.
        """

    def head_norm(
        self,
        projected: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        heads: int,
        kv_heads: int,
        epsilon: float,
    ) -> None:
        """Norms each head of Q and of K on its own, in place (Qwen3).

        projected: [tokens, (heads + 2 x kv_heads) x head_size], contiguous. query_weight, key_weight: [head_size].
        """

    def gated(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """silu(gate) x up, both of x [tokens, k]. weight: [2n, k], bias: [2n], the gate first. Returns [tokens, n]."""

    def rotary(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of a rotary embedding, each [tokens, 2 x n] dtype; both halves are equal.

        positions: [tokens] int device. frequencies: [n] float32. scaling: factor on both.
        """

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x weight^T + bias [tokens, n]. x: [tokens, k]. weight: [n, k]. bias: [n].

        output: [tokens, n] float, contiguous: where it goes, in its dtype; None: new, in the dtype of x.
        """

    def project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KvLayer,
        slots: Callable[[], torch.Tensor],
    ) -> torch.Tensor | None:
        """Q of x rotated, [tokens, heads, head_size], new; K of x is stored rotated, and V as it is. None, with nothing
        done, where `linear` and PagedAttention's `write_rotated` are the way.

        x: [tokens, k]. weight: [(heads + 2 x kv_heads) x head_size, k], bias: of as many, Q first, then K, then V.
        cos, sin: of `rotary`. slots: gives [tokens] int32 device, where in `layer` each token goes; -1: nowhere.
        """

    def linear_parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `linear`, left as a sum [parts, tokens, n] for the next operation to add up: float32 where parts > 1."""

    def decode(
        self,
        decoder: FusedDecoder,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
    ) -> torch.Tensor | None:
        """All layers of a step, from embedding to final norm, [tokens, hidden]: what the others give one by one, bit by
        bit. It holds until the next call. None, with nothing done, where the others are the way.
        """


def choose_operations(device: Device, dtype: torch.dtype) -> LayerOperations:
    """The fastest implementation that `device` can run for a model of `dtype`."""
    if not device.runs_kernels:
        from .packed import PackedOperations, packing_problem  # imports the self-test, and that this file

        if packing_problem(device, dtype):
            return PlainOperations()
        if device.host_kernels_problem:
            return PackedOperations(device)
        from .host import HostOperations  # imports numba

        return HostOperations(device)
    from .fused import FusedOperations  # imports triton

    # Products of float32 are torch's own for any number of rows, and have other bits for each.
    return FusedOperations(device, slab=SLAB if device.steady and dtype == torch.float32 else 0)
