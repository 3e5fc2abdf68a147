"""Messages from the coordinator to clients: a reply to each command, by its `rid`, and streams of tokens."""

from __future__ import annotations

import msgspec

from ..errors import Field
from .shared import (
    NO_FLOAT32,
    NO_INT32,
    NO_INT64,
    ErrorInfo,
    Float32Array,
    Int32Array,
    Int64Array,
    Message,
    ModelInfo,
    Refused,
    Timings,
)


class Welcome(Message, frozen=True, tag="welcome"):
    """Reply to Hello.

    Attributes:
        tables_path: The shared-memory file, to be mapped read-only.
        resumed: The session of the Hello was known, and this connection replaces the session's earlier one. Its
            requests, sequences and block holders are kept. A repeated command (same rid) gets its earlier reply and is
            executed once; streams continue after an Attach with `resume`.
    """

    rid: int
    version: int
    boot: str
    tables_path: str
    resumed: bool = False


class Accepted(Message, frozen=True, tag="accepted"):
    """The requests `request_id` to `request_id + count - 1` are admitted, and the coordinator is responsible for them.

    Attributes:
        seed: The seed of the first request; the i-th has (seed + i) modulo 2^64.
        repeated: An earlier Submit with the same key created them.
    """

    rid: int
    request_id: int
    seed: int
    count: int = 1
    repeated: bool = False


class Attached(Message, frozen=True, tag="attached"):
    """Reply to Attach: the rows from `offset` on follow as Stream messages, then the end."""

    rid: int
    request_id: int
    seed: int
    offset: int


class Done(Message, frozen=True, tag="done"):
    """A command without a result succeeded."""

    rid: int


class RequestInfo(Message, frozen=True, tag="request_info"):
    """One request.

    Attributes:
        state: pending, running, preempted, finished, failed, cancelled or expired.
        reason: length, stop, cancelled, expired or failed; "" before the end.
        tokens: [generated] int32.
    """

    FRAMES = (("tokens", "<i4"),)
    rid: int
    request_id: int
    state: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    age_us: int = 0
    reason: str = ""
    error: ErrorInfo | None = None
    timings: Timings = Timings()
    worker: str = ""
    priority: int = 0
    preemptions: int = 0
    detached: bool = False
    tokens: Int32Array = NO_INT32


class SequenceInfo(Message, frozen=True, tag="sequence_info"):
    """One client sequence. Ages are on the coordinator's clock.

    Attributes:
        length: Its tokens.
        computed_tokens: Tokens with computed KV.
        resident: Whether it holds blocks. If not, its KV was evicted or lost with a worker, and only its tokens are
            kept.
        pinned: Whether a request pinned it as the beginning of later prompts.
    """

    rid: int
    sequence_id: int
    tenant: str
    length: int
    computed_tokens: int
    blocks: int
    bytes: int
    resident: bool
    worker: str
    request_id: int
    age_us: int
    idle_us: int
    accesses: int
    idle_ttl_ms: int
    pinned: bool = False


class Appended(Message, frozen=True, tag="appended"):
    """Reply to Append. `lengths` are the new lengths, [n] int32, in the order of the command."""

    FRAMES = (("lengths", "<i4"),)
    rid: int
    lengths: Int32Array = NO_INT32


class Forked(Message, frozen=True, tag="forked"):
    """Reply to Fork. `sequence_ids` are the new sequences, [count] int64."""

    FRAMES = (("sequence_ids", "<i8"),)
    rid: int
    sequence_ids: Int64Array = NO_INT64


class SequenceTokens(Message, frozen=True, tag="sequence_tokens"):
    """Reply to GetTokens. `tokens` is [length] int32."""

    FRAMES = (("tokens", "<i4"),)
    rid: int
    tokens: Int32Array = NO_INT32


class Removed(Message, frozen=True, tag="removed"):
    """Reply to RemoveSequences. `freed_blocks` counts the blocks without a holder left."""

    rid: int
    freed_blocks: int


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A holder of a block.

    Attributes:
        kind: sequence, request or external.
        id: The id of the sequence or request, else 0.
        since_us: How long it has held the block.
    """

    kind: str
    name: str
    id: int
    since_us: int


class BlockInfo(Message, frozen=True, tag="block_info"):
    """One block.

    Attributes:
        state: free, referenced, quarantined or cached.
        refcount: The number of all holders.
        holders: The longest holders, at most a thousand.
    """

    rid: int
    block_id: int
    worker: str
    state: str
    refcount: int
    generation: int
    tenant: str
    indexed: bool
    holders: tuple[Holder, ...]


class BlockCount(Message, frozen=True, tag="block_count"):
    """Reply to RefBlock and UnrefBlock: the resulting number of holders and state."""

    rid: int
    block_id: int
    refcount: int
    generation: int
    state: str


class Explanation(Message, frozen=True, tag="explanation"):
    """Reply to Explain. `sentences` are for people, most important first; `facts` are for programs."""

    rid: int
    subject: str
    sentences: tuple[str, ...]
    facts: dict[str, Field] = msgspec.field(default_factory=dict)


class Purged(Message, frozen=True, tag="purged"):
    """Reply to PurgeFinished. `count` is the number of forgotten requests."""

    rid: int
    count: int


class TenantWiped(Message, frozen=True, tag="tenant_wiped"):
    """Reply to WipeTenant. No entry that it counts is a hit any more.

    Attributes:
        sequences: Idle sequences that were removed.
        device_blocks: Cached blocks of pools that were freed.
        host_blocks: Entries of host files that were dropped.
        disk_blocks: Entries of disks that were dropped.
        held_blocks: Blocks of pools that live requests or holders of the tenant still use.
        pending_blocks: Blocks of host files and disks that still have bytes of any wiped tenant.
    """

    rid: int
    sequences: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    held_blocks: int
    pending_blocks: int


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of RequestList. `first_token_us` and `ended_us` are as in Timings."""

    request_id: int
    state: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int
    age_us: int
    reason: str = ""
    worker: str = ""
    first_token_us: int = -1
    ended_us: int = -1


class RequestList(Message, frozen=True, tag="request_list"):
    """Reply to ListRequests. `total` is the number of all requests."""

    rid: int
    requests: tuple[RequestRow, ...]
    total: int


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's disk tier, in blocks.

    Attributes:
        blocks: Free, cached, in use by a copy, or quarantined.
        free: Those without content.
        cached: Those that can be hit.
        quarantined: Those that the worker has not announced yet, and those that it cannot write.
        recovered_total: Entries of earlier lives that can be hit.
        pruned_total: Entries of earlier lives that cannot be used.
        saved_total: Blocks copied to the disk.
        loaded_total: Blocks copied from the disk to the host file.
        evicted_total: Entries that gave their block to another.
        unsaved_total: Blocks that left the host file before the disk could take them.
        failed_total: Copies that ended with an error of the device, or for lack of space.
        late_total: Requests that stopped waiting for the disk, and were computed.
        missed_tags_total: Reads that found another entry, or none.
        missed_checksums_total: Reads of blocks with other bytes than were written.
        off: The tier is off, because its copies failed.
        declined_total: Requests that computed what the disk has, because that takes less time.
    """

    blocks: int
    free: int
    cached: int
    quarantined: int
    recovered_total: int
    pruned_total: int
    saved_total: int
    loaded_total: int
    evicted_total: int
    unsaved_total: int
    failed_total: int
    late_total: int
    missed_tags_total: int
    missed_checksums_total: int
    off: bool = False
    declined_total: int = 0

    @property
    def referenced(self) -> int:
        """Blocks in use by a copy."""
        return self.blocks - self.free - self.cached - self.quarantined


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """One pool, in blocks unless the name has another unit. free + cached + referenced + quarantined = blocks.

    Attributes:
        base: The id of its first block; ids are consecutive.
        state_blocks: Blocks that hold the recurrent states of sequences.
        checkpoint_blocks: Blocks that hold checkpoints of such states, which prefix hits start from.
        window_blocks: Blocks that hold the KV of layers with a sliding window.
        host_blocks: Blocks of the worker's host file: free, cached, in use by a copy, or quarantined. 0: it has none.
        host_free: Those without content.
        host_cached: Those that can be hit.
        host_quarantined: Those that a lost worker may still write.
        host_saved_total: Blocks copied to the file.
        host_loaded_total: Blocks copied from the file, each a hit.
        host_evicted_total: Entries of the file that gave their block to another.
        host_unsaved_total: Blocks that the pool evicted, for which the file had no place.
        host_skipped_total: Blocks that the pool evicted and that were not copied, because they were used once and too
            few of such blocks are wanted again.
        host_recomputed_total: Skipped blocks that were computed again.
        host_wanted_permille: How many of 1,000 evicted blocks that were used once are wanted again, recently.
        host_swapped_total: Preempted requests that came back with blocks from the file.
        host_unswapped_total: Those that computed the tokens in such blocks again, because that takes less time or the
            copies or the computation were not measured yet.
        host_swapped_blocks_total: Blocks that the former read.
        host_swap_saved_us_total: What computing these blocks would have taken by the measured costs, less their copies.
        host_returns_total: Idle sequences and pins that came back from the file before a request needed them.
        host_returns_used_total: Those that a request continued then.
        host_returns_wasted_total: Those that lost their blocks again before.
        host_missed_tags_total: Reads that found another entry's tag, or none.
        host_missed_checksums_total: Reads of blocks with other bytes than were saved.
        disk: The worker's disk tier; None: it has none.
        device_idle_us_total: How long the device had nothing to do between steps, for lack of requests too. 0 from
            workers that do not measure it.
    """

    worker: str
    state: str
    blocks: int
    free: int
    cached: int
    referenced: int
    quarantined: int
    referenced_peak: int
    block_size: int
    bytes_per_block: int
    kv_dtype: str
    allocated_total: int
    freed_total: int
    live_tokens: int
    sequences: int
    steps: int
    base: int = 0
    state_blocks: int = 0
    checkpoint_blocks: int = 0
    window_blocks: int = 0
    host_blocks: int = 0
    host_free: int = 0
    host_cached: int = 0
    host_saved_total: int = 0
    host_loaded_total: int = 0
    host_quarantined: int = 0
    host_evicted_total: int = 0
    host_unsaved_total: int = 0
    host_skipped_total: int = 0
    host_recomputed_total: int = 0
    host_wanted_permille: int = 0
    host_swapped_total: int = 0
    host_unswapped_total: int = 0
    host_swapped_blocks_total: int = 0
    host_swap_saved_us_total: int = 0
    host_missed_tags_total: int = 0
    host_missed_checksums_total: int = 0
    disk: DiskStats | None = None
    device_idle_us_total: int = 0
    host_returns_total: int = 0
    host_returns_used_total: int = 0
    host_returns_wasted_total: int = 0


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of requests: `*_total` since start, the others now."""

    pending: int
    running: int
    accepted_total: int
    finished_total: int
    failed_total: int
    cancelled_total: int
    expired_total: int
    refused_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    computed_tokens_total: int
    recomputed_tokens_total: int = 0
    preemptions_total: int = 0
    streams_paused_total: int = 0


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant. Prefix hit rate = hit tokens / queried tokens.

    Attributes:
        host_blocks: Blocks of host files that it is charged for.
        host_floor: Blocks of each host file that are reserved for it.
        host_ceiling: Blocks of each host file that it may occupy; 0 for no limit.
        disk_blocks: Blocks of disks that it is charged for.
        disk_floor: Blocks of each disk that are reserved for it.
        disk_ceiling: Blocks of each disk that it may occupy; 0 for no limit.
    """

    tenant: str
    blocks: int
    prefix_queried_tokens_total: int
    prefix_hit_tokens_total: int
    bytes: int = 0
    byte_seconds: float = 0.0
    floor: int = 0
    ceiling: int = 0
    weight: float = 1.0
    pending: int = 0
    host_blocks: int = 0
    host_floor: int = 0
    host_ceiling: int = 0
    disk_blocks: int = 0
    disk_floor: int = 0
    disk_ceiling: int = 0


class Stats(Message, frozen=True, tag="stats"):
    """One consistent snapshot: all numbers are of the same instant."""

    rid: int
    boot: str
    uptime_us: int
    clients: int
    sequences: int
    requests: RequestStats
    pools: tuple[PoolStats, ...]
    tenants: tuple[TenantStats, ...]


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a worker.

    Attributes:
        state: connecting, loading or ready.
        progress: 0 to 1 while loading.
        steps: The number of completed steps.
        since_step_us: Time since the oldest step in flight was sent, 0 if none is in flight.
        device_bytes: Device memory in bytes by purpose, as in WorkerReady; empty until it is ready.
        kernels: The kernels in use, as in WorkerReady; empty until it is ready.
        rank: The rank of this process, where several compute one model together.
        ranks: The number of ranks.
        drafts: The most tokens that it drafts and verifies for a request in a step; 0: none.
        drafted_total: Drafted tokens that its steps have verified.
        accepted_total: Drafted tokens that became tokens of answers.
        host_blocks: Blocks of its host file; 0: it has none.
        host_cached: Those that can be hit.
        host_saved_total: Blocks copied to the file.
        host_loaded_total: Blocks copied from the file.
        host_missed_total: Blocks in the file that did not hold what was expected.
        host_swapped_total: Preempted requests that came back with blocks from the file.
        host_swap_saved_us_total: What computing these blocks would have taken by the measured costs, less their copies.
        disk: Its disk tier; None: it has none.
        host_returns_total: Idle sequences and pins that came back from the file before a request needed them.
        host_returns_used_total: Those that a request continued then.
    """

    name: str
    pid: int
    state: str
    phase: str = ""
    progress: float = 0.0
    steps: int = 0
    since_step_us: int = 0
    device_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    kernels: dict[str, str] = msgspec.field(default_factory=dict)
    rank: int = 0
    ranks: int = 1
    drafts: int = 0
    drafted_total: int = 0
    accepted_total: int = 0
    host_blocks: int = 0
    host_cached: int = 0
    host_saved_total: int = 0
    host_loaded_total: int = 0
    host_missed_total: int = 0
    host_swapped_total: int = 0
    host_swap_saved_us_total: int = 0
    disk: DiskStats | None = None
    host_returns_total: int = 0
    host_returns_used_total: int = 0

    @property
    def title(self) -> str:
        """Return the display name: the worker's name, with the rank if there are several."""
        return self.name if self.ranks == 1 else f"{self.name} rank {self.rank}"


LEFT = "left"  # prefix of the reason in `Health.gone` for a worker that left on purpose


class Health(Message, frozen=True, tag="health"):
    """Reply to GetHealth.

    Attributes:
        live: The event loop runs (it answered).
        ready: A request submitted now would be served.
        reason: Why it is not ready.
        gone: The reason why each former worker left, by name; it begins with LEFT if the worker left on purpose.
        kinds: Prompts and generated tokens are computed differently, so that neither is a prefix hit for the other.
    """

    rid: int
    live: bool
    ready: bool
    reason: str
    workers: tuple[WorkerHealth, ...]
    model: ModelInfo | None = None
    draining: bool = False
    gone: dict[str, str] = msgspec.field(default_factory=dict)
    kinds: bool = False


class PrefixFound(Message, frozen=True, tag="prefix_found"):
    """Reply to FindPrefix, exact at this instant.

    Attributes:
        ready: As in Health. The remaining fields are set only when it is true.
        draining: As in Health.
        cached_tokens: Tokens of the prompt with cached KV.
        queued_tokens: Prompt tokens of waiting and running requests that are not computed yet. Cached prefixes of
            waiting requests are not subtracted.
        running: The number of running requests.
        pending: The number of waiting requests.
        rows_free: How many more requests may run.
        room_tokens: Tokens that fit into the emptiest pool, counting blocks without a holder as free.
        known: Requests of the idempotency key exist here.
    """

    rid: int
    ready: bool
    draining: bool = False
    cached_tokens: int = 0
    queued_tokens: int = 0
    running: int = 0
    pending: int = 0
    rows_free: int = 0
    room_tokens: int = 0
    known: bool = False


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one request, sent once to the client that streams it.

    Attributes:
        cut_tokens: The number of streamed tokens that a FinishAt took back; generated_tokens excludes these.
        sequence_id: The sequence that keeps the prompt and the answer, if the request asked for one; 0 for none.
        pinned: How many leading tokens of the prompt are pinned for each of `Submit.pins`; 0 where none are. Empty if
            the request ended before its first token.
    """

    request_id: int
    reason: str
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    error: ErrorInfo | None = None
    cut_tokens: int = 0
    sequence_id: int = 0
    pinned: tuple[int, ...] = ()


class Stream(Message, frozen=True, tag="stream"):
    """Events of this connection's requests in one loop turn, split into several messages if too large.

    Row i means: request `request_ids[i]` generated token `tokens[i]` (log-probability `logprobs[i]`, nats) at
    `offsets[i]` (0 is the first generated token). `ended` applies after all rows. Prompt tokens with log-probabilities
    precede the generated ones, and have negative offsets: -1 is the last prompt token.

    Attributes:
        paused: Requests with a stream that is paused because the client reads too slowly. The rest,
            including the end, follows after an Attach with the offset.
        taken: Requests that another connection reads now.
        top_counts: [rows] int32, the number of top tokens of each row. Empty if no row has any.
        top_tokens: [sum] int32, row after row, most likely first.
        top_logprobs: [sum] float32, in nats.
        ranks: [rows] int32, the rank of each prompt token in its place, from 1; 0 for generated tokens. Empty if all
            are 0.
    """

    FRAMES = (
        ("request_ids", "<i8"),
        ("offsets", "<i4"),
        ("tokens", "<i4"),
        ("logprobs", "<f4"),
        ("top_counts", "<i4"),
        ("top_tokens", "<i4"),
        ("top_logprobs", "<f4"),
        ("ranks", "<i4"),
    )
    ended: tuple[Ended, ...] = ()
    paused: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    request_ids: Int64Array = NO_INT64
    offsets: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32
    logprobs: Float32Array = NO_FLOAT32
    top_counts: Int32Array = NO_INT32
    top_tokens: Int32Array = NO_INT32
    top_logprobs: Float32Array = NO_FLOAT32
    ranks: Int32Array = NO_INT32


CLIENT_REPLIES = (
    Welcome
    | Accepted
    | Attached
    | Refused
    | Done
    | RequestInfo
    | RequestList
    | Stats
    | Health
    | PrefixFound
    | Stream
    | SequenceInfo
    | Appended
    | Forked
    | SequenceTokens
    | Removed
    | BlockInfo
    | BlockCount
    | Explanation
    | Purged
    | TenantWiped
)
