"""The structure of one step, on the host and on the device.

A batch is built for one step, or it is *static*: made once for a number of rows, each of one new token, and filled
anew for every step. What a static batch keeps on the device stays where it is, so a captured graph may read it.

What a kernel reads of a batch is a *resident*: an int32 array that a function makes from the host arrays. A batch makes
each once, and a static batch again whenever it is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import InvalidRequest
from worker.device import Device, Staging

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(eq=False)
class PagedBatch:
    """One step's structure, shared by all layers.

    tables: [rows, width] int64 host, block ids in the pool. starts, counts, lengths: [rows] int64 host;
    lengths = starts + counts. query_starts: [rows + 1] int64 host: where each row's tokens begin in the flat batch.
    slots: [tokens] int64 host: where each new token's K and V go; -1: nowhere (padding of a static batch, length 0).
    plans: what an implementation derives from the above; emptied when a static batch is filled.
    """

    tables: IntArray
    starts: IntArray
    counts: IntArray
    lengths: IntArray
    query_starts: IntArray
    slots: IntArray
    block_size: int
    device: Device
    plans: dict[Any, Any] = field(default_factory=dict)
    _residents: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    _renewed: dict[Hashable, tuple[Callable[[PagedBatch], Int32Array], Staging]] = field(default_factory=dict)
    _places: _Places | None = None

    @classmethod
    def build(
        cls, tables: Int32Array, starts: Int32Array, counts: Int32Array, block_size: int, device: Device
    ) -> PagedBatch:
        """tables: [rows, width] int32; starts, counts: [rows] int32. Errors: InvalidRequest names the argument."""
        _check_rows(tables, starts, counts, block_size)
        tables64, starts64, counts64 = tables.astype(np.int64), starts.astype(np.int64), counts.astype(np.int64)
        query_starts = np.zeros(len(counts64) + 1, np.int64)
        np.cumsum(counts64, out=query_starts[1:])
        rows = np.repeat(np.arange(len(counts64)), counts64)
        positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts64, counts64)
        slots = tables64[rows, positions // block_size] * block_size + positions % block_size
        return cls(tables64, starts64, counts64, starts64 + counts64, query_starts, slots, block_size, device)

    @classmethod
    def static(
        cls, rows: int, width: int, block_size: int, device: Device, shared: PagedBatch | None = None
    ) -> PagedBatch:
        """A batch of `rows` decodes, all padding until it is filled. width: most blocks of a row.

        shared: a static batch of as many rows at least, and the same width, whose memory this one may use too: where
        only one of the two is under way at a time, as captured graphs on one stream are.
        """
        nothing = np.zeros(rows, np.int64)
        batch = cls(
            np.zeros((rows, width), np.int64),
            nothing,
            np.ones(rows, np.int64),
            nothing,
            np.arange(rows + 1),
            nothing - 1,
            block_size,
            device,
        )
        batch._places = _Places(rows, width, device) if shared is None else shared._fixed_places()
        places = batch._places
        assert rows <= len(places.tables), "shared memory is for fewer rows"
        assert width == places.tables.shape[1], "shared memory is for another width"
        batch._residents |= {"tables": places.tables[:rows], "slots": places.slots[:rows]}
        return batch

    @property
    def tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def is_static(self) -> bool:
        return self._places is not None

    @property
    def slot_mapping(self) -> torch.Tensor:
        """`slots` as the device's int64. For plain torch; kernels read `tables_on_device` and `slots_on_device`."""
        if "slot_mapping" not in self.plans:
            self.plans["slot_mapping"] = self.device.upload(self.slots)
        mapping: torch.Tensor = self.plans["slot_mapping"]
        return mapping

    @property
    def tables_on_device(self) -> torch.Tensor:
        """[rows, width] int32 device. Entries past a row's tokens are not defined."""
        return self.resident("tables", _tables).view(len(self.counts), -1)

    @property
    def slots_on_device(self) -> torch.Tensor:
        """[tokens] int32 device."""
        return self.resident("slots", _slots)

    def slots_of(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Slots in the pool of `positions` [n, p] of `rows` [n]: [n, p] int64."""
        blocks = self.tables[rows[:, None], positions // self.block_size]
        return np.asarray(blocks * self.block_size + positions % self.block_size)

    def resident(self, key: Hashable, make: Callable[[PagedBatch], Int32Array]) -> torch.Tensor:
        """make(self) on the device, flat. A static batch makes it again, of the same size, whenever it is filled."""
        if key not in self._residents:
            if self._places is None:
                self.preload({key: make})
            else:
                staging = Staging(self.device, make(self).size)
                self._renewed[key] = make, staging
                self._residents[key] = staging.on_device
                self._renew(key)
        return self._residents[key]

    def preload(self, makers: Mapping[Hashable, Callable[[PagedBatch], Int32Array]]) -> None:
        """Makes several residents with a single copy to the device, and the tables and slots with them."""
        if self._places is not None:
            return
        wanted = {"tables": _tables, "slots": _slots, **makers}
        arrays = {key: make(self).reshape(-1) for key, make in wanted.items() if key not in self._residents}
        if arrays:
            # Each begins at a multiple of 16 bytes: kernels are compiled for that.
            padded = [np.pad(array, (0, -len(array) % 4)) for array in arrays.values()]
            parts = self.device.upload(np.concatenate(padded)).split([len(array) for array in padded])
            for (key, array), part in zip(arrays.items(), parts, strict=True):
                self._residents[key] = part[: len(array)]

    def fill(self, tables: Int32Array, lengths: Int32Array) -> None:
        """The rows of a static batch's next step. tables: [n, any width]; lengths: [n], the new token included, >= 1.

        Rows from n on are padding: they write nothing, and what attention gives for them is not defined. Queues copies
        on the current stream; what was queued before reads the old contents.
        """
        places, count, rows = self._fixed_places(), len(lengths), len(self.counts)
        width = min(tables.shape[1], places.tables.shape[1])
        assert count <= rows, f"{count} rows in a batch for {rows}"
        assert not count or int(lengths.max()) <= width * self.block_size, "tables are narrower than their rows"
        self.tables = tables[:, :width].astype(np.int64)
        self.lengths = np.zeros(rows, np.int64)
        self.lengths[:count] = lengths
        self.starts = np.maximum(self.lengths - 1, 0)
        self.slots = np.full(rows, -1, np.int64)
        last = self.starts[:count, None]
        self.slots[:count] = self.slots_of(np.arange(count), last)[:, 0]
        self.plans.clear()
        places.fill(tables[:, : int(-(-self.lengths.max() // self.block_size))], self.slots)
        for key in self._renewed:
            self._renew(key)

    def _renew(self, key: Hashable) -> None:
        make, staging = self._renewed[key]
        array = make(self).reshape(-1)
        assert array.size == len(staging.on_device), "a resident of a static batch has changed its size"
        staging.host()[:] = array
        staging.send(array.size)

    def _fixed_places(self) -> _Places:
        assert self._places is not None, "only a static batch is filled"
        return self._places


class _Places:
    """The device memory of static batches that share it.

    tables: [rows, width] int32 device. slots: [rows] int32 device.
    """

    def __init__(self, rows: int, width: int, device: Device) -> None:
        self.tables = torch.zeros((rows, width), dtype=torch.int32, device=device.torch_device)
        self._staging = Staging(device, rows + rows * width)
        self.slots = self._staging.on_device[:rows]
        self.slots.fill_(-1)

    def fill(self, tables: Int32Array, slots: IntArray) -> None:
        """tables: [n, only as many columns as are needed]. slots: [rows]."""
        rows, (count, width) = len(self.slots), tables.shape
        host = self._staging.host()
        host[: len(slots)] = slots
        host[rows : rows + tables.size].reshape(tables.shape)[:] = tables
        self._staging.send(rows + tables.size)
        packed = self._staging.on_device[rows : rows + tables.size].view(count, width)
        self.tables[:count, :width].copy_(packed)  # rows are far apart there: a copy on the device is the cheaper way


def _tables(batch: PagedBatch) -> Int32Array:
    return batch.tables.astype(np.int32)


def _slots(batch: PagedBatch) -> Int32Array:
    assert batch.slots.max(initial=0) < 2**31, "more slots than 32 bits can name"
    return batch.slots.astype(np.int32)


def _check_rows(tables: Int32Array, starts: Int32Array, counts: Int32Array, block_size: int) -> None:
    for name, array, dimensions in (("tables", tables, 2), ("starts", starts, 1), ("counts", counts, 1)):
        if array.ndim != dimensions:
            raise InvalidRequest(name, f"must have {dimensions} dimensions, not {array.ndim}")
        if array.dtype != np.int32:
            raise InvalidRequest(name, f"must be int32, not {array.dtype}")
        if len(array) != len(counts):
            raise InvalidRequest(name, f"has {len(array)} rows, counts {len(counts)}")
    if len(counts) == 0:
        raise InvalidRequest("counts", "names no row")
    if counts.min() < 1:
        raise InvalidRequest("counts", "every row needs at least 1 token")
    if starts.min() < 0:
        raise InvalidRequest("starts", "positions begin at 0")
    if int((starts.astype(np.int64) + counts).max()) > tables.shape[1] * block_size:
        raise InvalidRequest("tables", f"{tables.shape[1]} blocks of {block_size} are fewer than a row's tokens")
