"""Decoder layer operations as Triton kernels, and small matrix products where these are faster than torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, pad

from kvforge.worker.attention import KvLayer
from kvforge.worker.attention.states import StateRows
from kvforge.worker.device.device import Device
from kvforge.worker.device.targets import current_target

from .activation import apply_activation
from .activations import SILU, Activation
from .by_head import by_head
from .combine import combined, normed, normed_heads
from .expert_loop import ExpertMatrices
from .expert_sort import sort_by_expert
from .grouped import Gating, multiply_down, multiply_up, sum_places
from .grouped_tiles import is_even, tiles_for, tokens_per_block
from .interface import SLAB
from .latent_inputs import latent_inputs
from .linear import FEW, MEASURED_TOKENS_MAX, LinearTiles, choose_tiles, linear_parts, steady_parts
from .norm import add_norm, embed_norm, head_norm
from .packed_table import look_up
from .plain import PlainOperations
from .project import can_project, project
from .prompt_delta import choose_tiles as choose_delta_tiles
from .prompt_operations import TritonPrompts
from .recurrent import Convolution, DeltaInputs, GatedDelta, PromptForm
from .recurrent_kernels import advance_delta, can_advance_delta, can_convolve, convolve
from .rotary import rotary
from .router_kernel import route
from .selective import SelectiveInputs, SelectiveSpace
from .selective_kernels import advance_selective, can_advance_selective
from .state_space import StateSpace, StateSpaceInputs
from .state_space_kernels import advance_state_space, can_advance_state_space
from .stored import codes_of
from .stored_experts import stored_block_tokens, stored_down, stored_up
from .stored_linear import stored_linear
from .stored_project import can_project_codes, project_codes
from .wide_linear import can_widen, wide_linear
from .xielu import apply_xielu

NARROW = (torch.float16, torch.bfloat16)


class FusedOperations:
    """Operations on Triton kernels; see LayerOperations. It is the `Launching` of its launches.

    Args:
        device: The GPU.
        overlap: Whether kernels may start before the previous one has ended (see `overlap`); None: if the GPU can.
        slab: Compute all products with torch, this many rows at a time; 0: all rows at once, with the fastest kernel.
    """

    # Each of these computes its operation by one launch.
    embed = embed_norm
    add_norm = add_norm
    head_norm = head_norm
    norm = normed
    norm_heads = normed_heads
    combine = combined
    route = route
    latent_inputs = latent_inputs
    rotary = rotary
    look_up = staticmethod(look_up)

    def __init__(self, device: Device, overlap: bool | None = None, slab: int = 0) -> None:
        self.target = current_target(device)
        self._plain = PlainOperations()
        self._can_widen = device.widens_products
        self.overlap = self.target.chained if overlap is None else overlap
        self.slab = slab

    def gated(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation = SILU,
    ) -> torch.Tensor:
        """Implement `LayerOperations.gated`."""
        return self._activated(x, weight, bias, activation, gated=True)

    def activated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """Implement `LayerOperations.activated`."""
        if activation.kind == "xielu":
            return apply_xielu(self, self.linear(x, weight, bias), activation)
        return self._activated(x, weight, bias, activation, gated=False)

    def _activated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation, *, gated: bool
    ) -> torch.Tensor:
        if (codes := codes_of(weight)) is not None:
            return stored_linear(self, x, codes, bias, x.dtype, activation=activation, gated=gated)[0]
        tiles = self._tiles(x, weight, gated=gated)
        if tiles is None:
            return apply_activation(self, self._product(x, weight, bias), activation, gated)
        found = linear_parts(self, x, weight, bias, tiles, x.dtype, activation=activation, gated=gated)
        return found[0]

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, *others: Any) -> torch.Tensor:
        """Implement `LayerOperations.experts`."""
        chosen = chosen.int().contiguous()
        parts = self.expert_parts(x, chosen, *others)
        return sum_places(self, parts, chosen) if parts.numel() else parts[0]

    def expert_parts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        matrices: ExpertMatrices,
        activation: Activation,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Implement `LayerOperations.expert_parts`."""
        up, down = matrices.up, matrices.down
        assert isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor), "experts in one tensor"
        if not len(x):
            return torch.empty_like(x)[None]
        chosen, weights = chosen.int().contiguous(), weights.float().contiguous()
        experts, width, shared = len(up), chosen.shape[1], matrices.shared
        gating = Gating(activation, gated=up.shape[1] == 2 * down.shape[2], interleaved=interleaved)
        up_codes, down_codes = codes_of(up), codes_of(down)
        if up_codes is not None and down_codes is not None:
            assert not shared, "shared experts beside codes"
            tokens = stored_block_tokens(chosen.numel(), experts, self.target)
            pairs = sort_by_expert(self, chosen, experts, tokens)
            inner = stored_up(self, x, up_codes, matrices.up_bias, gating, pairs, width, tokens)
            return stored_down(self, inner, down_codes, matrices.down_bias, weights, pairs, tokens)
        even = is_even(*up.shape[1:]) and is_even(*down.shape[1:])
        tokens = tokens_per_block(len(x) * (width - shared), experts, x.dtype, self.target, even=even)
        first, second = (tiles_for(tokens, each.shape[1], each.shape[2], x.dtype, self.target) for each in (up, down))
        pairs = sort_by_expert(self, chosen, experts, tokens, shared)
        inner = multiply_up(self, x, up, matrices.up_bias, gating, pairs, width, first, matrices.shared_up)
        return multiply_down(self, inner, down, matrices.down_bias, weights, pairs, second, matrices.shared_down)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `LayerOperations.linear`."""
        if (codes := codes_of(weight)) is not None:
            return stored_linear(self, x, codes, bias, x.dtype, output=None if output is None else output[None])[0]
        tiles = self._tiles(x, weight)
        if tiles is None:
            slab = self._slab(weight)
            if output is not None and output.dtype != x.dtype and bias is None and self._can_widen and not slab:
                return torch.mm(x, weight.t(), out_dtype=output.dtype, out=output)
            if slab:
                found = self._product(x, weight, bias)
                return found if output is None else output.copy_(found)
            return self._plain.linear(x, weight, bias, output)
        into = None if output is None else output[None]
        return linear_parts(self, x, weight, bias, tiles, x.dtype, output=into)[0]

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Implement `LayerOperations.wide_linear`."""
        if can_widen(weight):
            return wide_linear(self, x, weight, bias)
        return self._in_slabs(x.float(), weight, bias, SLAB if self.target.steady else 0)

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `LayerOperations.by_head`."""
        by_torch = self.slab or self._wide_or_without_matrix(x)
        return self._plain.by_head(x, weight, output) if by_torch else by_head(self, x, weight, output)

    def _wide_or_without_matrix(self, x: torch.Tensor) -> bool:
        """Return whether a product of x has no matrix instructions, or not everywhere the same."""
        return self.target.backend != "cpu" and (x.dtype == torch.float32 or not self.target.matrix)

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
        """Implement `LayerOperations.project`."""
        if (codes := codes_of(weight)) is not None:
            if not can_project_codes(x, cos, layer, self.target):
                return None
            return project_codes(self, x, codes, bias, cos, sin, layer, slots())
        tiles = self._tiles(x, weight)
        if tiles is None or not can_project(weight, cos, layer, tiles):
            return None
        return project(self, x, weight, bias, cos, sin, layer, slots(), tiles)

    def linear_parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `LayerOperations.linear_parts`."""
        if (codes := codes_of(weight)) is not None:
            return stored_linear(self, x, codes, bias, x.dtype, divisible=True)
        steady = self.target.steady
        tiles = self._tiles(x, weight, divisible=self._can_widen or not steady)
        if tiles is not None:
            dtype = torch.float32 if tiles.parts > 1 or len(x) <= MEASURED_TOKENS_MAX else x.dtype
            return linear_parts(self, x, weight, bias, tiles, dtype)
        is_split = steady and self._can_widen and not self.slab and x.dtype in NARROW
        parts = steady_parts(len(weight), x.shape[1], self.target) if is_split else 1
        return self._product(x, weight, bias)[None] if parts == 1 else _wide_parts(x, weight, bias, parts)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute torch's product, in slabs padded with zeros where it must not depend on the number of rows."""
        return self._in_slabs(x, weight, bias, self._slab(weight))

    def _in_slabs(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slab: int) -> torch.Tensor:
        """Compute torch's product of `slab` rows at a time; 0: of all rows."""
        if not slab:
            return linear(x, weight, bias)
        count = len(x)
        padded = pad(x, (0, 0, 0, -count % slab))
        return torch.cat([linear(part, weight, bias) for part in padded.split(slab)])[:count]

    def _slab(self, weight: torch.Tensor) -> int:
        """Return the rows of a slab.

        For few results per row, the library's sums vary with the row count, and a trial sees too few to notice.
        """
        return SLAB if not self.slab and self.target.steady and len(weight) <= FEW else self.slab

    def convolve(self, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
        """Implement `StateOperations.convolve`."""
        if not can_convolve(states):
            return self._plain.convolve(x, states, convolution)
        return convolve(self, x, states, convolution)

    def advance_delta(self, inputs: DeltaInputs, states: StateRows, delta: GatedDelta) -> torch.Tensor:
        """Implement `StateOperations.advance_delta`."""
        if not can_advance_delta(states, delta):
            return self._plain.advance_delta(inputs, states, delta)
        return advance_delta(self, inputs, states, delta)

    def advance_state_space(self, inputs: StateSpaceInputs, states: StateRows, space: StateSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_state_space`."""
        if not can_advance_state_space(states, space):
            return self._plain.advance_state_space(inputs, states, space)
        return advance_state_space(self, inputs, states, space)

    def advance_selective(self, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_selective`."""
        if not can_advance_selective(states, space):
            return self._plain.advance_selective(inputs, states, space)
        return advance_selective(self, inputs, states, space)

    def begins(self, _x: torch.Tensor) -> None:
        """Return None: a generated token has tokens before it."""

    def for_prompts(self, dtype: torch.dtype) -> PromptForm | None:
        """Implement `StateOperations.for_prompts`."""
        return None if choose_delta_tiles(self.target, dtype) is None else partial(TritonPrompts, self)

    def for_token_prompts(self, dtype: torch.dtype) -> PromptForm | None:
        """Implement `StateOperations.for_token_prompts`."""
        return self.for_prompts(dtype)

    def decode(self, *_: Any) -> torch.Tensor | None:
        """Return None: captured graphs take this role."""
        return None

    def _tiles(
        self, x: torch.Tensor, weight: torch.Tensor, *, divisible: bool = False, gated: bool = False
    ) -> LinearTiles | None:
        if x.dtype not in NARROW or self.slab:
            return None
        tokens, k = x.shape
        n = len(weight) // 2 if gated else len(weight)
        return choose_tiles(tokens, n, k, self.target, divisible=divisible, gated=gated)


def _wide_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
    """Compute the parts of torch's product in float32, [parts, tokens, n]; see `linear.linear_parts`."""
    found = torch.empty((parts, len(x), len(weight)), dtype=torch.float32, device=x.device)
    for part, some, columns in zip(found, x.chunk(parts, 1), weight.chunk(parts, 1), strict=True):
        torch.mm(some, columns.t(), out_dtype=torch.float32, out=part)
    if bias is not None:
        found[0] += bias
    return found
