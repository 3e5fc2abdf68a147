"""The format of the cache in a snapshot: blocks, pools, sequences, tenants and groups. See `declared.py`."""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec

from kvforge.protocol.messages import ModelInfo

from ..core.cache.disk_orders import DiskOrder
from ..core.cache.groups import FormingCheckpoint
from ..core.cache.host_copies import HostLoad, SentCopies
from ..core.cache.host_node import HostNode
from ..core.cache.host_yield import OnceShare
from ..core.cache.idle_times import IdleCounts
from ..core.cache.paced_reads import NO_SLOT
from ..core.cache.wipes import WipedTenant
from .field_markers import (
    F64,
    I8,
    I32,
    I64,
    U64,
    Big,
    F32Table,
    Flags,
    Frames,
    I32Table,
    I64Table,
    Saved,
    SpecialContainer,
)


class SavedMeters(Saved):
    """The `Meters`."""

    rows: I64Table
    changed: set[int]


class SavedTenants(Saved):
    """The `Tenants`."""

    _index: dict[str, int]
    forgotten_total: int
    names: list[str]
    floor: I64
    ceiling: I64
    weight: F64
    requests: I64
    service: F64
    prefix_queried_tokens: I64
    prefix_hit_tokens: I64
    past_byte_seconds: F64
    changed: set[int]
    _configured: int
    has_quotas: bool


class SavedBlocks(Saved):
    """The `Blocks`."""

    refcount: I32
    generation: I32
    owner: I32
    state: I8
    indexed: Flags
    touch: I64
    since_us: I64
    external: dict[int, dict[str, int]]
    kind: I8 | None = None


class SavedStore(Saved):
    """The `PrefixStore`."""

    hash: U64
    parent: I64
    tokens: I32Table


class SavedPins(Saved):
    """The `Pins`."""

    _added_by: dict[tuple[int, str], tuple[int, int]]
    _computed_by: dict[int, int]


class SavedSequences(Saved):
    """The `Sequences`."""

    _last_id: int
    id: I64
    pool: I64
    tenant: I64
    length: I64
    computed: I64
    scheduled: I64
    pending: I64
    used: I64
    last_step: I64
    read_pool: I64
    read_step: I64
    salt: I64
    hashed: I64
    chain: U64
    parent: I64
    request: I64
    client: I64
    running: Flags
    resident_us: I64
    created_us: I64
    accessed_us: I64
    accesses: I64
    idle_ttl_us: I64
    leased: Flags
    owned: Flags
    table: I32Table
    tokens: I32Table
    logprobs: F32Table
    slot_of: dict[int, int]
    expiry_us: int | None
    _free: list[int]
    quarantine: Annotated[list[tuple[int, int, int]], SpecialContainer(deque)]
    kept: Flags | None = None
    pinned: Flags | None = None
    states: I32Table | None = None
    state_used: I64 | None = None
    shared_end: I64 | None = None
    window_first: I64 | None = None
    window_end: I64 | None = None
    idle_since_us: I64 | None = None
    return_us: I64 | None = None
    returned: Flags | None = None
    returned_after_us: I64 | None = None


class SavedCosts(Saved):
    """The `StepCosts` of a group."""

    fixed: Big
    token: Big
    _steps: Big
    _tokens: Big
    _took: Big
    _squares: Big
    _products: Big


class SavedRowCosts(Saved):
    """The `RowCosts` of a group."""

    line: SavedCosts
    plain_way: Big
    drafted_way: Big
    last_way: int = -1
    way_before: int = -1


class SavedDraftGains(Saved):
    """The `DraftGains` of a group."""

    plain_us: list[int]
    plain_seen: list[int]
    cycles: list[int]
    tokens: list[int]
    took_us: list[int]
    least_us: list[int]
    until: list[int]
    waits: list[int]


class SavedModelDrafts(Saved):
    """The `ModelDrafts` of a group."""

    gains: SavedDraftGains
    most: int
    first_good: int
    first_tried: int
    later_good: int
    later_tried: int
    pass_time: Big
    last_pass: Big
    pass_before: Big
    trial: int
    trying: bool
    trial_us: int
    waits: int
    next_trial: int


class SavedPauses(Saved):
    """The `Pauses` of a group."""

    usual_us: int
    lead_us: int
    total_us: int


class SavedStep(Saved):
    """A `SentStep`. `message` is the Step."""

    step_id: int
    slots: I64
    runs: I64
    counts: I64
    samples: Flags
    sampled: I64
    sent_us: int
    decodes: bool
    prefill_tokens: int
    tenant: int
    message: Frames
    in_time: bool = False


class SavedSteady(Saved):
    """The steady decode batch of a group."""

    slots: I64
    runs: I64
    tenant: int
    starts: I64
    room: I64
    left: int


class SavedIndex(Saved):
    """A `PrefixCache`.

    Attributes:
        blocks: Blocks of the entries, in order; the store has their hashes.
        parents: Keys of the parents.
        only: The only child of each parent, or -1 if it has several.
        several: The children of the parents marked -1, in order.
    """

    blocks: I64
    parents: I64
    only: I64
    several: list[list[int]]


class SavedZeroing(Saved):
    """The `Zeroing` of a pool."""

    _writer: I32
    _owed: list[int]


class SavedPool(Saved):
    """A `BlockPool`. `lru` has ids and stamps of each tenant's cached blocks, least recently used first."""

    base: int
    count: int
    _stack: I64
    free: int
    quarantined: int
    cached: int
    lru: dict[int, tuple[I64, I64]]
    _stamp: int
    quarantine: list[I64]
    usage: I64
    _usage_since_us: I64
    _usage_block_us: I64
    done_step: int
    referenced_peak: int
    allocated_total: int
    freed_total: int
    _awaited: Annotated[list[int], SpecialContainer(deque)]
    zeroing: SavedZeroing | None
    checkpoints: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    windows: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)


class SavedHostYield(Saved):
    """A `HostYield`. `skipped` has its hashes in order, `skipped_of` their tenants."""

    overall: OnceShare
    by_tenant: dict[int, OnceShare]
    skipped: list[int]
    skipped_of: list[int]
    skipped_max: int
    once_total: int
    wanted_total: int
    skipped_total: int
    recomputed_total: int


class SavedHostTier(Saved):
    """A `HostTier`.

    Attributes:
        lru: Of older versions: the entries that no copy uses, least recently used first.
        own: Of each tenant, these entries and the stamps of their last use, least recently used first.
        stamp: The last of these stamps.
    """

    identity: str
    total: int
    epoch: int
    nodes: dict[int, HostNode]
    _last_node: int
    _free: list[int]
    _quarantine: list[int]
    saved_total: int
    loaded_total: int
    evicted_total: int
    unsaved_total: int
    lru: list[int] = msgspec.field(default_factory=list)
    own: dict[int, tuple[list[int], list[int]]] = msgspec.field(default_factory=dict)
    stamp: int = 0
    usage: dict[int, int] = msgspec.field(default_factory=dict)
    swapped_total: int = 0
    unswapped_total: int = 0
    swapped_blocks_total: int = 0
    swap_saved_us_total: int = 0
    missed_tags_total: int = 0
    missed_checksums_total: int = 0
    to_wipe: list[int] = msgspec.field(default_factory=list)
    wiping: set[int] = msgspec.field(default_factory=set)
    stale: set[int] = msgspec.field(default_factory=set)
    breaks: int = 0
    yields: SavedHostYield | None = None
    returns_total: int = 0
    returns_used_total: int = 0
    returns_wasted_total: int = 0


class SavedDiskTier(Saved):
    """A `DiskTier`. `lru`, `own` and `stamp` are as in `SavedHostTier`."""

    total: int
    nodes: dict[int, HostNode]
    _last_node: int
    _free: list[int]
    _quarantine: list[int]
    announced: bool
    saved_total: int
    loaded_total: int
    evicted_total: int
    unsaved_total: int
    missed_tags_total: int
    missed_checksums_total: int
    recovered_total: int
    pruned_total: int
    failed_total: int
    late_total: int
    lru: list[int] = msgspec.field(default_factory=list)
    own: dict[int, tuple[list[int], list[int]]] = msgspec.field(default_factory=dict)
    stamp: int = 0
    usage: dict[int, int] = msgspec.field(default_factory=dict)
    to_wipe: list[int] = msgspec.field(default_factory=list)
    wiping: set[int] = msgspec.field(default_factory=set)
    stale: set[int] = msgspec.field(default_factory=set)
    breaks: int = 0
    halves: set[int] = msgspec.field(default_factory=set)
    declined_total: int = 0


class SavedWipes(Saved):
    """A `Wipes`."""

    count: int = 0
    latest: dict[str, WipedTenant] = msgspec.field(default_factory=dict)
    dead: dict[int, None] = msgspec.field(default_factory=dict)


class SavedRankDisks(Saved):
    """A `RankDisks`."""

    count: int
    found: list[dict[int, bytes]]
    cursors: list[int]
    asked: list[int]
    usable: int
    answers: dict[int, dict[int, tuple[int, int]]]


class SavedDiskCosts(Saved):
    """The `DiskCosts` of a disk tier."""

    line: SavedCosts
    declined: int
    began_us: int
    blocks: int
    due: int


class SavedDiskCopies(Saved):
    """The `DiskCopies` of a group. `wanted` has its nodes in order."""

    tier: SavedDiskTier
    wanted: list[int]
    orders: dict[int, DiskOrder]
    loads: dict[int, set[int]]
    _loading: dict[int, int]
    _last_order: int
    _last_load: int
    cursor: int
    scanning: int
    failures: int
    stalled: bool
    off: bool
    ranks: SavedRankDisks | None = None
    costs: SavedDiskCosts | None = None


class SavedHostCopies(Saved):
    """The `HostCopies` of a group.

    Attributes:
        identity: The identity of its tier.
        backlog: That of its `HostWriteback`.
        paced: The slot of its `PacedReads`, and what is waiting.
    """

    identity: str
    writes: dict[int, int]
    reads: dict[int, int]
    loads: dict[int, HostLoad]
    sent: Annotated[list[SentCopies], SpecialContainer(deque)]
    backlog: list[int] = msgspec.field(default_factory=list)
    write_costs: SavedCosts | None = None
    read_costs: SavedCosts | None = None
    disk: SavedDiskCopies | None = None
    reused: I32 | None = None
    paced: tuple[int, dict[int, int]] = (NO_SLOT, {})


class SavedIdleTimes(Saved):
    """The `IdleTimes`."""

    overall: IdleCounts
    by_tenant: dict[int, IdleCounts]


class SavedGroup(Saved):
    """A `Group`."""

    number: int
    worker: int
    name: str
    epoch: int
    others: tuple[int, ...]
    pool: SavedPool
    index: SavedIndex
    model: ModelInfo
    bytes_per_block: int
    kv_dtype: str
    wants_kinds: bool
    sent: list[SavedStep]
    last_step: int
    copies: dict[int, tuple[int, int]]
    started_slots: list[int]
    begins_bytes: int
    steps_total: int
    running: int
    left_step: int
    steady: SavedSteady | None
    suspect: int
    stopped: list[int]
    away: bool
    result_us: int
    costs: SavedCosts
    step_times: list[int]
    last_sampled: I64 | None = msgspec.field(name="told")  # the name in snapshots stays
    last_sampled_us: int = msgspec.field(name="told_us")
    state_blocks: int = 0
    prompt_chunk: int = 1
    window: int = 0
    window_pages: int = 0
    window_blocks: int = 0
    forming: list[FormingCheckpoint] = msgspec.field(default_factory=list)
    idle_tails: list[int] = msgspec.field(default_factory=list)
    interactive_us: int = -1
    batch_step: int = 0
    drafts: int = 0
    draft_states: int = 0
    proposals: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    expected: dict[int, tuple[int, int, tuple[int, ...]]] = msgspec.field(default_factory=dict)
    draft_chance: int = 512
    draft_later: int = 512
    drafted_total: int = 0
    accepted_total: int = 0
    row_costs: SavedRowCosts | None = None
    model_drafts: SavedModelDrafts | None = None
    draft_wait: int = 0
    drafts_from: int = 0
    host: SavedHostCopies | None = None
    pauses: SavedPauses | None = None


class SavedCache(Saved):
    """The `KVCacheManager`."""

    tenants: SavedTenants
    meters: SavedMeters
    blocks: SavedBlocks
    store: SavedStore
    pins: SavedPins
    sequences: SavedSequences
    groups: list[SavedGroup]
    kinds: bool
    _epochs: int
    model: ModelInfo | None
    vocab_size: int
    largest_pool: int
    past_steps_total: int
    evicted_sequences_total: int
    state_blocks: int = 0
    window: int = 0
    window_pages: int = 0
    host_tiers: list[SavedHostTier] = msgspec.field(default_factory=list)
    wipes: SavedWipes = msgspec.field(default_factory=SavedWipes)
    idle_times: SavedIdleTimes | None = None
