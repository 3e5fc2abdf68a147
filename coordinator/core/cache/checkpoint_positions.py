"""Where checkpoints of recurrent states are taken: the policy, apart from how it is done.

A position is valid if it ends a block, and if every text that continues behind it may be cut there: at a multiple of
the prompt's chunk, or behind a generated token. Checkpoints are wanted

- at the last valid position before the last token of a prompt, for the next turn and other answers;
- at every `cache.checkpoint_tokens` tokens, in prompts and in answers;
- at the last valid position of the tokens with KV in the cache but no checkpoint: a prefix that prompts share.
"""

from __future__ import annotations

from math import lcm

import numpy as np

from kvforge.protocol.messages import GENERATED

from .sequences import Tokens


class CheckpointPositions:
    """The positions for one model.

    Attributes:
        every: Distance of regular checkpoints in tokens.
    """

    def __init__(self, block_size: int, chunk: int, checkpoint_tokens: int) -> None:
        self._block_size, self._grid = block_size, lcm(block_size, chunk)
        self.every = -(-checkpoint_tokens // self._grid) * self._grid

    def last(self, tokens: Tokens, end: int) -> int:
        """Return the last valid position up to `end`, 0 for none.

        Args:
            tokens: Token ids with their marks, [at least end] int32.
            end: A number of tokens.
        """
        on_grid = end // self._grid * self._grid
        others = np.arange(on_grid + self._block_size, end + 1, self._block_size)
        behind_generated = others[tokens[others - 1] >= GENERATED]
        return int(behind_generated[-1]) if behind_generated.size else on_grid

    def following(self, tokens: Tokens, prompt: int, shared: int, start: int) -> int:
        """Return the first position behind `start` at which a checkpoint is wanted.

        Args:
            tokens: All known tokens with their marks, [at least prompt] int32.
            prompt: Tokens of the prompt.
            shared: The last valid position of a shared prefix, 0 for none.
            start: Tokens computed so far.
        """
        regular = (start // self.every + 1) * self.every
        others = (self.last(tokens, prompt - 1), shared)
        return min([regular, *(position for position in others if position > start)])
