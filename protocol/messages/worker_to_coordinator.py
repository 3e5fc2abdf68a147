"""What workers say to the coordinator: that they are there and load, what each step gave, that they cannot go on."""

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

    boot, epoch: of the coordinator and the registration under which it holds its pool, where it has one; then it goes
    on with it if the coordinator does, and `watches` says again what WorkerReady said.
    token: what it read in the coordinator's runtime folder (`protocol.token`); who comes over a network has a key.
    rank, ranks: where several processes compute one model together over one pool, which one this is (from 0), and how
    many; all of them have the same name. When all are connected each is sent `Meeting`.
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
    """Progress of loading, for people: phase is a few words, progress 0 to 1."""

    phase: str
    progress: float


class WorkerReady(Message, frozen=True, tag="worker_ready"):
    """The model is loaded and the KV pool allocated: `blocks` blocks of `bytes_per_block` bytes.

    watches: it looks for its steps in shared memory too (`protocol.handover`). zeroes: it does what `Step.zeros` says.
    device_bytes: what it holds of its device's memory, in bytes by purpose: `weights`, `pool` (K and V), `graphs` (with
    the sampler's state) and `other` (what steps work in, compiled kernels, the driver's own). What takes nothing or is
    not counted is left out: of a CPU's memory only weights and pool are counted. As it was when this was sent: weights,
    pool and graphs stay as they are until the worker registers again, `other` may grow.
    kernels: which ones serve, and why not others, by what they do (decode, prefill, layers, sampling): for people.
    wants_kinds: it computes tokens that were generated in another way than those of prompts, whatever it computes them
    for: steps tell it which are which, and no prefix of one kind is taken for the other.
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


class RowError(msgspec.Struct, frozen=True):
    """One row of a step failed; the other rows are good. again_ms: where it is more than 0, only the choice of a token
    failed, and for a while: the row is to be computed again after so many milliseconds."""

    slot: int
    error: ErrorInfo
    again_ms: int = 0


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


WORKER_MESSAGES = WorkerHello | WorkerLoading | WorkerReady | StepResult | WorkerFailed | Goodbye
