"""Every wire message: one frozen struct each, a stable tag, and defaults for fields that came later.

A message is a MessagePack map (its scalar fields and the tag `t`) and one binary frame with its array fields one after
the other. `FRAMES` lists them in that order with their little-endian dtype. Who sends what:

    client -> coordinator    Hello, Submit, Attach, Cancel, FinishAt, GetRequest, ListRequests, GetStats, GetHealth,
                             Drain, Goodbye, CreateSequence, Append, Fork, GetSequence, GetTokens, RemoveSequences,
                             GetBlock, RefBlock, UnrefBlock, Explain, PurgeFinished
    coordinator -> client    Welcome, Accepted, Attached, Refused, RequestInfo, RequestList, Stats, Health, Stream
                             SequenceInfo, Appended, Forked, SequenceTokens, Removed, BlockInfo, BlockCount,
                             Explanation, Purged, Done
    worker -> coordinator    WorkerHello, WorkerLoading, WorkerReady, StepResult, WorkerFailed, Goodbye
    coordinator -> worker    WorkerWelcome, PoolRegistered, Step, Refused, Stop

Every command carries `rid`, chosen by its sender; the reply to it carries the same `rid`.
Times are integers with the unit in the name. Ids are integers below 2^53 and are never
reused, not by a later boot either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from .errors import Field, KvforgeError

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    Float32Array = npt.NDArray[np.float32]
else:  # msgspec checks isinstance(value, np.ndarray); the dtype is fixed by FRAMES
    Int32Array = Int64Array = Float32Array = np.ndarray

PROTOCOL_VERSION = 1
PROTOCOL_VERSION_MIN = 1

NO_INT32: Int32Array = np.zeros(0, np.int32)
NO_INT64: Int64Array = np.zeros(0, np.int64)
NO_FLOAT32: Float32Array = np.zeros(0, np.float32)
NO_INT32.setflags(write=False)
NO_INT64.setflags(write=False)
NO_FLOAT32.setflags(write=False)


class Message(msgspec.Struct, frozen=True, tag_field="t", eq=False):
    """Base of all wire messages."""

    FRAMES: ClassVar[tuple[tuple[str, str], ...]] = ()


# ---------------------------------------------------------------------------------------------------- shared values


TOP_LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 300
LOGIT_BIAS_LIMIT = 100.0
# Lowest and highest value of numeric fields of Sampling. Where 0 itself would make no sense, the lowest is a bit more.
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "top_k": (0, (1 << 31) - 1),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logprobs": (0, TOP_LOGPROBS_MAX),
}


# Fields of Sampling that a model may have defaults of its own for.
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the next token is chosen. Applied in this order: logit_bias, penalties (repetition, then frequency and
    presence), temperature, top_k, top_p, min_p; then one draw. Greedy (temperature 0) takes the largest after the
    penalties: the filters keep that one always. Each default means "off"; ranges are in SAMPLING_RANGES.

    temperature: 0 is greedy; otherwise logits are divided by it (finite, 0 to 100).
    seed: 64-bit; the same request with the same seed draws the same numbers. None: the coordinator draws one.
    stop_tokens: token ids that end the request with reason `stop`; the stop token itself is the last token.
    ignore_eos: do not end at the model's own end-of-sequence tokens.
    top_k: only the k most likely tokens; of equal ones the lowest ids (0: off; more than the vocabulary: all).
    top_p: only the fewest most likely tokens whose probabilities, of what top_k left, reach top_p together; at least
    one (nucleus sampling: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020).
    min_p: only tokens at least min_p times as likely as the most likely one (Nguyen et al., "Turning Up the Heat:
    Min-p Sampling", ICLR 2025).
    repetition_penalty: logits of tokens that the prompt or the answer so far holds are divided by it where above 0,
    else multiplied with it (Keskar et al., "CTRL", 2019, section 4.1).
    presence_penalty, frequency_penalty: subtracted from the logits of tokens of the answer so far, not of the prompt:
    the one once, the other times the count (as OpenAI's API defines them).
    logit_bias: (token id, value) pairs added to the raw logits: -100 to 100, or -inf, which bans the token. Distinct
    ids, at most LOGIT_BIAS_MAX. A request all of whose vocabulary is banned fails.
    logprobs: how many of the most likely tokens to report with their log-probabilities for each generated token.

    Log-probabilities, of the chosen token too, are natural ones of the model's own float32 distribution: before bias,
    penalties, temperature and filters.
    """

    temperature: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = 0

    @property
    def counts_answer(self) -> bool:
        """Whether the choice depends on the tokens generated so far."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)


ERROR_TEXT_MAX = 2000


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error on the wire; `protocol.errors.restore` makes the exception of it again."""

    code: str
    message: str
    fields: dict[str, Field] = {}

    @classmethod
    def of(cls, error: KvforgeError) -> ErrorInfo:
        text = error.message if len(error.message) <= ERROR_TEXT_MAX else error.message[: ERROR_TEXT_MAX - 3] + "..."
        return cls(error.code, text, error.fields)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker serves. All workers of one coordinator must agree on it.

    source: the path or name it was loaded from (a client on the same host may load its tokenizer from there).
    sampling: what a request gets that names nothing; only fields of MODEL_DEFAULTS are not off.
    fingerprint: hex digest of what determines the tokens (weights file or configuration, architecture, dtype).
    """

    name: str
    source: str
    architecture: str
    fingerprint: str
    vocab_size: int
    context_tokens_max: int
    eos_tokens: tuple[int, ...] = ()
    sampling: Sampling = Sampling()


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds since submission, on the coordinator's monotonic clock; -1 where it never happened."""

    first_scheduled_us: int = -1
    first_token_us: int = -1
    ended_us: int = -1


# ------------------------------------------------------------------------------------------------ client -> coordinator


class Hello(Message, frozen=True, tag="hello"):
    """First message on every connection. A boot other than "" must be the coordinator's, else it answers StateLost."""

    rid: int
    version_min: int = PROTOCOL_VERSION_MIN
    version_max: int = PROTOCOL_VERSION
    boot: str = ""
    name: str = ""


class Submit(Message, frozen=True, tag="submit"):
    """Asks for tokens. prompt: [prompt_tokens] int32.

    sequence_id: continue this client sequence (prompt is then empty or what is appended to it first); the generated
    tokens become part of it. salt: share cached prefixes with whoever names the same salt instead of with the tenant.
    count: so many answers to one prompt, each a request of its own; their ids follow each other, and so do their seeds
    (modulo 2^64). They share the blocks of the prompt.
    priority: -100 to 100, within the tenant: each step is worth a fixed time of waiting, so that none waits for ever.
    deadline_ms: the request expires where it has not ended so long after it came; first_token_ms: where it has no token
    by then. 0: the coordinator's own limit, and none.
    detached: it goes on when its connection ends, to be read with Attach; else it is cancelled, at once after a
    Goodbye, after the coordinator's lease where the connection just ended.
    model_defaults: names of fields of `sampling` that were not chosen: the model's own values stand in for them.
    key: names this command within the tenant, so that sending it again after an answer was lost is the same request:
    the same ids, streamed to the connection that asked last. "": none. Remembered as long as its requests are.
    """

    FRAMES = (("prompt", "<i4"),)
    rid: int
    max_tokens: int
    sampling: Sampling = Sampling()
    tenant: str = "default"
    stream: bool = True
    sequence_id: int = 0
    salt: str = ""
    count: int = 1
    priority: int = 0
    deadline_ms: int = 0
    first_token_ms: int = 0
    detached: bool = False
    key: str = ""
    model_defaults: tuple[str, ...] = ()
    prompt: Int32Array = NO_INT32


class Attach(Message, frozen=True, tag="attach"):
    """Streams a request to this connection, from the token at `offset` on, whoever submitted it, ended or not.

    One connection at a time reads a request: it is taken from the one that had it. Whoever attaches keeps the request
    alive in place of its first client, unless it is detached.
    resume: go on with a stream that was paused; refused with Conflict where another connection reads it by now.
    """

    rid: int
    request_id: int
    offset: int = 0
    resume: bool = False


class Cancel(Message, frozen=True, tag="cancel"):
    rid: int
    request_id: int


class FinishAt(Message, frozen=True, tag="finish_at"):
    """Ends a request as finished, reason `stop`, after its first `tokens` generated tokens (at least 1).

    For a client that found a stop string in the text: the tokens that came after it do not count. Refused where fewer
    were generated; asking twice for the same is the same answer. A client sequence that the request continued keeps
    all that was generated: its KV is computed already, and whoever forked it meanwhile shares it.
    """

    rid: int
    request_id: int
    tokens: int


class GetRequest(Message, frozen=True, tag="get_request"):
    """`with_tokens` adds the generated tokens to the reply (Attach gives them with all that is known of each)."""

    rid: int
    request_id: int
    with_tokens: bool = False


class ListRequests(Message, frozen=True, tag="list_requests"):
    """Newest first; `count_max` is bounded by the coordinator's configuration, the answer by what a message holds."""

    rid: int
    count_max: int = 100


class GetStats(Message, frozen=True, tag="get_stats"):
    rid: int


class GetHealth(Message, frozen=True, tag="get_health"):
    rid: int


class CreateSequence(Message, frozen=True, tag="create_sequence"):
    """A sequence of the client's own. tokens: [length] int32, may be empty.

    idle_ttl_ms: removed after so long without access; 0: when its owner's connection ends. A sequence with a time to
    live outlasts its owner's connection.
    """

    FRAMES = (("tokens", "<i4"),)
    rid: int
    tenant: str = "default"
    salt: str = ""
    idle_ttl_ms: int = 0
    tokens: Int32Array = NO_INT32


class Append(Message, frozen=True, tag="append"):
    """Appends to each of n distinct sequences of one tenant, or to none of them.

    sequence_ids: [n] int64, counts: [n] int32 of at least 1, tokens: [sum(counts)] int32, one sequence after the other.
    """

    FRAMES = (("sequence_ids", "<i8"), ("counts", "<i4"), ("tokens", "<i4"))
    rid: int
    sequence_ids: Int64Array = NO_INT64
    counts: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32


class Fork(Message, frozen=True, tag="fork"):
    """`count` more sequences with the same tokens, sharing every block until one side writes."""

    rid: int
    sequence_id: int
    count: int = 1


class GetSequence(Message, frozen=True, tag="get_sequence"):
    rid: int
    sequence_id: int


class GetTokens(Message, frozen=True, tag="get_tokens"):
    """Reading counts as an access."""

    rid: int
    sequence_id: int


class RemoveSequences(Message, frozen=True, tag="remove_sequences"):
    """Removes all of them or none; a request that runs on one is cancelled. sequence_ids: [n] int64, distinct."""

    FRAMES = (("sequence_ids", "<i8"),)
    rid: int
    sequence_ids: Int64Array = NO_INT64


class GetBlock(Message, frozen=True, tag="get_block"):
    rid: int
    block_id: int


class RefBlock(Message, frozen=True, tag="ref_block"):
    """Adds a named holder to a block; it is dropped when the connection ends. generation -1: whatever is current.

    tenant: is charged for the block while it has a name, within its quota.
    """

    rid: int
    block_id: int
    holder: str
    generation: int = -1
    tenant: str = "default"


class UnrefBlock(Message, frozen=True, tag="unref_block"):
    rid: int
    block_id: int
    holder: str
    generation: int = -1


class Explain(Message, frozen=True, tag="explain"):
    """Asks why. Exactly one of the subjects is given: block_id or request_id or sequence_id (>= 0), or a tenant."""

    rid: int
    block_id: int = -1
    request_id: int = -1
    sequence_id: int = -1
    tenant: str = ""


class PurgeFinished(Message, frozen=True, tag="purge_finished"):
    """Forgets requests that ended at least so long ago."""

    rid: int
    older_than_ms: int = 0


class Drain(Message, frozen=True, tag="drain"):
    """Stops admission; what runs goes on. deadline_ms: what has not ended by then is handed back: it fails with
    Draining, which says that it can be submitted elsewhere. 0: it may take as long as it takes.
    """

    rid: int
    deadline_ms: int = 0


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The sender closes its connection on purpose."""


# ------------------------------------------------------------------------------------------------ coordinator -> client


class Welcome(Message, frozen=True, tag="welcome"):
    """Answer to Hello. tables_path: the shared-memory file, to be mapped read-only."""

    rid: int
    version: int
    boot: str
    tables_path: str
    block_size: int


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


class Refused(Message, frozen=True, tag="refused"):
    """A command failed and changed nothing."""

    rid: int
    error: ErrorInfo


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
    facts: dict[str, Field] = {}


class Purged(Message, frozen=True, tag="purged"):
    rid: int
    count: int


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of RequestList."""

    request_id: int
    state: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int
    age_us: int
    reason: str = ""
    worker: str = ""


class RequestList(Message, frozen=True, tag="request_list"):
    rid: int
    requests: tuple[RequestRow, ...]
    total: int


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """One pool, in blocks unless the name says otherwise. free + cached + referenced + quarantined = blocks."""

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
    is ready.
    """

    name: str
    pid: int
    state: str
    phase: str = ""
    progress: float = 0.0
    steps: int = 0
    since_step_us: int = 0
    device_bytes: dict[str, int] = {}
    kernels: dict[str, str] = {}


class Health(Message, frozen=True, tag="health"):
    """live: the loop turns (it answered). ready: a request submitted now would be served. reason: why not."""

    rid: int
    live: bool
    ready: bool
    reason: str
    workers: tuple[WorkerHealth, ...]
    model: ModelInfo | None = None
    draining: bool = False


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


# ------------------------------------------------------------------------------------------------ worker -> coordinator


class WorkerHello(Message, frozen=True, tag="worker_hello"):
    """First message of a worker. Names are unique; a second worker of the same name is refused."""

    rid: int
    name: str
    pid: int
    version_min: int = PROTOCOL_VERSION_MIN
    version_max: int = PROTOCOL_VERSION


class WorkerLoading(Message, frozen=True, tag="worker_loading"):
    """Progress of loading, for people: phase is a few words, progress 0 to 1."""

    phase: str
    progress: float


class WorkerReady(Message, frozen=True, tag="worker_ready"):
    """The model is loaded and the KV pool allocated: `blocks` blocks of `bytes_per_block` bytes.

    watches: it looks for its steps in shared memory too (`protocol.handover`).
    device_bytes: what it holds of its device's memory, in bytes by purpose: `weights`, `pool` (K and V), `graphs` (with
    the sampler's state) and `other` (what steps work in, compiled kernels, the driver's own). What takes nothing or is
    not counted is left out: of a CPU's memory only weights and pool are counted. As it was when this was sent: weights,
    pool and graphs stay as they are until the worker registers again, `other` may grow.
    kernels: which ones serve, and why not others, by what they do (decode, prefill, layers, sampling): for people.
    """

    rid: int
    model: ModelInfo
    blocks: int
    bytes_per_block: int
    kv_dtype: str
    device: str
    watches: bool = False
    device_bytes: dict[str, int] = {}
    kernels: dict[str, str] = {}


class RowError(msgspec.Struct, frozen=True):
    """One row of a step failed; the other rows are good."""

    slot: int
    error: ErrorInfo


class StepResult(Message, frozen=True, tag="step_result"):
    """Outcome of one step: for each row that sampled, its slot, token and log-probability. [sampled] each.

    top_counts [sampled], top_tokens [sum], top_logprobs [sum]: as in Stream.
    """

    FRAMES = (
        ("slots", "<i4"),
        ("tokens", "<i4"),
        ("logprobs", "<f4"),
        ("top_counts", "<i4"),
        ("top_tokens", "<i4"),
        ("top_logprobs", "<f4"),
    )
    step_id: int
    epoch: int
    errors: tuple[RowError, ...] = ()
    duration_us: int = 0
    slots: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32
    logprobs: Float32Array = NO_FLOAT32
    top_counts: Int32Array = NO_INT32
    top_tokens: Int32Array = NO_INT32
    top_logprobs: Float32Array = NO_FLOAT32


class WorkerFailed(Message, frozen=True, tag="worker_failed"):
    """The worker cannot go on (model missing, device lost). It leaves after this."""

    error: ErrorInfo


# ------------------------------------------------------------------------------------------------ coordinator -> worker


class WorkerWelcome(Message, frozen=True, tag="worker_welcome"):
    """Answer to WorkerHello: the geometry that every pool shares, and the tables to map read-only."""

    rid: int
    version: int
    boot: str
    tables_path: str
    block_size: int
    slots_max: int
    blocks_per_sequence_max: int
    step_tokens_max: int
    step_rows_max: int


class PoolRegistered(Message, frozen=True, tag="pool_registered"):
    """The worker's blocks are [base_block, base_block + blocks) in tables and copies. Results must name `epoch`.

    pool: the pool's number, by which its steps are found in shared memory.
    """

    rid: int
    epoch: int
    base_block: int
    pool: int = 0


class RowStart(msgspec.Struct, frozen=True, kw_only=True):
    """A request takes a slot. The worker keeps this until another RowStart names the slot.

    seed: unsigned 64 bit. generated: tokens that the request had generated before it came to this slot (the draw for
    the next one is keyed by (seed, generated)). sampling: what the choice of a token needs; its seed and stop tokens
    stay with the coordinator.
    prompt_history, generated_history: how many tokens of the step's `history` are this row's: first those of the
    prompt, then those of the answer so far. Both 0 where no penalty asks for them.
    """

    slot: int
    request_id: int
    sampling: Sampling
    seed: int
    generated: int = 0
    prompt_history: int = 0
    generated_history: int = 0


class Step(Message, frozen=True, tag="step"):
    """One forward pass over rows of any length (prefill chunks and decodes mixed).

    Carried out in this order: `copies`, then KV of the new tokens is written and attention run, then the rows with
    sample = 1 choose a token.

    copies: [3 * n] int32, triples (from block, to block, tokens): the first `tokens` slots of a block are copied.
    Copies of one step never read what another copy of it writes.
    slots, starts, counts, samples: [rows] int32. Row r feeds counts[r] tokens at positions starts[r]...; its block
    table is row slots[r] of the shared tables. tokens: [sum(counts)] int32; -1 stands for the token that the worker
    itself sampled last for that slot (it may not have reached the coordinator yet).
    tables: [rows * table_width] int32, only where the worker has not mapped the shared tables; else empty.
    history: [sum over begins] int32, the tokens that penalties count, one row of `begins` after the other. The worker
    adds the tokens that it samples itself.
    """

    FRAMES = (
        ("slots", "<i4"),
        ("starts", "<i4"),
        ("counts", "<i4"),
        ("samples", "<i4"),
        ("tokens", "<i4"),
        ("copies", "<i4"),
        ("tables", "<i4"),
        ("history", "<i4"),
    )
    step_id: int
    begins: tuple[RowStart, ...] = ()
    table_width: int = 0
    slots: Int32Array = NO_INT32
    starts: Int32Array = NO_INT32
    counts: Int32Array = NO_INT32
    samples: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32
    copies: Int32Array = NO_INT32
    tables: Int32Array = NO_INT32
    history: Int32Array = NO_INT32


class Stop(Message, frozen=True, tag="stop"):
    """The worker finishes what it was sent, then leaves with exit status 0."""

    reason: str = ""


CLIENT_MESSAGES = (
    Hello
    | Submit
    | Attach
    | Cancel
    | FinishAt
    | GetRequest
    | ListRequests
    | GetStats
    | GetHealth
    | CreateSequence
    | Append
    | Fork
    | GetSequence
    | GetTokens
    | RemoveSequences
    | GetBlock
    | RefBlock
    | UnrefBlock
    | Explain
    | PurgeFinished
    | Drain
    | Goodbye
)
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
WORKER_MESSAGES = WorkerHello | WorkerLoading | WorkerReady | StepResult | WorkerFailed | Goodbye
WORKER_REPLIES = WorkerWelcome | PoolRegistered | Step | Refused | Stop


def tag_of(cls: type[Message]) -> str:
    """The stable wire tag of a message class."""
    config: Any = cls.__struct_config__
    return str(config.tag)
