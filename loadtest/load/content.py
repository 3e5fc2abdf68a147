"""What the sessions of a load hold, apart from when they arrive and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvforge.protocol.messages import Int32Array

from . import draws
from .blocks import Blocks
from .draws import IntArray
from .lengths import fitted, scaled
from .workload import Turn


class Content(Protocol):
    """Sessions by index. requests: of all of them; shortened: how many of those were cut to fit into the context."""

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


class BlockPrompts:
    """Prompts whose block ids a trace recorded. ids: of each prompt, [blocks] int64; a lap through them shares nothing
    with the one before."""

    def __init__(self, blocks: Blocks, ids: Sequence[IntArray]) -> None:
        self._blocks, self._ids = blocks, ids

    def make(self, index: int, length: int) -> tuple[Int32Array, str]:
        """See `Prompts`."""
        lap, row = divmod(index, len(self._ids))
        return self._blocks.tokens(self._blocks.scope(lap), self._ids[row], 0, length), ""


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
        kinds: Sequence[str] = (),
    ) -> None:
        inputs, outputs, cut = fitted(scaled(inputs, length_scale), scaled(outputs, length_scale), context_max)
        self._inputs, self._outputs, self._prompts, self._kinds = inputs, outputs, prompts, kinds
        self.shortened, self.requests = int(cut.sum()), len(inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def turns(self, index: int) -> tuple[Turn, ...]:
        """See `Content`."""
        row = index % len(self)
        tokens, text = self._prompts.make(index, int(self._inputs[row]))
        return (Turn(tokens=tokens, text=text, output_tokens=int(self._outputs[row])),)

    def kind(self, index: int) -> str:
        """See `Content`."""
        return self._kinds[index % len(self) % len(self._kinds)] if self._kinds else ""


def cut_turn(kept: int, new: int, output: int, context_max: int | None) -> tuple[int, int, int, bool]:
    """Tokens of a turn, cut as `lengths.fitted` does: its prompt at the end, though one new token stays; was it cut?"""
    if context_max is None or kept + new + output <= context_max:
        return kept, new, output, False
    output = min(output, context_max // 2)
    new = max(1, min(new, context_max - output - kept))
    return min(kept, context_max - output - new), new, output, True
