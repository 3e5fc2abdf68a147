"""The shared-memory layout, declared once. Writer and readers compute every offset from here.

One file, little-endian, every array aligned to a cache line:

    header            magic, layout version, geometry, boot id                      one page
    gauges            version, then one int64 for each name in GAUGES               one page
    rows_written      int64           number of the last completed write of rows: 0, 2, 4, ...
    row_version       [slots] int64   number of the row's last write; one less (odd) during a write
    row_length        [slots] int32   tokens known; may change alone, without a new version
    row_blocks        [slots] int32   used columns of block_table
    row_sequence      [slots] int64   id of the sequence in the slot, 0 = none
    block_refcount    [blocks] int32
    block_generation  [blocks] int32
    block_owner       [blocks] int32  number of the tenant that the block is charged to, 0 = none
    block_kind        [blocks] int8   what the block holds, a place in BLOCK_KINDS; 0 for a free block
    block_state       [blocks] int8   a place in BLOCK_STATES
    block_table       [slots, blocks_per_sequence] int32   global block ids; one cache line between the rows
    row_states        [slots] int32   used columns of state_table; 0 for a model without a recurrent state
    state_table       [slots, states_per_sequence] int32   global ids of the blocks that hold a sequence's state
    numbers           version, time of writing (ns, monotonic), one int64 for each name in GAUGES
    tenants           [TENANT_ROWS + 1, TENANT_CELLS] int64    see protocol/meters.py
    tenant_blocks     [TENANT_ROWS + 1, TENANT_TIERS] int64   blocks that each tenant is charged for, by tier
    pool_counts       [pools, POOL_CELLS] int64
    facts             one record of MessagePack (meters.ServiceInfo) behind its length, int64
    mail_head         [pools, 4 STEP_RING_SLOTS] int64       see protocol/handover.py
    mail              [pools, STEP_RING_SLOTS STEP_SLOT_BYTES] uint8

Rows with a power of two bytes would map equal columns to the same few sets of the processor's caches. A step reads and
writes one column of every row, so one cache line separates the rows. Untouched pages of the file take no memory, so the
limits may be generous.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec
import numpy as np

from .errors import InvalidConfiguration
from .meters import FACTS_BYTES, FACTS_POOL_BYTES, POOL_CELLS, TENANT_CELLS, TENANT_ROWS, TENANT_TIERS

MAGIC = 0x6B76_666F_7267_6531  # "kvforge1"
LAYOUT_VERSION = 14
PAGE_BYTES = 4096
LINE_BYTES = 64
FILE_BYTES_MAX = 1 << 40
STEP_RING_SLOTS, STEP_SLOT_BYTES = 4, 1 << 17
BLOCK_KINDS = ("kv", "state", "checkpoint", "window")
BLOCK_STATES = ("free", "referenced", "quarantined", "cached")

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("layout_version", "<u4"),
        ("header_bytes", "<u4"),
        ("boot", "S32"),
        ("slots", "<i8"),
        ("blocks", "<i8"),
        ("blocks_per_sequence", "<i8"),
        ("block_size", "<i8"),
        ("pools", "<i8"),
        ("file_bytes", "<i8"),
        ("pid", "<i8"),
        ("states_per_sequence", "<i8"),
    ]
)
GAUGES = (
    "turns",
    "uptime_us",
    "sequences",
    "requests_pending",
    "requests_running",
    "blocks_total",
    "blocks_free",
    "blocks_cached",
    "blocks_referenced",
    "blocks_quarantined",
    "sequence_tokens",
    "generated_tokens_total",
    "steps_total",
    "requests_accepted_total",
    "requests_refused_total",
    "computed_tokens_total",
    "streams_paused_total",
    "sequences_evicted_total",
    "tenants_forgotten_total",
    "clients",
    "draining",
    "restarts_total",
    "workers_registered_total",
    "workers_returned_total",
    "workers_left_total",
    "workers_lost_total",
    "drafts_total",
    "drafted_tokens_total",
    "accepted_drafts_total",
    "journal_bytes",
    "journal_records_total",
)
_ARRAYS: tuple[tuple[str, str, tuple[str | int, ...]], ...] = (
    ("rows_written", "<i8", ()),
    ("row_version", "<i8", ("slots",)),
    ("row_length", "<i4", ("slots",)),
    ("row_blocks", "<i4", ("slots",)),
    ("row_sequence", "<i8", ("slots",)),
    ("block_refcount", "<i4", ("blocks",)),
    ("block_generation", "<i4", ("blocks",)),
    ("block_owner", "<i4", ("blocks",)),
    ("block_kind", "|i1", ("blocks",)),
    ("block_state", "|i1", ("blocks",)),
    ("block_table", "<i4", ("slots", "blocks_per_sequence")),
    ("row_states", "<i4", ("slots",)),
    ("state_table", "<i4", ("slots", "states_per_sequence")),
    ("numbers", "<i8", (2 + len(GAUGES),)),
    ("tenants", "<i8", (TENANT_ROWS + 1, TENANT_CELLS)),
    ("tenant_blocks", "<i8", (TENANT_ROWS + 1, len(TENANT_TIERS))),
    ("pool_counts", "<i8", ("pools", POOL_CELLS)),
    ("facts", "|u1", ("facts_bytes",)),
    ("mail_head", "<i8", ("pools", 4 * STEP_RING_SLOTS)),
    ("mail", "|u1", ("pools", STEP_RING_SLOTS * STEP_SLOT_BYTES)),
)

assert HEADER.itemsize == 112 <= PAGE_BYTES
assert (1 + len(GAUGES)) * 8 <= PAGE_BYTES


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the tables.

    Raises:
        InvalidConfiguration: Names the field that is too small or too large.
    """

    slots: int
    blocks: int
    blocks_per_sequence: int
    block_size: int
    pools: int = 1
    states_per_sequence: int = 1

    @property
    def facts_bytes(self) -> int:
        """Return the room for the names of tenants and the facts of workers, in bytes."""
        return FACTS_BYTES + FACTS_POOL_BYTES * self.pools

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidConfiguration(name, f"must be at least 1, not {getattr(self, name)}")
        if self.blocks >= 1 << 31:
            raise InvalidConfiguration("blocks", "block ids are 32 bit: at most 2147483647")
        if file_bytes(self) > FILE_BYTES_MAX:
            raise InvalidConfiguration(
                "blocks_per_sequence",
                f"the shared tables would take {file_bytes(self)} bytes, more than {FILE_BYTES_MAX}: "
                "lower sequences_max, blocks_max or blocks_per_sequence_max",
            )


class ArraySpec(msgspec.Struct, frozen=True):
    """Place of one array in the file, in C order.

    Attributes:
        offset: Bytes from the start of the file.
        dtype: numpy's name of the type.
        shape: The number of items along each axis.
        strides: Bytes from one item to the next along each axis.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes from the first item to the end of the last row, with the gaps between rows."""
        return self.shape[0] * self.strides[0] if self.shape else int(self.dtype[2:])


@lru_cache(maxsize=4)  # opening a table calls it several times
def arrays(geometry: Geometry) -> Mapping[str, ArraySpec]:
    """Return the place of each array of the file by name, in file order."""
    found: dict[str, ArraySpec] = {}
    offset = 2 * PAGE_BYTES
    for name, dtype, dimensions in _ARRAYS:
        shape = tuple(n if isinstance(n, int) else int(getattr(geometry, n)) for n in dimensions)
        item = int(dtype[2:])
        strides = (item,) * len(shape)
        if len(shape) == 2:
            strides = ((-(-shape[1] * item // LINE_BYTES) + 1) * LINE_BYTES, item)
        found[name] = spec = ArraySpec(offset, dtype, shape, strides)
        offset += -(-spec.bytes // LINE_BYTES) * LINE_BYTES
    return found


def file_bytes(geometry: Geometry) -> int:
    """Return the size of the whole file in bytes."""
    last = list(arrays(geometry).values())[-1]
    return -(-(last.offset + last.bytes) // PAGE_BYTES) * PAGE_BYTES
