"""The structure of one step, on the host and on the device.

A batch is built for one step, or it is *static*: made once for a number of rows, each with one new token, and refilled
for every step. The device memory of a static batch never moves, so captured graphs may read it.

Kernels read a batch through *device arrays*: int32 numbers that a function computes from the host arrays. A batch
computes each once, and a static batch again at each refill.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import InvalidRequest
from kvforge.worker.device.device import Device
from kvforge.worker.device.queue import Staging

OWN_ARRAYS = ("tables", "kv_slots")  # device arrays that a batch does not have in common with its leader
PLANS_MAX = 1 << 18  # numbers of all plans of a static batch (1 MiB); a plan has about 10,000 at most
IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(eq=False)
class PagedBatch:
    """The structure of one step, shared by all layers.

    Attributes:
        tables: [rows, width] int64 on the host, entries of the layers' tensors: block ids in the pool, unless it is
            page-major (see `pool`).
        starts: [rows] int64 on the host, position of each row's first new token.
        counts: [rows] int64 on the host, new tokens of each row.
        lengths: [rows] int64 on the host, starts + counts.
        query_starts: [rows + 1] int64 on the host, index of each row's first token in the flat batch.
        kv_slots: [tokens] int64 on the host, slot of each new token's K and V; -1: none (padding of a static batch,
            with length 0).
        block_size: Tokens per block.
        device: The device.
        generated: [rows] bool on the host, decodes: rows of one token that was generated, or counts as generated.
        states: [rows, state blocks] int32 on the host, pool-local ids of the pages of each row's recurrent state; None
            for models without one.
        sources: [rows, state blocks] int32 on the host, the pages of the state that each row goes on with: those that
            the drafted token before it writes, for a drafted one. None: each row's own.
        depth: Of a static batch of rows with drafts: the most rows of one sequence, each going on with the state of the
            one before. 0: no two rows are of one sequence.
        behind: [rows] int32 on the host, for such a batch: how many rows of its sequence each row is behind.
        spare: For such a batch, the page that belongs to no sequence.
        state_pages: `states` on the device, for a static batch; no two of its rows have the same. None for others.
        windows: Batches of the same rows for the layers that keep a window, one for each page of a block, with lowered
            positions (see `windows`).
        is_window: Whether it is one of these.
        leader: For these, the first of them: they differ in tables and slots only. None for the first, and for other
            batches.
        beside: The batch of the same rows for a draft model's pool; None: that reads this one, or there is none.
        shares_reads: Whether launches over a static batch read what rows have in common once, where they can: a graph
            without shared reads costs less. Other batches are looked at in each step.
        plans: Data that implementations derive from the above; cleared at each refill.
        earlier: Data of the refill before that makes the next plans cheaper; kept by a static batch.
    """

    tables: IntArray
    starts: IntArray
    counts: IntArray
    lengths: IntArray
    query_starts: IntArray
    kv_slots: IntArray
    block_size: int
    device: Device
    generated: npt.NDArray[np.bool_]
    states: Int32Array | None = None
    sources: Int32Array | None = None
    depth: int = 0
    behind: Int32Array | None = None
    spare: int = 0
    state_pages: torch.Tensor | None = None
    windows: tuple[PagedBatch, ...] = ()
    is_window: bool = False
    leader: PagedBatch | None = None
    beside: PagedBatch | None = None
    shares_reads: bool = False
    plans: dict[Any, Any] = field(default_factory=dict)
    earlier: dict[Any, Any] = field(default_factory=dict)
    _device_arrays: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    _renewed: list[tuple[Callable[[PagedBatch], Int32Array], slice]] = field(default_factory=list)
    _places: StaticPlaces | None = None
    _used: int = 0  # numbers used in the staging buffer

    @classmethod
    def build(
        cls,
        tables: Int32Array,
        starts: Int32Array,
        counts: Int32Array,
        block_size: int,
        device: Device,
        generated: npt.NDArray[np.bool_] | None = None,
    ) -> PagedBatch:
        """Build a batch for one step.

        Args:
            tables: [rows, width] int32.
            starts: [rows] int32.
            counts: [rows] int32.
            block_size: Tokens per block.
            device: The device.
            generated: [rows] bool; None: rows of one token.

        Returns:
            The batch.

        Raises:
            InvalidRequest: Names the invalid argument.
        """
        _check_rows(tables, starts, counts, block_size)
        tables64, starts64, counts64 = tables.astype(np.int64), starts.astype(np.int64), counts.astype(np.int64)
        query_starts = np.zeros(len(counts64) + 1, np.int64)
        np.cumsum(counts64, out=query_starts[1:])
        rows = np.repeat(np.arange(len(counts64)), counts64)
        positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts64, counts64)
        slots = tables64[rows, positions // block_size] * block_size + positions % block_size
        lengths = starts64 + counts64
        decodes = counts64 == 1 if generated is None else generated
        return cls(tables64, starts64, counts64, lengths, query_starts, slots, block_size, device, decodes)

    @classmethod
    def static(
        cls, rows: int, width: int, block_size: int, device: Device, shared: PagedBatch | None = None, extra: int = 0
    ) -> PagedBatch:
        """Make a static batch of `rows` decodes, all padding until it is filled.

        Args:
            rows: Number of rows.
            width: Most blocks of a row.
            block_size: Tokens per block.
            device: The device.
            shared: A static batch with at least as many rows and the same width and extra, to share memory with. Only
                one of the two may be in use at a time, as with captured graphs on one stream.
            extra: Numbers per row that are copied with the structure and have a meaning for the caller.

        Returns:
            The batch.
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
            np.ones(rows, np.bool_),
        )
        places = (
            StaticPlaces(rows, width, device, extra, (extra + 1) * rows) if shared is None else shared._fixed_places()
        )
        batch._places = places
        assert rows <= len(places.tables), "shared memory is for fewer rows"
        assert width == places.tables.shape[1], "shared memory is for another width"
        assert extra == places.extra, "shared memory is for more or fewer extra numbers"
        staged = places.staging.on_device
        batch._device_arrays |= {
            "tables": places.tables[:rows],
            "extra": staged[: extra * rows],
            "kv_slots": staged[extra * rows : (extra + 1) * rows].fill_(-1),
        }
        batch._used = aligned((extra + 1) * rows)
        return batch

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return int(self.query_starts[-1])

    @property
    def is_static(self) -> bool:
        """Whether the batch is static."""
        return self._places is not None

    @property
    def slot_mapping(self) -> torch.Tensor:
        """`kv_slots` as int64 on the device, for plain torch. Kernels read `kv_slots_on_device`."""
        if "kv_slots64" not in self.plans:
            self.plans["kv_slots64"] = self.device.upload(self.kv_slots)
        mapping: torch.Tensor = self.plans["kv_slots64"]
        return mapping

    @property
    def tables_on_device(self) -> torch.Tensor:
        """[rows, width] int32 on the device. Entries past a row's tokens are undefined."""
        return self.device_array("tables", _tables).view(len(self.counts), -1)

    @property
    def extra_on_device(self) -> torch.Tensor:
        """[extra x rows] int32 on the device, for a static batch."""
        return self._device_arrays["extra"]

    @property
    def kv_slots_on_device(self) -> torch.Tensor:
        """[tokens] int32 on the device."""
        return self.device_array("kv_slots", _kv_slots)

    def kv_slots_of(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the slots of `positions` [n, p] of `rows` [n] in the pool: [n, p] int64."""
        blocks = self.tables[rows[:, None], positions // self.block_size]
        return np.asarray(blocks * self.block_size + positions % self.block_size)

    def device_array(self, key: Hashable, make: Callable[[PagedBatch], Int32Array]) -> torch.Tensor:
        """Return make(self) on the device, flat. A static batch recomputes it, with the same size, at each refill."""
        if self.leader is not None and key not in OWN_ARRAYS:
            return self.leader.device_array(key, make)
        if key not in self._device_arrays:
            if self._places is None:
                self.preload({key: make})
            else:
                self._reside(key, make, self._places)
        return self._device_arrays[key]

    def _reside(self, key: Hashable, make: Callable[[PagedBatch], Int32Array], places: StaticPlaces) -> None:
        """Give a device array of a static batch its permanent memory."""
        array = make(self).reshape(-1)
        place = slice(self._used, self._used + array.size)
        if place.stop > places.room:
            raise RuntimeError(f"the plans of a static batch take more than {places.room} numbers")
        self._renewed.append((make, place))
        self._device_arrays[key] = places.staging.on_device[place]
        self._device_arrays[key].copy_(self.device.upload(array))
        self._used = aligned(place.stop)

    def preload(self, makers: Mapping[Hashable, Callable[[PagedBatch], Int32Array]]) -> None:
        """Compute several device arrays, the tables and the slots, and send them with a single copy."""
        if self._places is not None:
            return
        if self.leader is not None:
            self.leader.preload(makers)
            makers = {}
        wanted = {"tables": _tables, "kv_slots": _kv_slots, **makers}
        arrays = {key: make(self).reshape(-1) for key, make in wanted.items() if key not in self._device_arrays}
        if arrays:
            padded = [np.pad(array, (0, aligned(len(array)) - len(array))) for array in arrays.values()]
            parts = self.device.upload(np.concatenate(padded)).split([len(array) for array in padded])
            for (key, array), part in zip(arrays.items(), parts, strict=True):
                self._device_arrays[key] = part[: len(array)]

    def fill(
        self, tables: Int32Array, lengths: Int32Array, extra: Int32Array | None = None, length_max: int = 0
    ) -> None:
        """Refill a static batch for the next step, with one copy on the current stream.

        Work queued before reads the old contents. Rows from n on are padding: they write nothing, and their attention
        is undefined.

        Args:
            tables: [n, any width].
            lengths: [n], with the new token, at least 1.
            extra: [extra x rows]; None if there are none.
            length_max: The longest that `lengthen` will make a row.
        """
        places = self._fixed_places()
        width, longest = min(tables.shape[1], places.tables.shape[1]), max(int(lengths.max(initial=0)), length_max)
        assert longest <= width * self.block_size, "tables are narrower than their rows"
        self.tables = tables[:, :width].astype(np.int64)
        self.lengthen(lengths)
        self._renew(tables[:, : -(-longest // self.block_size)], extra)

    def lengthen(self, lengths: Int32Array) -> None:
        """Give the rows of the last `fill` other lengths, on the host alone. lengths: [n], see `fill`."""
        count, rows = len(lengths), len(self.counts)
        assert count <= rows, f"{count} rows in a batch for {rows}"
        self.lengths = np.zeros(rows, np.int64)
        self.lengths[:count] = lengths
        self.starts = np.maximum(self.lengths - 1, 0)
        self.kv_slots = np.full(rows, -1, np.int64)
        last = self.starts[:count, None]
        self.kv_slots[:count] = self.kv_slots_of(np.arange(count), last)[:, 0]
        self.plans.clear()

    @property
    def packed_on_device(self) -> torch.Tensor:
        """[numbers] int32 on the device: all that `fill` sends but the tables. Work that is queued may replace it."""
        return self._fixed_places().staging.on_device[: self._used]

    def pack(self, into: Int32Array, extra: Int32Array | None = None) -> None:
        """Write the contents of `packed_on_device` for the rows as they are on the host.

        Args:
            into: [numbers or more] int32.
            extra: See `fill`.
        """
        before = 0 if extra is None else len(extra)
        if extra is not None:
            into[:before] = extra
        into[before : before + len(self.kv_slots)] = self.kv_slots
        for make, place in self._renewed:
            array = make(self).reshape(-1)
            assert array.size == place.stop - place.start, "a device array of a static batch has changed its size"
            into[place] = array

    def _renew(self, tables: Int32Array, extra: Int32Array | None) -> None:
        """Send the contents of a refilled static batch, `kv_slots` and all device arrays.

        Args:
            tables: [n, only the needed columns].
            extra: [extra numbers]; None if there are none.
        """
        places = self._fixed_places()
        self.plans.clear()
        host = places.staging.host()
        self.pack(host, extra)
        places.send(tables, host, self._used)

    def _fixed_places(self) -> StaticPlaces:
        assert self._places is not None, "only a static batch is filled"
        return self._places


class StaticPlaces:
    """Device memory that static batches share.

    Each batch uses the staging buffer for its own rows: extra numbers, slots, device arrays, then the used part of the
    block tables.

    Attributes:
        tables: [rows, width] int32 on the device.
        extra: As the argument.
        room: Numbers in the staging buffer before the tables.

    Args:
        rows: The most rows of a batch.
        width: Most blocks of a row.
        device: The device.
        extra: Extra numbers per row.
        numbers: Numbers before the plans: extra numbers and slots.
    """

    def __init__(self, rows: int, width: int, device: Device, extra: int, numbers: int) -> None:
        self.tables = torch.zeros((rows, width), dtype=torch.int32, device=device.torch_device)
        self.extra, self.room = extra, aligned(numbers) + PLANS_MAX
        self.staging = Staging(device, self.room + rows * width)

    def send(self, tables: Int32Array, host: Int32Array, used: int) -> None:
        """Send a refill to the device.

        Args:
            tables: [n, only the needed columns].
            host: The staging buffer, with everything except the tables in its first `used` numbers.
            used: Numbers before the tables.
        """
        count, width = tables.shape
        packed = slice(used, used + tables.size)
        host[packed].reshape(tables.shape)[:] = tables
        self.staging.send(packed.stop)
        # Rows are far apart in `self.tables`: copying them on the device is cheaper.
        self.tables[:count, :width].copy_(self.staging.on_device[packed].view(count, width))


def aligned(numbers: int) -> int:
    """Return the start of the next array: a multiple of 16 bytes, as kernels require."""
    return numbers + -numbers % 4


def _tables(batch: PagedBatch) -> Int32Array:
    return batch.tables.astype(np.int32)


def _kv_slots(batch: PagedBatch) -> Int32Array:
    assert batch.kv_slots.max(initial=0) < 2**31, "slots exceed 32 bits"
    return batch.kv_slots.astype(np.int32)


def _check_rows(tables: Int32Array, starts: Int32Array, counts: Int32Array, block_size: int) -> None:
    for name, array, dimensions in (("tables", tables, 2), ("starts", starts, 1), ("counts", counts, 1)):
        if array.ndim != dimensions:
            raise InvalidRequest(name, f"must have {dimensions} dimensions, not {array.ndim}")
        if array.dtype != np.int32:
            raise InvalidRequest(name, f"must be int32, not {array.dtype}")
        if len(array) != len(counts):
            raise InvalidRequest(name, f"has {len(array)} rows, counts {len(counts)}")
    if len(counts) == 0:
        raise InvalidRequest("counts", "must have at least one row")
    if counts.min() < 1:
        raise InvalidRequest("counts", "every row needs at least 1 token")
    if starts.min() < 0:
        raise InvalidRequest("starts", "positions begin at 0")
    if int((starts.astype(np.int64) + counts).max()) > tables.shape[1] * block_size:
        raise InvalidRequest("tables", f"{tables.shape[1]} blocks of {block_size} tokens cannot hold a row's tokens")
