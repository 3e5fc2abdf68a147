"""Where the computation of a prompt may be cut if the model keeps a recurrent state.

Such a model computes the tokens of a prompt in chunks, and generated tokens one by one; both round differently. The
chunks of a run of prompt tokens end at absolute multiples of the chunk's size and at the end of the run, so that a
state does not depend on how its tokens were scheduled.
"""

from __future__ import annotations

from kvforge.protocol.messages import GENERATED

from .sequences import Tokens


def is_cut(tokens: Tokens, at: int, chunk: int) -> bool:
    """Return whether the computation of these tokens may continue from position `at`.

    Args:
        tokens: All tokens with their marks, [n] int32.
        at: A position, 0 to n - 1.
        chunk: Tokens of a chunk.
    """
    return at % chunk == 0 or bool(tokens[at - 1] >= GENERATED) or bool(tokens[at] >= GENERATED)


def chunk_end(tokens: Tokens, start: int, room: int, chunk: int) -> int:
    """Return where the next chunk of a row ends: `start` if no chunk fits.

    Args:
        tokens: All known tokens with their marks, [n] int32. Unknown ones behind them are generated.
        start: The position of the next token.
        room: How many tokens may be computed.
        chunk: Tokens of a chunk.
    """
    if room <= 0:
        return start
    ahead = tokens[start : start + room + 1]
    (generated,) = (ahead >= GENERATED).nonzero()
    if not ahead.size or (generated.size and not generated[0]):
        return start + 1
    run = int(generated[0]) if generated.size else int(ahead.size)
    if run <= room and (generated.size or start + run == tokens.size):
        return start + run
    return max(start, (start + room) // chunk * chunk)
