"""Decoder layer operations in plain torch: correct everywhere, and the reference for every kernel.

They round where transformers' own layers round (Llama, Mistral, Qwen2, Qwen3): a norm is rounded to the weights' dtype
before its weight is applied, a sum before the next norm reads it, and SiLU before the multiplication.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import torch
from torch.nn.functional import linear, pad, silu, softplus

from kvforge.worker.attention.reference import rotate
from kvforge.worker.attention.states import StateRows

from .activations import SILU, Activation
from .expert_loop import ExpertMatrices, run_one_by_one
from .layer_weights import Norm
from .packed_table import look_up
from .partition import apply_aligned
from .quantised import QuantisedWeight
from .recurrent import SUM_MIN, Convolution, DeltaInputs, GatedDelta, PromptForm
from .router import Router, route
from .row_counts import padded
from .selective import SelectiveInputs, SelectiveSpace, advance_selective_plain
from .state_space import StateSpace, StateSpaceInputs, advance_plain

HEAD_ROWS = 16  # rows of one product of all heads
MKL_ROWS = 16  # fewer rows take as long: see `Device.product_rows`


class PlainOperations:
    """Operations in plain torch; see LayerOperations. kernels: the self-test's names of the operations with kernels."""

    kernels: tuple[str, ...] = ()
    look_up = staticmethod(look_up)

    def embed(
        self, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.embed`."""
        residual = look_up(tokens, table)
        return residual, rms_norm(residual, weight, epsilon)

    def add_norm(
        self, addend: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Implement `LayerOperations.add_norm`."""
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
        """Implement `LayerOperations.head_norm`."""
        by_head = projected.view(len(projected), -1, len(query_weight))
        query, key = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
        query.copy_(rms_norm(query, query_weight, epsilon))
        key.copy_(rms_norm(key, key_weight, epsilon))

    def norm(self, x: torch.Tensor, norm: Norm, output: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `LayerOperations.norm`."""
        normed = normalise(x, norm)
        return normed if output is None else output.copy_(normed)

    def norm_heads(self, projected: torch.Tensor, query: Norm, key: Norm, heads: int, kv_heads: int) -> None:
        """Implement `LayerOperations.norm_heads`."""
        by_head = projected.view(len(projected), -1, len(query.weight))
        for norm, part in ((query, by_head[:, :heads]), (key, by_head[:, heads : heads + kv_heads])):
            part.copy_(normalise(part, norm))

    def combine(
        self,
        addend: torch.Tensor,
        residual: torch.Tensor,
        after: Norm | None,
        scale: float,
        following: Norm | None,
    ) -> torch.Tensor:
        """Implement `LayerOperations.combine`."""
        total = sum_parts(addend, residual.dtype)
        if after is not None:
            total = self.norm(total, after)
        if scale != 1.0:
            total = total * scale
        residual += total
        return residual if following is None else self.norm(residual, following)

    def gated(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation = SILU,
    ) -> torch.Tensor:
        """Implement `LayerOperations.gated`."""
        gate, up = self.product(x, weight, bias).chunk(2, dim=-1)
        return activation.gate(gate, up)

    def activated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """Implement `LayerOperations.activated`."""
        return activation.apply(self.product(x, weight, bias))

    def route(
        self,
        logits: torch.Tensor,
        router: Router,
        bias: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.route`."""
        logit = None if x is None or shared_gate is None else self.product(x, shared_gate, None)
        if logits.dim() == 3:
            logits = reduce(torch.add, logits)
            logits = logits if x is None else logits.to(x.dtype)
        return route(logits, router, bias, factors, logit)

    def experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        matrices: ExpertMatrices,
        activation: Activation,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Implement `LayerOperations.experts`."""
        up_bias, down_bias = matrices.up_bias, matrices.down_bias

        def run(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            first = None if up_bias is None else up_bias[expert]
            up, down = matrices.of(expert)
            inner = self.product(tokens, up, first)
            if inner.shape[1] == down.shape[1]:
                inner = activation.apply(inner)
            else:
                halves = (inner[:, ::2], inner[:, 1::2]) if interleaved else inner.chunk(2, dim=-1)
                inner = activation.gate(*halves)
            return self.product(inner, down, None if down_bias is None else down_bias[expert])

        return run_one_by_one(run, x, chosen, weights)

    def expert_parts(self, *arguments: Any) -> torch.Tensor:
        """Implement `LayerOperations.expert_parts`."""
        return self.experts(*arguments)[None]

    def rotary(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.rotary`."""
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
        """Implement `LayerOperations.linear`."""
        if output is None:
            return self.product(x, weight, bias)
        is_plain = bias is None and output.dtype == x.dtype and not isinstance(weight, QuantisedWeight)
        if is_plain and not _is_compiled_by_rows(x) and not _missing(x):
            return torch.mm(x, weight.t(), out=output)
        return output.copy_(self.product(x, weight, bias))

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Implement `LayerOperations.wide_linear`."""
        return self.product(x.float(), weight, bias)

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `LayerOperations.by_head`, with products of one shape, so that no row's sums depend on others."""
        if output is None:
            output = x.new_empty((*x.shape[:2], weight.shape[2]))
        for first in range(0, len(x), HEAD_ROWS):
            rows = x[first : first + HEAD_ROWS].transpose(0, 1)
            count = rows.shape[1]
            found = torch.bmm(pad(rows, (0, 0, 0, HEAD_ROWS - count)), weight.to(x.dtype))
            output[first : first + count] = found[:, :count].transpose(0, 1)
        return output

    def latent_inputs(
        self,
        own: torch.Tensor,
        queries: torch.Tensor,
        norm: Norm | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        absorbed: torch.Tensor,
    ) -> torch.Tensor:
        """Implement `LayerOperations.latent_inputs`."""
        latents, keys = own[:, : -queries.shape[2]], own[:, -queries.shape[2] :]
        absorbed.copy_(rotate(queries, cos, sin))
        stored = torch.empty_like(own, memory_format=torch.contiguous_format)
        kept = stored[:, : latents.shape[1]]
        kept.copy_(latents) if norm is None else self.norm(latents, norm, kept)
        stored[:, latents.shape[1] :] = rotate(keys[:, None], cos, sin)[:, 0]
        return stored

    def convolve(self, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
        """Implement `StateOperations.convolve`."""
        gate, given = None, x
        if convolution.is_gated:
            factor, gate, given = x.chunk(3, dim=1)
            given = factor * given
        state = states.read()
        state = torch.cat((state[..., 1:], given.to(state.dtype)[..., None]), dim=-1)
        states.write(state)
        weight, wide = convolution.weight.float(), state.float()
        total = weight[:, 0] * wide[..., 0]
        for tap in range(1, weight.shape[1]):  # a sum over the last dimension might depend on the number of rows
            total = total + weight[:, tap] * wide[..., tap]
        if convolution.bias is not None:
            total = total + convolution.bias.float()
        found = total.to(x.dtype)
        if convolution.has_silu:
            found = apply_aligned(silu, found)
        return found if gate is None else gate * found

    def advance_delta(self, inputs: DeltaInputs, states: StateRows, delta: GatedDelta) -> torch.Tensor:
        """Implement `StateOperations.advance_delta`, row by row, so that every sum has one shape."""
        state, rows = states.read().float(), []
        for row in range(len(state)):
            query, key, value = inputs.mixed[row].split(delta.parts)
            query, key = (_of_length_1(each, delta) for each in (query, key))
            query = query / delta.key_size**0.5
            held = state[row] * log_decays(inputs.decay[row], delta).exp()[..., None]
            missing = value.float().view(delta.value_heads, -1) - (held * key[..., None]).sum(1)
            missing = missing * inputs.beta[row].sigmoid().float()[:, None]
            state[row] = held = held + key[..., None] * missing[:, None]
            found = (held * query[..., None]).sum(1).to(inputs.mixed.dtype)
            rows.append(norm_with_gate(found, inputs.gate[row], delta).flatten())
        states.write(state)
        return torch.stack(rows)

    def advance_state_space(self, inputs: StateSpaceInputs, states: StateRows, space: StateSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_state_space`."""
        return advance_plain(inputs, states, space)

    def advance_selective(self, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_selective`."""
        return advance_selective_plain(inputs, states, space)

    def begins(self, _x: torch.Tensor) -> None:
        """Return None: a generated token has tokens before it."""

    def for_prompts(self, _dtype: torch.dtype) -> PromptForm | None:
        """Return None: in plain torch, transformers' modules are as fast."""
        return None

    def for_token_prompts(self, _dtype: torch.dtype) -> PromptForm | None:
        """Return None, as `for_prompts`."""
        return None

    def project(self, *_: Any) -> None:
        """Return None: product, rotation and storing are separate operations here."""

    def decode(self, *_: Any) -> torch.Tensor | None:
        """Return None: the operations are called one by one."""
        return None

    def linear_parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `LayerOperations.linear_parts`."""
        return self.product(x, weight, bias)[None]

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute x weight^T + bias [tokens, n], a new tensor, for all products of this class."""
        if isinstance(weight, QuantisedWeight):
            return weight.product(x, bias)
        if _is_compiled_by_rows(x):
            return linear(padded(x), weight, bias)[: len(x)]
        missing = _missing(x)
        return linear(pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)] if missing else linear(x, weight, bias)


def _missing(x: torch.Tensor) -> int:
    """Return the rows of zeros to append to x, so that MKL sums all rows in the same order on a CPU.

    MKL processes four rows at a time of those that each thread gets.
    """
    if x.device.type != "cpu" or len(x) >= MKL_ROWS * torch.get_num_threads():
        return 0
    return -len(x) % 4 if len(x) <= _few_rows() or len(x) >= MKL_ROWS else MKL_ROWS - len(x)


@cache
def _few_rows() -> int:
    """Return up to how many rows MKL sums four as it does MKL_ROWS: 4, or 0 where few have kernels of their own.

    These are those of Intel's CPUs with AVX-512.
    """
    generator, like = torch.Generator().manual_seed(0), torch.empty(0, dtype=torch.float32, device="cpu")
    x, weight = (like.new_empty((rows, 64)).normal_(generator=generator) for rows in (MKL_ROWS, 3))
    return 4 if torch.equal(linear(x[:4], weight), linear(x, weight)[:4]) else 0


def _is_compiled_by_rows(x: torch.Tensor) -> bool:
    """Return whether torch passes a product with x to oneDNN, which caches compiled code: 16 bits on a CPU."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def _of_length_1(heads: torch.Tensor, delta: GatedDelta) -> torch.Tensor:
    """Return queries or keys of length 1 for each head of values, [value heads, key_size] float32."""
    wide = heads.float().view(delta.key_heads, -1)
    wide = wide * torch.rsqrt((wide * wide).sum(1, keepdim=True) + SUM_MIN)
    return wide.repeat_interleave(delta.groups, dim=0)


def log_decays(decay: torch.Tensor, delta: GatedDelta) -> torch.Tensor:
    """Return the logarithms of the decays of states, [..., value heads, `GatedDelta.decays`] float32, all negative.

    decay: [..., value heads x `GatedDelta.decays`], as `DeltaInputs.decay`.
    """
    steps = softplus(decay.float() + delta.biases)
    return delta.rates[:, None] * steps.unflatten(-1, (delta.value_heads, -1))


def norm_with_gate(found: torch.Tensor, gate: torch.Tensor, delta: GatedDelta) -> torch.Tensor:
    """Return the gated norm of the results of heads [..., value heads, value_size]; keeps the dtype.

    gate: [..., value heads x value_size].
    """
    wide = gate.float().view(found.shape)
    if not delta.has_sigmoid:
        return (rms_norm(found, delta.weight, delta.epsilon) * silu(wide)).to(found.dtype)
    normed = rms_norm(found.float(), delta.weight.float(), delta.epsilon)
    return (normed * wide.sigmoid()).to(found.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise the last dimension by its root mean square (Zhang and Sennrich, arXiv 1910.07467). Keeps the dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def normalise(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Normalise the last dimension of x [..., n]. Keeps the dtype."""
    if norm.is_plain:
        return rms_norm(x, norm.weight, norm.epsilon)
    wide = x.float()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * apply_aligned(torch.rsqrt, wide.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.rounds_first:
        wide = wide.to(x.dtype).float()
    wide = wide * (norm.weight.float() + norm.offset)
    return (wide if norm.bias is None else wide + norm.bias.float()).to(x.dtype)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum parts [parts, tokens, n] in float32 in their order; return [tokens, n] in `dtype`."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)
