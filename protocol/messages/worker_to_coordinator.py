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
        device_bytes: The worker's device memory in bytes by purpose: `weights`, `pool` (K and V), `graphs` (with the
            sampler's state) and `other` (workspace of steps, compiled kernels, the driver). Absent if zero or not
            counted: on a CPU only weights and pool are counted. The values are of the time of sending; only `other` may
            grow until the worker registers again.
        kernels: The kernels in use by purpose (decode, prefill, layers, sampling), and why others are not; for people.
        wants_kinds: The worker computes generated tokens in another way than prompt tokens. Steps then mark generated
            tokens, and the prefix cache keeps both kinds apart.
        state_blocks: Blocks that hold the recurrent state of one sequence, from the same pool; 0: the model has none.
            `wants_kinds` is then set, and all tokens of a row in one step are of one kind: a chunk of a prompt, or one
            generated token.
        prompt_chunk: Tokens of the chunks in which the model computes the state of a prompt. Steps cut prompts only at
            absolute multiples of it, so that rounding does not depend on the cuts. 1: cuts anywhere give equal bits.
        window: Layers with a sliding window see this many tokens, the current one included, and keep their KV in pages
            of their own; 0: all layers keep all tokens. Set only if `WorkerWelcome.window_ahead` was.
        window_pages: Blocks that hold the KV of these layers for block_size tokens, from the same pool.
        window_blocks: How many consecutive blocks of a sequence its part of the shared tables names, as a ring: at
            least ceil((window + window_ahead) / block_size) + 2, or blocks_per_sequence_max if that is fewer.
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


class WorkerFailed(Message, frozen=True, tag="worker_failed"):
    """The worker fails permanently (model missing, device lost) and leaves after this message."""

    error: ErrorInfo


WORKER_MESSAGES = WorkerHello | WorkerLoading | WorkerReady | StepResult | WorkerFailed | Goodbye
