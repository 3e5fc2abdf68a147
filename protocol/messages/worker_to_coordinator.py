"""Messages from workers to the coordinator: registration, loading progress, step results, failures."""

from __future__ import annotations

import msgspec

from .shared import (
    NO_FLOAT32,
    NO_INT32,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    ErrorInfo,
    Float32Array,
    Goodbye,
    Int32Array,
    Message,
    ModelInfo,
)

DISK_DONE, DISK_NOT_FOUND, DISK_DAMAGED, DISK_FAILED, DISK_FULL = range(5)  # outcomes of an order
DISK_ENTRY_NUMBERS = 6
MISSED_TAG, MISSED_CHECKSUM = 1, 2  # why a host block was not found: see StepResult.host_missed


class WorkerHello(Message, frozen=True, tag="worker_hello"):
    """First message of a worker. Names are unique; a second worker of the same name is refused.

    Attributes:
        boot: The boot of the coordinator for which the worker holds a pool, "" if none.
        epoch: The registration of that pool. The worker keeps the pool if the coordinator does.
        watches: As in WorkerReady, repeated for a pool that is kept.
        token: The token in the coordinator's runtime folder (`protocol.token`). Over a network, a key replaces it.
        rank: The number of this process, from 0, where several processes compute one model over one pool.
        ranks: The number of these processes. All have the same name. Each is sent `Rendezvous` when all are connected.
    """

    rid: int
    name: str
    pid: int
    version_min: int = PROTOCOL_VERSION_MIN
    version_max: int = PROTOCOL_VERSION
    boot: str = ""
    epoch: int = 0
    watches: bool = False
    token: str = ""
    rank: int = 0
    ranks: int = 1


class WorkerLoading(Message, frozen=True, tag="worker_loading"):
    """Progress of loading, for people. `phase` is a few words, `progress` 0 to 1."""

    phase: str
    progress: float


class WorkerReady(Message, frozen=True, tag="worker_ready"):
    """The model is loaded and the KV pool allocated: `blocks` blocks of `bytes_per_block` bytes.

    Attributes:
        watches: The worker polls shared memory for its steps too (`protocol.handover`).
        zeroes: The worker supports `Step.zeros`.
        device_bytes: The worker's device memory in bytes by purpose: `weights`, `pool` (K and V), `draft_states`
            (recurrent states behind drafted tokens), `graphs` (with the sampler's state) and `other` (workspace of
            steps, compiled kernels, the driver). Absent if zero or not counted: on a CPU only the first three are
            counted. The values are of the time of sending; only `other` may grow until the worker registers again.
        kernels: The kernels in use by purpose (decode, prefill, layers, sampling), and why others are not; for people.
            `host file` says how its memory lies: huge pages and NUMA node.
        wants_kinds: The worker computes generated tokens in another way than prompt tokens. Steps then mark generated
            tokens, and the prefix cache keeps both kinds apart.
        state_blocks: Blocks that hold the recurrent state of one sequence, from the same pool; 0: the model has none.
            `wants_kinds` is then set, and all tokens of a row in one step are of one kind: a chunk of a prompt, or one
            generated token and drafts behind it.
        prompt_chunk: Tokens of the chunks in which the model computes the state of a prompt. Steps cut prompts only at
            absolute multiples of it, so that rounding does not depend on the cuts. 1: cuts anywhere give equal bits.
        window: Layers with a sliding window see this many tokens, the current one included, and keep their KV in pages
            of their own; 0: all layers keep all tokens. Set only if `WorkerWelcome.window_ahead` was.
        window_pages: Blocks that hold the KV of these layers for block_size tokens, from the same pool.
        window_blocks: How many consecutive blocks of a sequence its part of the shared tables names, as a ring: at
            least ceil((window + window_ahead) / block_size) + 2, or blocks_per_sequence_max if that is fewer.
        drafts: The most tokens that the worker drafts for one row and verifies in one step (`Step.drafts`), at most
            `WorkerWelcome.drafts_max`. 0: it drafts none, and takes no step with drafts. `wants_kinds` may be unset.
        draft_states: If the model has a recurrent state, the most drafts of a step in all rows: the worker keeps the
            state behind each until it knows which are accepted. 0: it takes no step with drafts then.
        model_drafts: The most tokens that the worker's draft model or heads propose for a row (`Step.propose`), at most
            `drafts`; 0: it has none.
        host_blocks: Blocks of the host file that the worker has mapped and locked; 0: it has none.
        host_identity: Identifies the file and all that its content depends on apart from tokens and salt. A worker that
            announces the identity of an earlier one finds that worker's content.
        host_new: The file has just been made: it has no bytes of entries.
        disk_blocks: Blocks of the worker's disk tier; 0: it has none. Only with `host_blocks`.
    """

    rid: int
    model: ModelInfo
    blocks: int
    bytes_per_block: int
    kv_dtype: str
    device: str
    watches: bool = False
    device_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    kernels: dict[str, str] = msgspec.field(default_factory=dict)
    zeroes: bool = False
    wants_kinds: bool = False
    state_blocks: int = 0
    prompt_chunk: int = 1
    window: int = 0
    window_pages: int = 0
    window_blocks: int = 0
    drafts: int = 0
    draft_states: int = 0
    model_drafts: int = 0
    host_blocks: int = 0
    host_identity: str = ""
    host_new: bool = False
    disk_blocks: int = 0


class RowError(msgspec.Struct, frozen=True):
    """One row of a step failed; the other rows are valid.

    Attributes:
        again_ms: If above 0, only the sampling failed, and temporarily: the row is to be computed again after this
            time.
    """

    slot: int
    error: ErrorInfo
    again_ms: int = 0


class StepResult(Message, frozen=True, tag="step_result"):
    """Result of one step: for each row that sampled, its slot, token and log-probability, [sampled] each.

    A row of k = `Step.drafts[r]` > 0 drafts has m consecutive entries in `slots`, `tokens`, `logprobs` and
    `top_counts`, 1 <= m <= k + 1, one for each token that it sampled, in the order of their positions; its slot stands
    in each. The first m - 1 tokens equal the first m - 1 drafts. The last one is the token sampled behind them: in the
    place of the first draft that disagrees, or behind all drafts if m = k + 1. Each token and log-probability equals
    bit for bit what a step of one token would have sampled in its place. The worker ignores stop tokens here, as
    elsewhere: the coordinator cuts what follows one. Of a row in `errors` there is no entry.

    `draft_slots`, `draft_counts` and `draft_tokens` propose drafts. Those of a slot follow the last token in this
    result, also where later steps with the slot are in flight. They are a hint: the coordinator verifies all, a prefix
    or none, and keeps those of one result until the next result with the slot. Those of a draft model come first.

    Attributes:
        top_counts: [sampled] int32, as in Stream.
        top_tokens: [sum] int32.
        top_logprobs: [sum] float32.
        prompt_logprobs: [m] float32, the log-probability of each token of `Step.following`, in nats, without those of
            failed rows.
        prompt_ranks: [m] int32, the rank of each of these tokens, from 1: tokens with a higher logit, and those of
            equal logits with a lower id, precede it.
        prompt_top_counts: [m] int32, the number of top tokens in the place of each.
        prompt_top_tokens: [sum] int32, most likely first.
        prompt_top_logprobs: [sum] float32.
        draft_slots: [p] int32, distinct slots of rows that have a token in this result.
        draft_counts: [p] int32, how many tokens are proposed for each, 1 to `WorkerReady.drafts`.
        draft_tokens: [sum(draft_counts)] int32, the proposed tokens of one slot after the other, without GENERATED.
        host_copied: [n] int32, the host blocks of `Step.host_writes`, then of `Step.host_reads`, then of
            `Step.host_wipes`, if that has been done.
        host_missed: [2 * m] int32, pairs (host block, reason) for blocks of `Step.host_reads` that do not hold what was
            expected: the blocks on the device hold anything then, and so does what this and later steps computed from
            them. The reason is MISSED_TAG or MISSED_CHECKSUM.
        host_write_us: How long the copies of `Step.host_writes` took; 0 for none, or where it was not measured.
        host_read_us: The same of `Step.host_reads`.
        draft_model_rows: How many of `draft_slots`, the first ones, have proposals of a draft model, which
            `Step.propose` asked for.
        draft_us: How long its passes took.
        idle_us: How long the device had nothing to do between the end of the step before and the first work of this
            one; -1 where it was not measured.
    """

    FRAMES = (
        ("slots", "<i4"),
        ("tokens", "<i4"),
        ("logprobs", "<f4"),
        ("top_counts", "<i4"),
        ("top_tokens", "<i4"),
        ("top_logprobs", "<f4"),
        ("prompt_logprobs", "<f4"),
        ("prompt_ranks", "<i4"),
        ("prompt_top_counts", "<i4"),
        ("prompt_top_tokens", "<i4"),
        ("prompt_top_logprobs", "<f4"),
        ("draft_slots", "<i4"),
        ("draft_counts", "<i4"),
        ("draft_tokens", "<i4"),
        ("host_copied", "<i4"),
        ("host_missed", "<i4"),
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
    prompt_logprobs: Float32Array = NO_FLOAT32
    prompt_ranks: Int32Array = NO_INT32
    prompt_top_counts: Int32Array = NO_INT32
    prompt_top_tokens: Int32Array = NO_INT32
    prompt_top_logprobs: Float32Array = NO_FLOAT32
    draft_slots: Int32Array = NO_INT32
    draft_counts: Int32Array = NO_INT32
    draft_tokens: Int32Array = NO_INT32
    host_copied: Int32Array = NO_INT32
    host_missed: Int32Array = NO_INT32
    host_write_us: int = 0
    host_read_us: int = 0
    idle_us: int = -1
    draft_model_rows: int = 0
    draft_us: int = 0


class DiskEntries(Message, frozen=True, tag="disk_entries"):
    """The answer to DiskScan: blocks that an earlier process left on the disk, each behind its parent.

    Attributes:
        cursor: Of the scan.
        last: There are no others.
        entries: [6 * n] int32, (disk block, low half of the chain value, high half, low half of the parent's, high
            half, first). Blocks of chains that were written later come first.
        tokens: [n * block_size] int32, as in DiskOrders.
        owners: [2 * n] int32, likewise; empty: the owners are not known.
        usable: Disk blocks below this one may have bytes of earlier entries.
    """

    FRAMES = (("entries", "<i4"), ("tokens", "<i4"), ("owners", "<i4"))
    epoch: int
    cursor: int
    last: bool
    entries: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32
    owners: Int32Array = NO_INT32
    usable: int = 0


class DiskResults(Message, frozen=True, tag="disk_results"):
    """Orders of DiskOrders that have ended, in any order.

    Attributes:
        results: [3 * n] int32, (id, outcome, usable). The outcome is DISK_DONE; DISK_NOT_FOUND: the block that is read
            has another entry, or none; DISK_DAMAGED: it has other bytes than were written; DISK_FAILED: the device
            failed; DISK_FULL: there is space for the disk blocks below `usable` alone, which is 0 in other results.
    """

    FRAMES = (("results", "<i4"),)
    epoch: int
    results: Int32Array = NO_INT32


class WorkerFailed(Message, frozen=True, tag="worker_failed"):
    """The worker fails permanently (model missing, device lost) and leaves after this message."""

    error: ErrorInfo


WORKER_MESSAGES = (
    WorkerHello | WorkerLoading | WorkerReady | StepResult | DiskEntries | DiskResults | WorkerFailed | Goodbye
)
