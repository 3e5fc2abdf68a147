"""How many tokens a prompt has, and an answer: distributions that are written in one word."""

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
        """[count] int64; fewer of them are the first of more."""
        ...


@dataclass(frozen=True)
class Uniform:
    """From `low` to `high`, both included, all equally likely."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """See `Lengths`."""
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class Lognormal:
    """Half of them are below `median`; sigma: the deviation of their logarithm (their mean is median e^(sigma²/2))."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """See `Lengths`."""
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), 1, LENGTH_MAX).astype(np.int64)


class Empirical:
    """As they were counted: `lengths[i]` in proportion to `weights[i]`; both [n], no weight below 0."""

    def __init__(self, lengths: npt.ArrayLike, weights: npt.ArrayLike) -> None:
        self._lengths: IntArray = np.maximum(1, np.asarray(lengths, np.int64))
        bounds: FloatArray = np.cumsum(np.asarray(weights, np.float64))
        assert self._lengths.shape == bounds.shape and bounds.size and bounds[-1] > 0
        self._bounds = bounds / bounds[-1]

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """See `Lengths`."""
        return self._lengths[np.searchsorted(self._bounds, rng.random(count), "right")]


def parse(option: str, text: str) -> Lengths:
    """From `512`, `64:512`, or `lognormal:512,0.8` (median 512, sigma 0.8). Raises InvalidRequest naming the option."""
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
    raise InvalidRequest(option, f"{text!r} is none of {FORMS} with 1 <= LOW <= HIGH <= {LENGTH_MAX}")


def scaled(lengths: IntArray, factor: float) -> IntArray:
    """Each length times the factor, rounded to the nearest; at least 1."""
    whole: IntArray = np.floor(lengths * factor + 0.5).astype(np.int64)
    return np.maximum(whole, 1)


def fitted(
    inputs: IntArray, outputs: IntArray, context_max: int | None
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    """The same lengths cut so that an input and its output fit into `context_max` tokens; and which were cut, [n].

    What does not fit keeps its output up to half the context, and of its input what the rest has room for.
    """
    if context_max is None:
        return inputs, outputs, np.zeros(len(inputs), np.bool_)
    over = inputs + outputs > context_max
    outputs = np.where(over, np.minimum(outputs, context_max // 2), outputs)
    return np.where(over, np.minimum(inputs, context_max - outputs), inputs), outputs, over
