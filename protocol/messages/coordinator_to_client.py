"""What the coordinator says to clients: an answer to each command, by its `rid`, and streams of tokens."""

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
    """Answer to Hello. tables_path: the shared-memory file, to be mapped read-only.

    resumed: the session that Hello named was known, and this connection has taken the place of its earlier one: its
    requests, sequences and holders of blocks are its own as before. A command that is sent again with its rid has the
    answer that it had, and is done once; streams go on with an Attach (`resume`).
    """

    rid: int
    version: int
    boot: str
    tables_path: str
    resumed: bool = False


class Accepted(Message, frozen=True, tag="accepted"):
    """The requests `request_id` to `request_id + count - 1` are admitted: from here on the coordinator's to finish.

    seed: of the first; that of the i-th is (seed + i) modulo 2^64. repeated: an earlier Submit of the same key made
    them.
    """

    rid: int
    request_id: int
    seed: int
    count: int = 1
    repeated: bool = False


class Attached(Message, frozen=True, tag="attached"):
    """Answer to Attach: the rows from `offset` on follow as Stream messages, then the end."""

    rid: int
    request_id: int
    seed: int
    offset: int


class Done(Message, frozen=True, tag="done"):
    """A command without a result succeeded."""

    rid: int


class RequestInfo(Message, frozen=True, tag="request_info"):
    """One request. state: pending, running, preempted, finished, failed, cancelled or expired.

    reason: length, stop, cancelled, expired, failed, or "" while it has not ended. tokens: [generated] int32.
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
    """One client sequence. length, computed_tokens (those with KV) in tokens; ages on the coordinator's clock.

    resident: whether it holds blocks; if not, its KV was evicted or lost with a worker and its tokens are kept.
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


class Appended(Message, frozen=True, tag="appended"):
    """lengths: [n] int32, in the order of the command."""

    FRAMES = (("lengths", "<i4"),)
    rid: int
    lengths: Int32Array = NO_INT32


class Forked(Message, frozen=True, tag="forked"):
    """sequence_ids: [count] int64, the new ones."""

    FRAMES = (("sequence_ids", "<i8"),)
    rid: int
    sequence_ids: Int64Array = NO_INT64


class SequenceTokens(Message, frozen=True, tag="sequence_tokens"):
    """tokens: [length] int32."""

    FRAMES = (("tokens", "<i4"),)
    rid: int
    tokens: Int32Array = NO_INT32


class Removed(Message, frozen=True, tag="removed"):
    """freed_blocks: how many blocks nobody holds any more."""

    rid: int
    freed_blocks: int


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a block: kind is sequence, request or external; id of the sequence or request, else 0."""

    kind: str
    name: str
    id: int
    since_us: int


class BlockInfo(Message, frozen=True, tag="block_info"):
    """One block. state: free, referenced, quarantined or cached. since_us of a holder: how long it has held it.

    holders: those that have held it longest, a thousand at most; refcount says how many there are.
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
    """Answer to RefBlock and UnrefBlock: the count of holders and the state that followed."""

    rid: int
    block_id: int
    refcount: int
    generation: int
    state: str


class Explanation(Message, frozen=True, tag="explanation"):
    """sentences: for people, most important first. facts: the same for programs."""

    rid: int
    subject: str
    sentences: tuple[str, ...]
    facts: dict[str, Field] = msgspec.field(default_factory=dict)


class Purged(Message, frozen=True, tag="purged"):
    rid: int
    count: int


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of RequestList. first_token_us, ended_us: as in Timings."""

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
    rid: int
    requests: tuple[RequestRow, ...]
    total: int


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """One pool, in blocks unless the name says otherwise. free + cached + referenced + quarantined = blocks.

    base: the id of its first block; the others follow.
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
    """One tenant. Prefix hit rate = hit tokens / queried tokens."""

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


class Stats(Message, frozen=True, tag="stats"):
    """One consistent snapshot: every number was true at the same instant."""

    rid: int
    boot: str
    uptime_us: int
    clients: int
    sequences: int
    requests: RequestStats
    pools: tuple[PoolStats, ...]
    tenants: tuple[TenantStats, ...]


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """state: connecting, loading or ready. progress: 0 to 1 while loading.

    steps: how many it has done; since_step_us: how long it has worked on the oldest one it was sent, 0 where on none.
    device_bytes: its device's memory in bytes by purpose, and kernels: what serves, as in WorkerReady; empty until it
    is ready. rank, ranks: which process of the worker it is, where several compute one model together.
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

    @property
    def title(self) -> str:
        """What people call it: its name, and which rank it is where there are several."""
        return self.name if self.ranks == 1 else f"{self.name} rank {self.rank}"


LEFT = "left"  # begins what `Health.gone` has of a worker that left on purpose


class Health(Message, frozen=True, tag="health"):
    """live: the loop turns (it answered). ready: a request submitted now would be served. reason: why not.

    gone: workers that were there and are not, by name: how each worker went, and why. It begins with LEFT where the
    worker left on purpose.
    """

    rid: int
    live: bool
    ready: bool
    reason: str
    workers: tuple[WorkerHealth, ...]
    model: ModelInfo | None = None
    draining: bool = False
    gone: dict[str, str] = msgspec.field(default_factory=dict)


class PrefixFound(Message, frozen=True, tag="prefix_found"):
    """Answer to FindPrefix: of this instant, and not guessed.

    ready, draining: as in Health; more is said where it is ready alone. cached_tokens: of the prompt, those whose KV is
    there. queued_tokens: of the prompts that wait or are being computed, those not computed yet; where a waiting one
    would find some of its tokens is not looked for. running, pending: requests that run, and that wait. rows_free:
    how many more may run. room_tokens: for so many tokens the emptiest pool has blocks, evicting what nobody holds.
    known: the key's requests are here.
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
    """The end of one request, sent once to whoever streams it.

    cut_tokens: how many of the streamed tokens a FinishAt took back; they are not among generated_tokens.
    """

    request_id: int
    reason: str
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    error: ErrorInfo | None = None
    cut_tokens: int = 0


class Stream(Message, frozen=True, tag="stream"):
    """What happened to this connection's requests in one loop turn: one message, and more where it would be too large.

    Row i: request `request_ids[i]` generated token `tokens[i]` (log-probability `logprobs[i]`, nats) at `offsets[i]`
    (0 is the first generated token). `ended` comes after all rows.
    paused: requests whose stream to this connection has stopped, because it did not read fast enough; what it lacks,
    the end included, comes after an Attach that names the offset. taken: requests that another connection reads now.
    top_counts[i]: how many of the most likely tokens at that place follow in top_tokens and top_logprobs (nats), row
    after row, most likely first; empty where no row has any. [rows] int32, [sum] int32, [sum] float32.
    """

    FRAMES = (
        ("request_ids", "<i8"),
        ("offsets", "<i4"),
        ("tokens", "<i4"),
        ("logprobs", "<f4"),
        ("top_counts", "<i4"),
        ("top_tokens", "<i4"),
        ("top_logprobs", "<f4"),
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
)
