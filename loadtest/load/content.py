"""The contents of sessions, apart from their arrivals and tenants."""

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
    """The sessions by index.

    Attributes:
        requests: The number of requests of all sessions.
        shortened: How many of these were truncated to fit the context.
    """

    shortened: int
    requests: int

    def __len__(self) -> int:
        """Return the number of distinct sessions; a higher index repeats them, with fresh tokens if they are random."""
        ...

    def turns(self, index: int) -> tuple[Turn, ...]:
        """Return the requests of session `index`, any index from 0."""
        ...

    def kind(self, index: int) -> str:
        """Return the class of a session's requests."""
        ...


class Prompts(Protocol):
    """A source of prompts of a given length."""

    def make(self, index: int, length: int) -> tuple[Int32Array, str]:
        """Return prompt `index`: [length] int32, and its text or ""."""
        ...


class RandomTokens:
    """Uniformly distributed token ids from [0, vocab).

    Args:
        seed: The seed.
        vocab: The size of the vocabulary.
        prefix: The number of leading tokens that all prompts share; a shorter prompt is a part of the prefix.
    """

    def __init__(self, *, seed: int, vocab: int, prefix: int = 0) -> None:
        self._seed, self._vocab = seed, vocab
        self._prefix = draws.token_ids(draws.key(seed, draws.PREFIX), np.arange(prefix), vocab)

    def make(self, index: int, length: int) -> tuple[Int32Array, str]:
        """Return a prompt; see `Prompts`."""
        made = draws.token_ids(draws.key(self._seed, draws.PROMPTS, index), np.arange(length), self._vocab)
        shared = min(length, self._prefix.size)
        made[:shared] = self._prefix[:shared]
        return made, ""


class BlockPrompts:
    """Prompts with recorded block ids. Repetitions of the trace share nothing with each other.

    Args:
        blocks: Builds the tokens.
        ids: [blocks] int64 for each prompt.
    """

    def __init__(self, blocks: Blocks, ids: Sequence[IntArray]) -> None:
        self._blocks, self._ids = blocks, ids

    def make(self, index: int, length: int) -> tuple[Int32Array, str]:
        """Return a prompt; see `Prompts`."""
        lap, row = divmod(index, len(self._ids))
        return self._blocks.tokens(self._blocks.scope(lap), self._ids[row], 0, length), ""


class SingleTurnSessions:
    """Sessions of one request each.

    Args:
        inputs: [sessions] int64 tokens, before scaling and truncation.
        outputs: [sessions] int64 tokens, before scaling and truncation.
        prompts: The source of prompts.
        length_scale: The factor of all lengths.
        context_max: The context that each request must fit.
        kinds: The classes of the requests, if any.
    """

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
        """Return the request of a session; see `Content`."""
        row = index % len(self)
        tokens, text = self._prompts.make(index, int(self._inputs[row]))
        return (Turn(tokens=tokens, text=text, output_tokens=int(self._outputs[row])),)

    def kind(self, index: int) -> str:
        """Return the class of a session's request; see `Content`."""
        return self._kinds[index % len(self) % len(self._kinds)] if self._kinds else ""


def cut_turn(kept: int, new: int, output: int, context_max: int | None) -> tuple[int, int, int, bool]:
    """Truncate a turn as `lengths.fitted` does, at the end of its prompt, but keep at least one new token.

    Returns:
        The kept, new and generated tokens, and whether the turn was truncated.
    """
    if context_max is None or kept + new + output <= context_max:
        return kept, new, output, False
    output = min(output, context_max // 2)
    new = max(1, min(new, context_max - output - kept))
    return min(kept, context_max - output - new), new, output, True
