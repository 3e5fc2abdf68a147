"""Projections of a mixer, computed for all rows of a step at once.

A mixer runs row by row (see `mixers`), but most of its weights are matrices that multiply each token by itself: those
of its input, and the last one, which gives its result. They are found by running the mixer once: the first are given
the very tensor that the mixer is given, and the last one returns the very tensor that the mixer returns. In a step they
are computed for all tokens together, and the mixer finds the results where it calls them. The weights are then read
once for each step, not for each row. On devices that do not pack weights, those of the input lie in one matrix and are
one product (`Projections.join`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """Where a module is kept: parts of a model are replaced at load, and the place stays."""

    owner: Any
    name: str

    @property
    def module(self) -> Any:
        """The module that is there now."""
        return self.owner._modules[self.name]

    def put(self, module: Any) -> None:
        """Replace it."""
        self.owner._modules[self.name] = module


@dataclass(frozen=True)
class JoinedInputs:
    """Several projections of one input as one product.

    Attributes:
        weights: Their weights, which are rows of one matrix.
        module: Multiplies by this matrix.
    """

    weights: tuple[torch.nn.Parameter, ...]
    module: Any

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the projections of hidden [1, tokens, hidden size]: views of one tensor."""
        made: torch.Tensor = self.module(hidden)
        return made.split([len(weight) for weight in self.weights], dim=-1)

    def has(self, modules: list[Any]) -> bool:
        """Return whether these modules still have the weights that were joined."""
        return all(module.weight is weight for module, weight in zip(modules, self.weights, strict=True))


@dataclass
class Projections:
    """The projections of one mixer.

    Attributes:
        inputs: Linear parts that the mixer calls with its own input.
        output: The Linear part that returns the mixer's result; None: there is none.
        joined: The inputs as one product; None: they are not joined.
        factor: The mixer's factor of its input before these parts.
    """

    inputs: tuple[Place, ...] = ()
    output: Place | None = None
    joined: JoinedInputs | None = None
    factor: float = 1.0

    def join(self, linear: Callable[[torch.nn.Parameter], Any]) -> None:
        """Lay the weights of the inputs into one matrix, if they have no bias; the modules then have views of it.

        Args:
            linear: Returns a module that multiplies by a weight.
        """
        modules = [place.module for place in self.inputs]
        weights = [module.weight for module in modules]
        if len(weights) < 2 or any(module.bias is not None for module in modules):
            return
        matrix = torch.nn.Parameter(torch.cat([weight.detach() for weight in weights]), requires_grad=False)
        for weight, rows in zip(weights, matrix.split([len(weight) for weight in weights]), strict=True):
            weight.data = rows
        self.joined = JoinedInputs(tuple(weights), linear(matrix))

    def _computed(self, modules: list[Any], hidden: torch.Tensor) -> Iterable[torch.Tensor]:
        if self.joined is not None and self.joined.has(modules):
            return self.joined(hidden)
        return [module(hidden) for module in modules]

    @contextmanager
    def over(self, hidden: torch.Tensor) -> Iterator[JoinedTokens]:
        """Compute the projections of the input of all tokens, and let the mixer find them.

        Args:
            hidden: [1, tokens, hidden size], the input of the mixer.

        Yields:
            The tokens, from which the mixer is given parts.
        """
        tokens = JoinedTokens(hidden, None if self.output is None else self.output.module)
        kept = [(place, place.module) for place in self.inputs]
        try:
            scaled = hidden if self.factor == 1.0 else hidden * self.factor
            computed = self._computed([module for _, module in kept], scaled)
            for (place, _), projected in zip(kept, computed, strict=True):
                tokens.projected[place.name] = projected
                place.put(_Computed(tokens, projected))
            if self.output is not None:
                kept.append((self.output, self.output.module))
                self.output.put(_unchanged)
            yield tokens
        finally:
            for place, module in kept:
                place.put(module)


@dataclass
class JoinedTokens:
    """The tokens of a step, their projections by name, and the part that the mixer works on."""

    hidden: torch.Tensor
    output: Any
    projected: dict[str, torch.Tensor] = field(default_factory=dict)
    current: slice | torch.Tensor = field(default_factory=lambda: slice(0))

    def part(self, first: int, end: int) -> torch.Tensor:
        """Return the input of the tokens [first, end), which the mixer must be given next."""
        self.current = slice(first, end)
        return self.hidden[:, self.current]

    def padded(self, first: int, end: int, count: int) -> torch.Tensor:
        """Return the input of the tokens [first, end), and repeat the last one to `count` tokens."""
        places = torch.arange(first, first + count, device=self.hidden.device)
        self.current = places.clamp_(max=end - 1)
        return self.hidden[:, self.current]

    def result(self, parts: list[torch.Tensor], as_part: bool = False) -> torch.Tensor:
        """Return the mixer's result for all tokens.

        Args:
            parts: What the mixer returned for each part in order.
            as_part: Whether to return this rank's part of the result, without the hook that adds up the ranks' parts.
        """
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if as_part:
            assert self.output is not None, "the last projection of a mixer that ranks divide was found"
            part: torch.Tensor = self.output.forward(mixed)
            return part
        return mixed if self.output is None else self.output(mixed)


class _Computed:
    """In the place of a projection: returns the current part of its result."""

    def __init__(self, tokens: JoinedTokens, projected: torch.Tensor) -> None:
        self._tokens, self._projected = tokens, projected

    def __call__(self, _part: torch.Tensor) -> torch.Tensor:
        return self._projected[:, self._tokens.current]


def _unchanged(numbers: torch.Tensor) -> torch.Tensor:
    return numbers


class ProjectionFinder:
    """Notes the calls of a mixer's Linear parts while it runs once.

    Args:
        mixer: The mixer.
        factor: Its factor of its input; None: it has none.
    """

    def __init__(self, mixer: Any, factor: float | None = None) -> None:
        self._factor = factor
        self._calls: list[tuple[Place, Any, Any]] = []
        self._hooks = [
            child.register_forward_hook(self._noting(Place(owner, name)))
            for owner in mixer.modules()
            for name, child in owner.named_children()
            if type(child) is torch.nn.Linear
        ]

    def _noting(self, place: Place) -> Any:
        def note(_module: Any, given: tuple[Any, ...], result: Any) -> None:
            self._calls.append((place, given[0] if given else None, result))

        return note

    def found(self, given: torch.Tensor, result: torch.Tensor) -> Projections:
        """Return the projections, once the mixer has run.

        Args:
            given: The tensor that the mixer was given.
            result: The tensor that it returned.
        """
        for hook in self._hooks:
            hook.remove()
        often = [place for place, _, _ in self._calls]
        once = [(place, got, made) for place, got, made in self._calls if often.count(place) == 1]
        inputs = tuple(place for place, got, made in once if self._is_input(got, given) and made is not result)
        output = next((place for place, _, made in once if made is result), None)
        return Projections(inputs, output, factor=1.0 if self._factor is None else self._factor)

    def _is_input(self, got: Any, given: torch.Tensor) -> bool:
        if got is given or self._factor is None:
            return got is given
        return isinstance(got, torch.Tensor) and not got.is_meta and torch.equal(got, given * self._factor)
