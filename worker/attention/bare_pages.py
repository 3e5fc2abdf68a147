"""Pages of models in which no layer attends.

Their blocks have no K and V, yet a block of tokens has a page, because the coordinator counts blocks of one size: full
blocks index prefixes, and checkpoints hang on them. A page is therefore a small part of a state. Nothing writes to the
page of a block of tokens.
"""

from __future__ import annotations

import math

from .geometry import KV_DTYPES, LayerShape
from .states import ALIGNMENT, StateTensor

PAGES = 256  # of a state, about: 16 tokens take as much memory as a 256th of it, and each is a copy at a checkpoint

PAGE_BYTES_MIN = 1024


def bare_page(states: tuple[StateTensor, ...], block_size: int, kv_dtype: str) -> LayerShape:
    """Return the shape of one layer in the place of those that attend: its memory is a page.

    Args:
        states: The tensors of a sequence's state.
        block_size: Tokens per block.
        kv_dtype: The dtype of the pool, one without scales.

    Returns:
        A shape with one part for each token, of a size that divides the state into about `PAGES` pages.
    """
    bytes_per_number = block_size * KV_DTYPES[kv_dtype].itemsize
    page_bytes = max(PAGE_BYTES_MIN, sum(tensor.nbytes for tensor in states) // PAGES)
    numbers = math.ceil(page_bytes / bytes_per_number)
    numbers += -numbers % (ALIGNMENT // math.gcd(ALIGNMENT, bytes_per_number))
    return LayerShape(kv_heads=1, head_size=numbers, latent=numbers)
