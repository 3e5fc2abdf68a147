"""Layers with a recurrent state: what their steps of one token consist of, and the operations of these steps.

A step reads the states of all rows from their pages, computes one token of each row, and writes the states back. The
bits of a row depend on no other row. Prompts run through the chunked form of the same operations where a device has it
(`StateOperations.for_prompts`), else through transformers' modules (see `loading.mixers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.states import StateRows

from .prompt_rows import PromptRows
from .selective import SelectiveInputs, SelectiveSpace
from .state_space import StateSpace, StateSpaceInputs

CONVOLUTION, RECURRENT = "conv 0", "recurrent 0"  # names of states
SUM_MIN = 1e-6  # added to the sum of squares of a query or a key, before it is divided by the root


@dataclass(frozen=True)
class Convolution:
    """A short causal convolution of each channel by itself, over the last inputs of a sequence.

    Its state is these inputs, [1, channels, taps], the newest one last.

    Attributes:
        weight: [channels, taps], contiguous.
        bias: [channels], or None.
        is_gated: Whether it has three inputs b, c and x of a channel, convolves b x, and multiplies the result by c
            (LFM2).
        has_silu: Whether SiLU is applied to the result.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_gated: bool = False
    has_silu: bool = False

    @property
    def inputs(self) -> int:
        """Numbers of a token's input."""
        return len(self.weight) * (3 if self.is_gated else 1)


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta rule (arXiv 2412.06464), and the gated norm of its result.

    With a head's state S [key_size, value_size], and q and k of length 1 (q then divided by the root of key_size):

        S = exp(rate * softplus(a + bias)) S
        S = S + k (sigmoid(b) (v - k^T S))
        result = weight * norm(q^T S) * silu(gate)

    Several heads of values have the same query and key. In Kimi delta attention (arXiv 2510.26692) each number of a key
    has a decay of its own: a and bias have key_size numbers for each head, and exp(...) multiplies the lines of S.

    Attributes:
        key_heads: Heads of queries and keys.
        key_size: Numbers of a query or a key.
        rates: [value heads] float32.
        biases: [value heads] float32, or [value heads x key_size] by channel.
        weight: [value_size], of the norm of a head's result.
        epsilon: Of this norm.
        is_by_channel: Whether each number of a key has a decay of its own, not each head.
        has_sigmoid: Whether a sigmoid of the gate takes the place of SiLU, and the result is rounded once, at the end.
    """

    key_heads: int
    key_size: int
    rates: torch.Tensor
    biases: torch.Tensor
    weight: torch.Tensor
    epsilon: float
    is_by_channel: bool = False
    has_sigmoid: bool = False

    @property
    def value_heads(self) -> int:
        """Heads of values, each with a state."""
        return len(self.rates)

    @property
    def value_size(self) -> int:
        """Numbers of a value."""
        return len(self.weight)

    @property
    def groups(self) -> int:
        """Value heads with the same query and key, which follow each other."""
        return self.value_heads // self.key_heads

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of the state."""
        return 1, self.value_heads, self.key_size, self.value_size

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of all queries, keys and values of a token."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Numbers of a token in each of `DeltaInputs`."""
        return sum(self.parts), self.parts[2], self.value_heads, self.value_heads * self.decays

    @property
    def decays(self) -> int:
        """Decays of a head."""
        return self.key_size if self.is_by_channel else 1


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of a gated delta rule, one token of each row. All have contiguous rows and one dtype.

    Attributes:
        mixed: [rows, sum of `GatedDelta.parts`], queries, keys and values.
        gate: [rows, value heads x value_size].
        beta: [rows, value heads], b.
        decay: [rows, value heads x `GatedDelta.decays`], a.
    """

    mixed: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor


class StateOperations(Protocol):
    """The operations of steps; a part of `LayerOperations`."""

    def convolve(self, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
        """Advance a short convolution by one token of each row, and write the states.

        Args:
            x: [rows, inputs], the last dimension contiguous; if it is gated, b, then c, then x.
            states: The last inputs of each row.
            convolution: The convolution.

        Returns:
            [rows, channels], a new tensor in the dtype of x.
        """

    def advance_delta(self, inputs: DeltaInputs, states: StateRows, delta: GatedDelta) -> torch.Tensor:
        """Advance a gated delta rule by one token of each row, and write the states.

        Args:
            inputs: The inputs.
            states: The states of all heads.
            delta: The rule.

        Returns:
            [rows, value heads x value_size], a new tensor in the dtype of the inputs.
        """

    def advance_state_space(self, inputs: StateSpaceInputs, states: StateRows, space: StateSpace) -> torch.Tensor:
        """Advance state spaces by one token of each row, and write the states.

        Args:
            inputs: The inputs.
            states: The states of all heads.
            space: The state spaces.

        Returns:
            [rows, heads x head_size], a new tensor in the dtype of the inputs.
        """

    def advance_selective(self, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
        """Advance selective state spaces by one token of each row, and write the states.

        Args:
            inputs: The inputs.
            states: The states of all channels.
            space: The state spaces.

        Returns:
            [rows, channels], a new tensor in the dtype of the inputs.
        """

    def begins(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return which tokens are the first of their sequence.

        Args:
            x: [tokens, n], of the step.

        Returns:
            [tokens] bool; None: no token is.
        """

    def for_prompts(self, dtype: torch.dtype) -> PromptForm | None:
        """Return the form of these operations for prompts of a dtype; None: transformers' modules compute them."""

    def for_token_prompts(self, dtype: torch.dtype) -> PromptForm | None:
        """Return the form for prompts that run token by token (Mamba 1), as `for_prompts`."""


class DenseOperations(Protocol):
    """The operations of a step that keep no state; a part of `LayerOperations`."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `LayerOperations.linear`."""

    def norm(self, x: torch.Tensor, norm: Any, output: torch.Tensor | None = None) -> torch.Tensor:
        """See `LayerOperations.norm`. norm: a `layer_weights.Norm`, which refers to this file."""

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """See `LayerOperations.by_head`."""


class StepOperations(StateOperations, DenseOperations, Protocol):
    """All operations of steps."""


PromptForm = Callable[[PromptRows], StateOperations]
"""`convolve` and `advance_delta` over prompt rows, instead of one token of each row.

Inputs and results then have all tokens of a step; results of tokens outside the rows are undefined.
"""


class MixerStep(Protocol):
    """The step of one layer, between the projections of its input and that of its result."""

    @property
    def convolution(self) -> Convolution | None:
        """Its convolution; None: it has none."""

    @property
    def delta(self) -> GatedDelta | None:
        """Its gated delta rule; None: it has none."""

    @property
    def space(self) -> StateSpace | None:
        """Its state spaces; None: it has none."""

    @property
    def selective(self) -> SelectiveSpace | None:
        """Its selective state spaces; None: it has none."""

    @property
    def products(self) -> tuple[torch.Tensor, ...]:
        """The weights of products within the step: [n, k], or [heads, k, n] of each head by itself."""

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the projections that it needs."""

    def run(
        self,
        operations: StateOperations,
        dense: DenseOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Compute one token of each row.

        Args:
            operations: The operations.
            dense: Those that keep no state.
            projected: The projections of the input, by the names of their modules, [rows, n] each.
            states: Returns a tensor of the rows' states by its name.

        Returns:
            The input of the last projection, [rows, n].
        """


def form_of_prompts(step: MixerStep, operations: StateOperations, dtype: torch.dtype) -> PromptForm | None:
    """Return the form of operations for the prompts of a step; None: transformers' modules compute them."""
    return operations.for_prompts(dtype) if step.selective is None else operations.for_token_prompts(dtype)


class Mixer(Protocol):
    """What a layer has in place of attention."""

    @property
    def step(self) -> MixerStep | None:
        """The step of generated tokens; None: they run through transformers' module, row by row."""

    def runs_prompts(self, operations: StepOperations, dtype: torch.dtype) -> bool:
        """Return whether the operations compute prompt tokens in `dtype` too, so that a graph may have them."""

    def __call__(
        self, operations: StepOperations, normed: torch.Tensor, batch: PagedBatch, pool: KvPool
    ) -> torch.Tensor:
        """Return what is added to the residual, [tokens, hidden], from the normed tokens of a step."""


@dataclass(frozen=True)
class ConvolutionStep:
    """The step of a layer that is a short convolution between two projections.

    Attributes:
        convolution: The convolution.
        projection: The name of the projection of its input.
        delta: None.
        space: None.
        selective: None.
        products: None.
    """

    convolution: Convolution
    projection: str
    delta: None = None
    space: None = None
    selective: None = None
    products: tuple[()] = ()

    @property
    def projections(self) -> tuple[str, ...]:
        """Implement `MixerStep.projections`."""
        return (self.projection,)

    def run(
        self,
        operations: StateOperations,
        _dense: DenseOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Implement `MixerStep.run`."""
        return operations.convolve(projected[self.projection], states(CONVOLUTION), self.convolution)


@dataclass(frozen=True)
class DeltaStep:
    """The step of a layer with a convolution of queries, keys and values and a gated delta rule.

    Attributes:
        convolution: The convolution.
        delta: The rule.
        projections: The names of the projections to queries, keys and values, to the gate, to b and to a. Two names:
            the first has all but b and a, the second these two, and both are cut by heads of keys (Qwen3-Next).
        orders: For two projections: the place of each number of queries, keys, values and the gate in the first, then
            of b and a in the second, int64; see `orders_of`.
        space: None.
        selective: None.
        products: None.
    """

    convolution: Convolution
    delta: GatedDelta
    projections: tuple[str, ...]
    orders: tuple[torch.Tensor, torch.Tensor] | None = None
    space: None = None
    selective: None = None
    products: tuple[()] = ()

    def run(
        self,
        operations: StateOperations,
        _dense: DenseOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Implement `MixerStep.run`."""
        given = [projected[name] for name in self.projections]
        mixed, gate, beta, decay = given if self.orders is None else self._by_kind(given, self.orders)
        mixed = operations.convolve(mixed, states(CONVOLUTION), self.convolution)
        return operations.advance_delta(DeltaInputs(mixed, gate, beta, decay), states(RECURRENT), self.delta)

    def _by_kind(
        self, given: list[torch.Tensor], orders: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, the gate, b and a of projections that are cut by heads of keys."""
        numbers, factors = (each.index_select(1, order) for each, order in zip(given, orders, strict=True))
        values = self.delta.value_heads * self.delta.value_size
        mixed, gate = numbers.split((numbers.shape[1] - values, values), dim=1)
        return mixed, gate, *factors.chunk(2, dim=1)


def orders_of(delta: GatedDelta, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order by kind of numbers that are cut by heads of keys, each with its query, key, values and gates."""
    values = delta.groups * delta.value_size
    sizes = (delta.key_size, delta.key_size, values, values)
    places = torch.arange(delta.key_heads * sum(sizes), device=device).view(delta.key_heads, -1)
    factors = torch.arange(2 * delta.value_heads, device=device).view(delta.key_heads, 2, -1)
    return torch.cat([part.flatten() for part in places.split(sizes, dim=1)]), factors.transpose(0, 1).flatten()


@dataclass(frozen=True)
class StateSpaceStep:
    """The step of a layer with a convolution of x, B and C and state spaces (Mamba 2).

    Attributes:
        convolution: The convolution.
        space: The state spaces.
        projection: The name of the projection to the gate, x, B and C, and time steps.
        factors: [numbers of the projection], factors of its results; None: none.
        delta: None.
        selective: None.
        products: None.
    """

    convolution: Convolution
    space: StateSpace
    projection: str
    factors: torch.Tensor | None = None
    delta: None = None
    selective: None = None
    products: tuple[()] = ()

    @property
    def projections(self) -> tuple[str, ...]:
        """Implement `MixerStep.projections`."""
        return (self.projection,)

    def run(
        self,
        operations: StateOperations,
        _dense: DenseOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Implement `MixerStep.run`."""
        space = self.space
        sizes = [len(space.weight), sum(space.parts), space.heads]
        numbers = projected[self.projection]
        if self.factors is not None:
            numbers = numbers * self.factors
        gate, mixed, time_steps = numbers.split(sizes, dim=1)
        mixed = operations.convolve(mixed, states(CONVOLUTION), self.convolution)
        return operations.advance_state_space(StateSpaceInputs(mixed, gate, time_steps), states(RECURRENT), space)
