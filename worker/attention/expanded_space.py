"""Memory for keys and values that are expanded from latents (see `expanded`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

EXPANDED_TOKENS_MAX = 1 << 14  # positions before it are expanded; also the tokens of a workspace
EXPANDED_HEADS_MAX = 16  # heads that are expanded at a time


@dataclass(frozen=True)
class ExpandedShape:
    """Sizes of keys and values that are expanded together.

    Attributes:
        block_size: Tokens of a block.
        heads: Heads at a time.
        plain: Numbers of a key without rotation.
        rotated: Numbers of a key with it, behind them.
        value: Numbers of a value, at most as many as a key has.
        dtype: Their dtype.
    """

    block_size: int
    heads: int
    plain: int
    rotated: int
    value: int
    dtype: torch.dtype


class ExpandedSpace:
    """Memory for keys and values of some heads, which all layers use in turn.

    Attributes:
        product: [tokens, heads x (plain + value)], for each token and head the key without rotation, then the value.
        keys: [blocks, block_size, heads, plain + rotated].
        values: As `keys`. Places of a value behind its own numbers are zero.
    """

    def __init__(self, shape: ExpandedShape, device: torch.device) -> None:
        tokens, size = tokens_max(shape.block_size), shape.block_size
        self._shape = shape
        width = shape.heads * (shape.plain + shape.value)
        self.product = torch.empty((tokens, width), dtype=shape.dtype, device=device)
        whole = (2, tokens // size, size, shape.heads, shape.plain + shape.rotated)
        self.keys, self.values = torch.zeros(whole, dtype=shape.dtype, device=device)

    def fill(self, rotary: torch.Tensor) -> None:
        """Take keys and values from the first rows of `product`. rotary: [rows, rotated], the key of all heads."""
        count, plain, value = len(rotary), self._shape.plain, self._shape.value
        expanded = self.product[:count].unflatten(1, (self._shape.heads, plain + value))
        keys, values = (each.flatten(0, 1)[:count] for each in (self.keys, self.values))
        keys[..., :plain] = expanded[..., :plain]
        keys[..., plain:] = rotary[:, None]
        values[..., :value] = expanded[..., plain:]


class ExpandedSpaces:
    """Makes each space once, and keeps it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[ExpandedShape, ExpandedSpace] = {}

    def of(self, shape: ExpandedShape) -> ExpandedSpace:
        """Return the space of a shape.

        Raises:
            RuntimeError: There is not enough memory.
        """
        if shape not in self._made:
            self._made[shape] = ExpandedSpace(shape, self._device)
        return self._made[shape]


def tokens_max(block_size: int) -> int:
    """Return how many tokens are expanded together: whole blocks, at least one."""
    return max(EXPANDED_TOKENS_MAX // block_size, 1) * block_size
