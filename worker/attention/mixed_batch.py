"""A static batch of prompt rows and decodes, for graphs of steps with few prompt tokens.

It is made once for a number of prompt rows, prompt tokens and decodes, and refilled for every step. The prompt rows
come first, then the decodes; the tokens lie in the same order, the decodes' behind room for all prompt tokens. Places
without a token are padding: they have no slot, and what attention returns for them is undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvforge.worker.device.device import Device

from .batch import Int32Array, IntArray, PagedBatch, StaticPlaces, aligned


@dataclass(frozen=True)
class MixedSize:
    """The sizes of a static batch of prompt rows and decodes.

    Attributes:
        prompts: Prompt rows.
        prompt_tokens: Tokens of all prompt rows together, a multiple of 16.
        decodes: Rows of one generated token.
    """

    prompts: int
    prompt_tokens: int
    decodes: int

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.prompts + self.decodes

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.prompt_tokens + self.decodes


@dataclass(frozen=True)
class MixedPlaces:
    """The device memory of static batches, which share it.

    Attributes:
        own: Of the batches themselves.
        windows: Of their batches for layers that keep a window, one for each page of a block.
        beside: Of their batches for a draft model; None if it reads the batches themselves, or there is none.
    """

    own: StaticPlaces
    windows: tuple[StaticPlaces, ...] = ()
    beside: MixedPlaces | None = None


@dataclass(eq=False)
class MixedBatch(PagedBatch):
    """A static batch of prompt rows and decodes; see `PagedBatch`.

    Attributes:
        size: Its sizes.
    """

    size: MixedSize = MixedSize(0, 0, 0)

    @classmethod
    def places(cls, largest: MixedSize, width: int, device: Device, extra: int) -> StaticPlaces:
        """Allocate the device memory that batches of these sizes and smaller ones share.

        Args:
            largest: The most rows and tokens of a batch.
            width: Most blocks of a row.
            device: The device.
            extra: The most numbers that are copied with the structure and have a meaning for the caller.
        """
        return StaticPlaces(largest.rows, width, device, extra, extra + largest.tokens)

    @classmethod
    def mixed(cls, size: MixedSize, block_size: int, device: Device, places: StaticPlaces, extra: int) -> MixedBatch:
        """Make a batch, all padding until it is filled.

        Args:
            size: Its sizes.
            block_size: Tokens per block.
            device: The device.
            places: From `places`. Only one batch may be in use at a time, as with captured graphs on one stream.
            extra: Numbers that are copied with the structure and have a meaning for the caller.
        """
        assert size.rows <= len(places.tables), "shared memory is for fewer rows"
        zeros = np.zeros(size.rows, np.int64)
        generated = np.arange(size.rows) >= size.prompts
        batch = cls(
            np.zeros((size.rows, places.tables.shape[1]), np.int64),
            zeros,
            generated.astype(np.int64),
            zeros,
            _query_starts(size, zeros[: size.prompts]),
            np.full(size.tokens, -1, np.int64),
            block_size,
            device,
            generated,
            size=size,
        )
        batch._places = places
        staged = places.staging.on_device
        batch._device_arrays |= {
            "tables": places.tables[: size.rows],
            "extra": staged[:extra],
            "kv_slots": staged[extra : extra + size.tokens].fill_(-1),
        }
        batch._used = aligned(extra + size.tokens)
        return batch

    def refill(
        self, tables: Int32Array, starts: Int32Array, counts: Int32Array, decodes: int, extra: Int32Array
    ) -> None:
        """Refill the batch for the next step, with one copy on the current stream.

        Work queued before reads the old contents.

        Args:
            tables: [n, any width] int32, prompt rows first.
            starts: [n] int32.
            counts: [n] int32; 1 for decodes.
            decodes: Number of decodes among the rows.
            extra: [extra] int32.
        """
        size, width = self.size, min(tables.shape[1], self._fixed_places().tables.shape[1])
        prompts = len(starts) - decodes
        assert prompts <= size.prompts and decodes <= size.decodes, "more rows than the batch has"
        assert int(counts[:prompts].sum()) <= size.prompt_tokens, "more prompt tokens than the batch has"
        assert not len(starts) or int((starts + counts).max()) <= width * self.block_size, "tables are too narrow"
        at = self.row_places(len(starts), decodes)
        ends = starts.astype(np.int64) + counts
        width = min(width, int(-(-ends.max(initial=1) // self.block_size)))
        own = np.zeros((size.prompts + decodes, width), np.int32)
        own[at] = tables[:, :width]
        self.tables = own.astype(np.int64)
        self.starts, self.counts, self.lengths = np.zeros((3, size.rows), np.int64)
        self.starts[at], self.counts[at], self.lengths[at] = starts, counts, ends
        self.counts[size.prompts :] = 1  # padding too, as in every static batch
        self.query_starts = _query_starts(size, self.counts[: size.prompts])
        self.kv_slots = np.full(size.tokens, -1, np.int64)
        rows = np.repeat(at, counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(starts, counts) + offsets
        slots = self.kv_slots_of(rows, positions.astype(np.int64)[:, None])[:, 0]
        self.kv_slots[np.repeat(self.query_starts[at], counts) + offsets] = slots
        self._renew(own, extra)

    def row_places(self, rows: int, decodes: int) -> IntArray:
        """Return where the rows of a step lie, [rows] int64. decodes: number of decodes, the last rows."""
        prompts = rows - decodes
        return np.concatenate([np.arange(prompts), self.size.prompts + np.arange(decodes)])

    def token_places(self, counts: Int32Array, decodes: int) -> IntArray:
        """Return where the tokens of a step lie, [tokens] int64.

        Args:
            counts: [n] int32, tokens of the step's rows, prompt rows first.
            decodes: Number of decodes among the rows.
        """
        prompt_tokens = int(counts[: len(counts) - decodes].sum())
        return np.concatenate([np.arange(prompt_tokens), self.size.prompt_tokens + np.arange(decodes)])


def _query_starts(size: MixedSize, counts: IntArray) -> IntArray:
    """Return where each row's tokens begin. counts: [prompt rows] int64."""
    before = np.cumsum(counts) - counts
    return np.concatenate([before, size.prompt_tokens + np.arange(size.decodes + 1)])
