"""The format of a snapshot: one struct for each class of the core with state; arrays are indices into a table.

A field has the type of the attribute that it saves, and its name without a leading underscore. Attributes that are not
declared connect parts or follow from the limits; a new machine already has them. No field names code.

Compatibility: version N reads the snapshots of versions N and N - 1.

- A field that the reader does not know is ignored.
- A field that the writer did not know takes its default, so every added field has one.
- A field with a new meaning gets a new name. A field, or its default, is removed two versions later.
- `STATE_VERSION` (`entries.py`) is raised with each change here, and the fixture of the previous version stays in
  tests.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any, TypeAlias

import msgspec

from kvforge.protocol.errors import Field
from kvforge.protocol.messages import Ended, SamplingParams

from ..core.cache.returns import Return
from ..core.commands.sessions import Away
from ..core.events import ClientGone
from ..core.rights import Access
from ..core.waits import Event, Wait
from .declared_cache import SavedCache
from .field_markers import F32, I32, I64, U64, F32Table, Flags, Frames, I32Table, Saved, SpecialContainer

RequestIndex: TypeAlias = int  # in `SavedRequests.known`
WorkerIndex: TypeAlias = int  # in `SavedReports.processes`


class SavedError(Saved):
    """A `KvforgeError`."""

    code: str
    message: str
    fields: dict[str, Field]


class SavedTopRecord(Saved):
    """A `TopLogprobsRecord`."""

    size: int
    _counts: I32
    _tokens: I32Table
    _logprobs: F32Table


class SavedPromptLogprobs(Saved):
    """A `PromptLogprobs`."""

    prompt: I32
    size: int
    _logprobs: F32
    _ranks: I32
    _tops: SavedTopRecord


class SavedPhases(Saved):
    """The `Phases` of a request."""

    begun: bool
    paused_since_us: int
    paused_us: int
    phase: int
    preemptions: int
    queued_for: str
    recoveries: int
    since_us: int
    spent_us: list[int]


class SavedRequest(Saved):
    """A `Request`. `sampling`, `siblings` and `key` are indices into tables of `SavedRequests`; -1 for none."""

    id: int
    client: int
    tenant: int
    tenant_name: str
    prompt: I32
    seed: int
    submitted_us: int
    salt: int
    deadline_us: int
    prompt_tokens: int
    max_tokens: int
    sampling: int
    model_defaults: tuple[str, ...]
    stream: bool
    detached: bool
    priority: int
    sequence_id: int
    siblings: int
    key: int
    state: str
    slot: int
    tokens: I32
    logprobs: F32
    tops: SavedTopRecord | None
    phases: SavedPhases
    generated: int
    cut: int
    cached_tokens: int
    computed: int
    redone_tokens: int
    admitted_order: int
    passed: int
    preemptions: int
    kept_epoch: int
    crashes: int
    crash_length: int
    paused: bool
    prompt_known: bool
    wait: Wait | None
    hashes: U64 | None
    reason: str
    worker: str
    error: SavedError | None
    first_scheduled_us: int
    first_token_us: int
    token_us: int
    ended_us: int
    orphan_us: int
    prompt_logprobs: SavedPromptLogprobs | None = None
    reads_prompt: bool = True
    continues: int = 0
    keep_us: int = 0
    kept_id: int = 0
    returns: Return | None = None
    ahead: bool = False
    pins: tuple[tuple[int, int], ...] = ()
    pinned: tuple[int, ...] = ()
    disk_until_us: int = -1
    draft_count: int = 0
    draft_chance: int = -1
    draft_later: int = -1
    draft_by_model: bool = False
    draft_good: int = 0
    draft_expected: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class SavedKey(Saved):
    """An `IdempotencyKey`."""

    tenant: str
    key: str
    command: bytes
    request_id: int
    count: int
    left: int


class SavedRequests(Saved):
    """The `RequestTable`.

    Attributes:
        known: Every request that other parts refer to.
        families: Lists of siblings.
        keys: Idempotency keys; the first `keys_kept` are in the table, in order.
    """

    known: list[SavedRequest]
    samplings: list[SamplingParams]
    families: list[list[RequestIndex]]
    keys: list[SavedKey]
    keys_kept: int
    live: list[RequestIndex]
    finished: list[RequestIndex]
    kept_bytes: int
    ended_total: dict[str, int]
    accepted_total: int
    refused_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    computed_tokens_total: int
    recomputed_tokens_total: int
    preemptions_total: int
    streams_paused_total: int
    drafts_total: int = 0
    drafted_tokens_total: int = 0
    accepted_drafts_total: int = 0


class SavedQueue(Saved):
    """The `WaitingQueue`."""

    returned: list[tuple[int, RequestIndex]]
    fresh: dict[int, list[tuple[int, int, RequestIndex]]]
    parked: list[RequestIndex]
    size: int
    _virtual: float
    departures: list[int]


class SavedRows(Saved):
    """The `RunningRows`."""

    limit: I64
    base: I64
    order: I64
    run: I64
    reader: I64
    token_us: I64
    tops: Flags
    fresh: Flags
    fresh_count: int
    stops: I32Table
    _runs: int
    stops_most: int
    score_first: I64 | None = None
    score_end: I64 | None = None
    scores: Flags | None = None
    scores_count: int = 0
    batch: Flags | None = None
    batch_count: int = 0


class SavedAdmission(Saved):
    """The state of `Admission`."""

    waiting: SavedQueue
    rows: SavedRows
    _orders: int


class SavedWaits(Saved):
    """The `Waits`. `by_event` has the requests that wait for each event."""

    by_event: list[tuple[Event, list[RequestIndex]]]
    _prefixes: int
    admission_due: bool = msgspec.field(name="stirred")  # the name in snapshots stays


class SavedTops(Saved):
    """A `TopLogprobs`."""

    counts: I32
    tokens: I32
    logprobs: F32


class SavedStreamRows(Saved):
    """A `StreamRows`."""

    requests: I64
    offsets: I32
    tokens: I32
    logprobs: F32
    tops: SavedTops | None
    ranks: I32 | None = None


class SavedStreams(Saved):
    """The `Streams`."""

    rows: dict[int, list[SavedStreamRows]]
    _ended: dict[int, list[Ended]]
    _paused: dict[int, set[int]]
    _taken: dict[int, list[int]]
    _retry_us: int


class SavedSessions(Saved):
    """The `Sessions`. `answers` has replies by client and rid, as frames."""

    _numbers: dict[str, int]
    _names: dict[int, str]
    answers: dict[int, dict[int, Frames]]
    away: dict[int, Away]
    over: list[ClientGone]


class SavedCommands(Saved):
    """The state of the parts that execute commands. `again` has the slots of the last append of one token each."""

    heap: list[tuple[int, int, int]]
    draining: bool
    drain_deadline_us: int
    request_ids: int
    gone: Annotated[dict[int, tuple[str, str]], SpecialContainer(OrderedDict)]
    again: I64
    alive: dict[str, set[int]]
    paid_us: dict[str, int]
    reserved: dict[str, dict[int, int]]


class SavedTeam(Saved):
    """A `Team`. `members` is by rank; `ready` and `results` are messages, as frames."""

    name: str
    count: int
    members: dict[int, WorkerIndex]
    back: set[int]
    ready: dict[int, Frames]
    results: list[list[Frames]]
    done: list[int]


class SavedWorker(Saved):
    """A `Worker`. `group` is an index into `SavedCache.groups`, -1 for none."""

    number: int
    name: str
    pid: int
    rank: int
    ranks: int
    phase: str
    progress: float
    device_bytes: dict[str, int]
    kernels: dict[str, str]
    group: int
    away_until_us: int


class SavedReports(Saved):
    """The `WorkerReports`.

    Attributes:
        processes: Every worker that other parts refer to.
        workers: Workers that are connected or may return.
    """

    processes: list[SavedWorker]
    workers: list[WorkerIndex]
    teams: list[SavedTeam]
    ended: dict[str, str]
    registered_total: int
    returned_total: int
    left_total: int
    lost_total: int
    changed: set[int]


class SavedMachine(Saved):
    """The `Machine`. `boot`, `hash_key`, `limits`, `first_id` and `start_us` are the arguments of a new machine."""

    boot: str
    hash_key: bytes
    limits: dict[str, Any]
    first_id: int
    start_us: int
    now_us: int
    cache: SavedCache
    waits: SavedWaits
    requests: SavedRequests
    admission: SavedAdmission
    streams: SavedStreams
    sessions: SavedSessions
    commands: SavedCommands
    reports: SavedReports
    clients: dict[int, Access | None]
    turns: int
    restarts_total: int
    _turn_due: bool = msgspec.field(name="stirred")
