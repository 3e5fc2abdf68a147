"""Tokens of blocks with ids, as in a trace: the same id gives the same tokens, so shared prefixes stay shared."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.messages import Int32Array

from . import draws
from .draws import IntArray


class Blocks:
    """Builds prompts from block ids.

    A scaled block has `scale` times its tokens. Rounding depends only on the position in the prompt, so prompts with
    the same leading ids keep a common prefix; blocks of a scale below 1 may vanish.

    Args:
        block_size: Recorded tokens per block.
        seed: The seed of the tokens.
        vocab: Token ids are below it.
        scale: The factor of all lengths.
    """

    def __init__(self, block_size: int, *, seed: int, vocab: int, scale: float) -> None:
        self._block_size, self._seed, self._vocab, self._scale = block_size, seed, vocab, scale

    def scaled(self, tokens: int) -> int:
        """Return a recorded position in a prompt after scaling."""
        return int(tokens * self._scale + 0.5)

    def scope(self, *numbers: int) -> int:
        """Return a namespace of block ids: the same id in another scope gives other tokens."""
        return draws.key(self._seed, draws.BLOCKS, *numbers)

    def tokens(self, scope: int, ids: IntArray, start: int, stop: int) -> Int32Array:
        """Return tokens [start, stop) of a scaled prompt.

        Args:
            scope: The namespace of the ids.
            ids: [blocks] int64; the last block may be partial.
            start: The first token.
            stop: Behind the last token.

        Returns:
            [stop - start] int32.
        """
        width = self._block_size * self._scale
        # Skip the blocks before `start`: long sessions have many.
        first = min(max(0, int((start - 0.5) / width) - 1), len(ids) - 1)
        edges = np.floor(np.arange(first, len(ids)) * width + 0.5).astype(np.int64)
        places = np.arange(start, stop)
        block = np.searchsorted(edges, places, "right") - 1
        keys = draws.noise(scope, ids[first:])
        return draws.token_ids(keys[block], places - edges[block], self._vocab)
