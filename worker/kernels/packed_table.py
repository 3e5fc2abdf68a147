"""An embedding that is read from the packed weight of its tied head, so that no second copy is kept.

oneDNN does not document its layouts. If a layout consists of tiles of rows in which the numbers of one column, or of a
few interleaved columns, are adjacent, it is found by trial: every number is compared with the weight's before that is
released. Otherwise the embedding stays.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.nn.functional import embedding

# Rows of a tile and interleaved columns to try, besides one tile, or one tile per row.
TILES, TOGETHER = (64, 48, 32, 16, 8), (1, 2, 4)
COMPARED_NUMBERS = 1 << 21  # per comparison
INTEGERS = {4: torch.int32, 2: torch.int16}  # compared as integers, to match NaN and the sign of 0


class PackedTable(torch.Tensor):
    """A table [n, k] that has a shape and dtype but can only be read by `look_up` and torch's embedding."""

    @staticmethod
    def __new__(cls, packed: torch.Tensor, *_: Any) -> Self:
        """Make a tensor without memory, with the shape and dtype of `packed`."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=packed.dtype)
        return made

    def __init__(self, packed: torch.Tensor, numbers: torch.Tensor) -> None:
        """Wrap a packed weight. numbers: its memory as [tiles, columns / together, rows of a tile, together]."""
        self._packed, self._numbers = packed, numbers

    @property
    def numbers(self) -> torch.Tensor:
        """The numbers in their layout: [tiles, columns / together, rows of a tile, together]."""
        return self._numbers

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.embedding.default:
            table, ids = args[:2]
            return table.rows(ids.flatten()).view(*ids.shape, -1)
        raise TypeError(f"{func} does not support a packed table")

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids [tokens]: [tokens, k], new and contiguous."""
        tile = self._numbers.shape[2]
        found = self._numbers[ids // tile, :, ids % tile]
        return found.reshape(len(ids), -1)[:, : self.shape[1]].contiguous()

    def dense(self) -> torch.Tensor:
        """Return the whole table as a new tensor."""
        return self._packed.to_dense().to(self.dtype)


class PackedEmbedding(torch.nn.Module):
    """Replaces the embedding of a transformers model. scale: factor of the rows (Gemma)."""

    def __init__(self, table: PackedTable, scale: float = 1.0) -> None:
        super().__init__()
        self._table, self._scale = table, scale
        self.num_embeddings, self.embedding_dim = table.shape

    @property
    def weight(self) -> torch.Tensor:
        """The table [n, k], a new tensor."""
        return self._table.dense()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids as Embedding does."""
        rows = self._table.rows(ids.flatten()).view(*ids.shape, -1)
        return rows if self._scale == 1.0 else rows * self._scale

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def read_from(part: Any, table: PackedTable) -> None:
    """Make an Embedding of any class read its rows from the table, and release its weight."""

    def save(_self: Any, destination: dict[str, torch.Tensor], prefix: str, _keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = table.dense()

    kind = type(part)
    del part._parameters["weight"]
    part.__class__ = type(kind.__name__, (kind,), {"weight": table, "_save_to_state_dict": save})


def look_up(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return rows of the table, [tokens, k], new."""
    return table.rows(tokens) if isinstance(table, PackedTable) else embedding(tokens, table)


def table_of(packed: torch.Tensor, weight: torch.Tensor) -> PackedTable | None:
    """Find the rows of `weight` [n, k] in its packed copy; return None if the layout is unknown."""
    if not packed.is_mkldnn or weight.element_size() not in INTEGERS:
        return None
    size = int(torch.ops.mkldnn._nbytes(packed))
    memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    numbers = torch.frombuffer(memory, dtype=weight.dtype)
    for laid_out in _guesses(numbers, weight):
        if _is_weight(laid_out, weight):
            return PackedTable(packed, laid_out)
    return None


def _guesses(numbers: torch.Tensor, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    n, k = weight.shape
    for tile in (*TILES, n, 1):
        tiles = -(-n // tile)
        columns, rest = divmod(len(numbers), tiles * tile)
        if rest or columns < k:
            continue
        for together in TOGETHER:
            if columns % together == 0:
                yield numbers.view(tiles, columns // together, tile, together)


def _is_weight(laid_out: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether every number is at its expected place."""
    integer, k, tile = INTEGERS[weight.element_size()], weight.shape[1], laid_out.shape[2]
    tiles = max(1, COMPARED_NUMBERS // math.prod(laid_out.shape[1:]))
    for first in range(0, len(laid_out), tiles):
        seen = laid_out[first : first + tiles].permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        wanted = weight[first * tile : (first + tiles) * tile]
        if not torch.equal(seen[: len(wanted), :k].view(integer), wanted.view(integer)):
            return False
    return True
