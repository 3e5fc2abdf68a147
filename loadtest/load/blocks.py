"""Tokens of blocks that a trace knows by id: the same id is the same tokens, so that shared prefixes are shared."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.messages import Int32Array

from . import draws
from .draws import IntArray


class Blocks:
    """Makes prompts of block ids. block_size: tokens of a block as recorded; all lengths are multiplied by `scale`.

    A block then has scale times its tokens, rounded up or down by its place in the prompt alone (none at some places,
    where that is below 1), so that prompts which began with the same ids still begin with the same tokens.
    """

    def __init__(self, block_size: int, *, seed: int, vocab: int, scale: float) -> None:
        self._block_size, self._seed, self._vocab, self._scale = block_size, seed, vocab, scale

    def scaled(self, tokens: int) -> int:
        """A place in a prompt, as recorded, where it is after scaling."""
        return int(tokens * self._scale + 0.5)

    def scope(self, *numbers: int) -> int:
        """A key of block ids: the same id in another scope is other tokens."""
        return draws.key(self._seed, draws.BLOCKS, *numbers)

    def tokens(self, scope: int, ids: IntArray, start: int, stop: int) -> Int32Array:
        """[stop - start] int32: tokens of a scaled prompt of the blocks `ids` [blocks]; the last may be partial."""
        width = self._block_size * self._scale
        # Nothing is computed for the blocks before, which a long session has many of.
        first = min(max(0, int((start - 0.5) / width) - 1), len(ids) - 1)
        edges = np.floor(np.arange(first, len(ids)) * width + 0.5).astype(np.int64)
        places = np.arange(start, stop)
        block = np.searchsorted(edges, places, "right") - 1
        keys = draws.noise(scope, ids[first:])
        return draws.token_ids(keys[block], places - edges[block], self._vocab)
