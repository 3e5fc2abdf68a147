"""Lengths of prompts and answers: distributions with a one-word notation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import InvalidRequest

from .draws import FloatArray, IntArray

LENGTH_MAX = 1 << 24
FORMS = "N, LOW:HIGH, lognormal:MEDIAN,SIGMA"


class Lengths(Protocol):
    """A distribution of lengths in tokens, each 1 to LENGTH_MAX."""

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw [count] int64; a longer draw of the same seed starts with the same numbers."""
        ...


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw lengths; see `Lengths`."""
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class Lognormal:
    """The lognormal distribution with this median.

    `sigma` is the deviation of the logarithm; the mean is median e^(sigma²/2).
    """

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw lengths; see `Lengths`."""
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), 1, LENGTH_MAX).astype(np.int64)


class Empirical:
    """Counted lengths: `lengths[i]` in proportion to `weights[i]`, [n] each, no weight below 0."""

    def __init__(self, lengths: npt.ArrayLike, weights: npt.ArrayLike) -> None:
        self._lengths: IntArray = np.maximum(1, np.asarray(lengths, np.int64))
        bounds: FloatArray = np.cumsum(np.asarray(weights, np.float64))
        assert self._lengths.shape == bounds.shape and bounds.size and bounds[-1] > 0
        self._bounds = bounds / bounds[-1]

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw lengths; see `Lengths`."""
        return self._lengths[np.searchsorted(self._bounds, rng.random(count), "right")]


def parse(option: str, text: str) -> Lengths:
    """Parse `512`, `64:512` or `lognormal:512,0.8` (median 512, sigma 0.8).

    Raises:
        InvalidRequest: Names the option.
    """
    try:
        if text.startswith("lognormal:"):
            median, sigma = (float(number) for number in text.removeprefix("lognormal:").split(","))
            if 1 <= median <= LENGTH_MAX and 0 <= sigma <= 10 and math.isfinite(sigma):
                return Lognormal(median, sigma)
        else:
            low, colon, high = text.partition(":")
            uniform = Uniform(int(low), int(high) if colon else int(low))
            if 1 <= uniform.low <= uniform.high <= LENGTH_MAX:
                return uniform
    except ValueError:
        pass
    raise InvalidRequest(option, f"invalid length {text!r} (expected {FORMS} with 1 <= LOW <= HIGH <= {LENGTH_MAX})")


def scaled(lengths: IntArray, factor: float) -> IntArray:
    """Multiply each length by the factor and round to the nearest integer, at least 1."""
    whole: IntArray = np.floor(lengths * factor + 0.5).astype(np.int64)
    return np.maximum(whole, 1)


def fitted(
    inputs: IntArray, outputs: IntArray, context_max: int | None
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    """Truncate lengths so that an input and its output fit into `context_max` tokens.

    A request that does not fit keeps its output up to half the context, and as much of its input as the rest allows.

    Returns:
        Inputs, outputs, and which requests were truncated, [n] each.
    """
    if context_max is None:
        return inputs, outputs, np.zeros(len(inputs), np.bool_)
    over = inputs + outputs > context_max
    outputs = np.where(over, np.minimum(outputs, context_max // 2), outputs)
    return np.where(over, np.minimum(inputs, context_max - outputs), inputs), outputs, over
