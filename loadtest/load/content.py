"""What the sessions of a load hold, apart from when they arrive and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvforge.protocol.messages import Int32Array

from . import draws
from .draws import FloatArray, IntArray
from .lengths import fitted, scaled
from .workload import Turn


class Content(Protocol):
    """Sessions by index. times: [sessions] seconds, rising, where a trace recorded them; shortened: how many requests
    were cut to fit into the context; requests: of all sessions together."""

    times: FloatArray | None
    shortened: int
    requests: int

    def __len__(self) -> int:
        """How many sessions are known; a higher index begins again, with fresh tokens where they are random."""
        ...

    def turns(self, index: int) -> tuple[Turn, ...]:
        """The requests of session `index`, any index from 0."""
        ...

    def kind(self, index: int) -> str:
        """The class of its requests."""
        ...


class Prompts(Protocol):
    """Makes prompts of a wanted length."""

    def make(self, index: int, length: int) -> tuple[Int32Array, str]:
        """Prompt `index`: [length] int32, and the same as text, or ""."""
        ...


class RandomTokens:
    """Token ids from [0, vocab), all equally likely. prefix: how many tokens all prompts begin with; a prompt that is
    shorter is the beginning of it."""

    def __init__(self, *, seed: int, vocab: int, prefix: int = 0) -> None:
        self._seed, self._vocab = seed, vocab
        self._prefix = draws.token_ids(draws.key(seed, draws.PREFIX), np.arange(prefix), vocab)

    def make(self, index: int, length: int) -> tuple[Int32Array, str]:
        """See `Prompts`."""
        made = draws.token_ids(draws.key(self._seed, draws.PROMPTS, index), np.arange(length), self._vocab)
        shared = min(length, self._prefix.size)
        made[:shared] = self._prefix[:shared]
        return made, ""


class Singles:
    """Sessions of one request each. inputs, outputs: [sessions] int64 tokens, before scale and context."""

    def __init__(
        self,
        inputs: IntArray,
        outputs: IntArray,
        prompts: Prompts,
        *,
        length_scale: float = 1.0,
        context_max: int | None = None,
        times: FloatArray | None = None,
        kinds: Sequence[str] = (),
    ) -> None:
        inputs, outputs, cut = fitted(scaled(inputs, length_scale), scaled(outputs, length_scale), context_max)
        self._inputs, self._outputs, self._prompts, self._kinds = inputs, outputs, prompts, kinds
        self.times, self.shortened, self.requests = times, int(cut.sum()), len(inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def turns(self, index: int) -> tuple[Turn, ...]:
        """See `Content`."""
        row = index % len(self)
        tokens, text = self._prompts.make(index, int(self._inputs[row]))
        return (Turn(tokens=tokens, text=text, output_tokens=int(self._outputs[row])),)

    def kind(self, index: int) -> str:
        """See `Content`."""
        return self._kinds[index % len(self)] if self._kinds else ""
