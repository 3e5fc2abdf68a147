"""An embedding that is read out of the packed weight of the head it is tied to, so that no second copy is kept.

oneDNN does not tell how it lays a weight out. Where its bytes are tiles of so many rows, in each of which the numbers
of one column, or of two in turn, lie side by side, that is found by looking: every number is compared with the weight's
own before that is given up. Where they are not, the embedding stays.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.nn.functional import embedding

# Rows of a tile, columns in turn: what is looked for, besides a weight that is one tile, or has one for each row.
TILES, TOGETHER = (64, 48, 32, 16, 8), (1, 2, 4)
COMPARED_NUMBERS = 1 << 21  # at a time
INTEGERS = {4: torch.int32, 2: torch.int16}  # by which numbers are compared: NaN has to be found, and the sign of 0


class PackedTable(torch.Tensor):
    """A table [n, k], to whoever asks for its shape and dtype; only `look_up` and torch's embedding read it."""

    @staticmethod
    def __new__(cls, packed: torch.Tensor, *_: Any) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=packed.dtype)
        return made

    def __init__(self, packed: torch.Tensor, numbers: torch.Tensor) -> None:
        """numbers: [tiles, columns / together, rows of a tile, together], the memory of `packed`."""
        self._packed, self._numbers = packed, numbers

    @property
    def numbers(self) -> torch.Tensor:
        """As they lie: [tiles, columns / together, rows of a tile, together]."""
        return self._numbers

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.embedding.default:
            table, ids = args[:2]
            return table.rows(ids.flatten()).view(*ids.shape, -1)
        raise TypeError(f"{func} takes no packed table")

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Those of ids [tokens]: [tokens, k], new and contiguous."""
        tile = self._numbers.shape[2]
        found = self._numbers[ids // tile, :, ids % tile]
        return found.reshape(len(ids), -1)[:, : self.shape[1]].contiguous()

    def dense(self) -> torch.Tensor:
        """The whole table, new."""
        return self._packed.to_dense().to(self.dtype)


class PackedEmbedding(torch.nn.Module):
    """Stands in a transformers model where the embedding was."""

    def __init__(self, table: PackedTable) -> None:
        super().__init__()
        self._table = table
        self.num_embeddings, self.embedding_dim = table.shape

    @property
    def weight(self) -> torch.Tensor:
        """[n, k], new."""
        return self._table.dense()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As Embedding's."""
        return self._table.rows(ids.flatten()).view(*ids.shape, -1)

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def read_from(part: Any, table: PackedTable) -> None:
    """An Embedding, of whichever class, gives up its weight: what it looks up comes from the table."""

    def save(_self: Any, destination: dict[str, torch.Tensor], prefix: str, _keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = table.dense()

    kind = type(part)
    del part._parameters["weight"]
    part.__class__ = type(kind.__name__, (kind,), {"weight": table, "_save_to_state_dict": save})


def look_up(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of the table, [tokens, k], new."""
    return table.rows(tokens) if isinstance(table, PackedTable) else embedding(tokens, table)


def table_of(packed: torch.Tensor, weight: torch.Tensor) -> PackedTable | None:
    """The rows of `weight` [n, k] as they lie in its packed copy; None where they are not found there."""
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
    """Whether every number is where it is thought to be."""
    integer, k, tile = INTEGERS[weight.element_size()], weight.shape[1], laid_out.shape[2]
    tiles = max(1, COMPARED_NUMBERS // math.prod(laid_out.shape[1:]))
    for first in range(0, len(laid_out), tiles):
        seen = laid_out[first : first + tiles].permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        wanted = weight[first * tile : (first + tiles) * tile]
        if not torch.equal(seen[: len(wanted), :k].view(integer), wanted.view(integer)):
            return False
    return True
