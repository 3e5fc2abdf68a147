"""A request: its record, and the transitions of its state.

pending ──schedule──> running ──finish──> finished
                      running ──preempt─> preempted ──schedule──> running
                                          preempted ──finish──> finished (by the client)
pending, running, preempted ──cancel──> cancelled   ──expire──> expired   ──fail──> failed
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import AlreadyFinished, InvalidTransition, KvforgeError
from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, SamplingParams, Submit, Timings

from ..cache.hashing import Hashes
from ..cache.returns import Return
from ..cache.sequences import unmarked
from ..waits import DISK, GRAMMAR, SIBLING, TENANT_CEILING, Wait
from .idempotency import IdempotencyKey
from .phases import Phases
from .prompt_logprobs import PromptLogprobs
from .top_logprobs import TopLogprobsRecord

PENDING, RUNNING, PREEMPTED = "pending", "running", "preempted"
FINISHED, FAILED, CANCELLED, EXPIRED = "finished", "failed", "cancelled", "expired"
TERMINAL = (FINISHED, FAILED, CANCELLED, EXPIRED)

TRANSITIONS: dict[tuple[str, str], str] = {
    (PENDING, "schedule"): RUNNING,
    (PENDING, "fail"): FAILED,
    (PENDING, "cancel"): CANCELLED,
    (PENDING, "expire"): EXPIRED,
    (RUNNING, "preempt"): PREEMPTED,
    (RUNNING, "finish"): FINISHED,
    (RUNNING, "fail"): FAILED,
    (RUNNING, "cancel"): CANCELLED,
    (RUNNING, "expire"): EXPIRED,
    (PREEMPTED, "schedule"): RUNNING,
    (PREEMPTED, "finish"): FINISHED,
    (PREEMPTED, "fail"): FAILED,
    (PREEMPTED, "cancel"): CANCELLED,
    (PREEMPTED, "expire"): EXPIRED,
}

NO_SLOT = -1
UNKNOWN = -1  # of a chance
NO_SAMPLING = SamplingParams()


@dataclass(slots=True, eq=False)
class Request:
    """One request. `prompt` is its input; `tokens` is its output so far, while it holds no slot.

    Attributes:
        siblings: The live requests of one Submit with several answers, including this one.
        prompt_known: A sibling that has ended since had computed the prompt.
        client: The client that reads it, 0 for none.
        paused: Its stream is paused until the client attaches again.
        orphan_us: Since when its connection is gone; -1 if connected.
        passed: Requests that started before it while it had no room.
        kept_epoch: The group in which room is kept for it; 0 for none.
        disk_until_us: Until when it may wait for blocks from the disk tier; -1 before it has waited.
        wait: Its wait record; None if it has not been tried since something changed for it.
        returns: How it came back when it was preempted last and the host tier had blocks of it; None for never.
        computed: Tokens with computed KV when it was last preempted.
        redone_tokens: Tokens computed again so far.
        crashes: Workers that died in a row while running it, with no token in between.
        crash_length: Its length at that time.
        cut: Tokens that a FinishAt took back.
        token_us: Arrival of its latest token, while it holds no slot.
        model_defaults: Fields of `sampling` that the model will set once it is known.
        prompt_logprobs: The log-probabilities of its prompt; None if it does not want them.
        reads_prompt: Its reader wants these too: it has not attached behind the prompt.
        continues: The sequence that its prompt may begin with; 0 for none.
        keep_us: How long its sequence is kept after its end; 0 for not at all.
        kept_id: The sequence that was kept at its end.
        pins: Leading parts of its prompt to pin, as in `Submit`.
        pinned: How many tokens of each are pinned; empty before its first token.
        draft_count: How many drafts its last step with drafts verified.
        draft_chance: The chance that its next draft is accepted, in 1 / 1024 (see `scheduling.draft_choice`); UNKNOWN
            without a result.
        draft_later: The chance of a draft behind an accepted one, likewise.
        draft_by_model: Its last proposal was that of a draft model.
        draft_good, draft_expected: Drafts of a draft model that were accepted, and expected to be, in 1 / 1024; see
            `cache.model_drafts`.
        drafted_tokens: Drafts that were verified for it.
        accepted_tokens: Drafts that became tokens.
        ahead: It computes its prompt for later requests, and gives way to all others.
        prompt_tokens: Length of the prompt; the prompt and the sampling parameters are dropped at the end.
    """

    id: int
    client: int
    tenant: int
    tenant_name: str
    prompt: npt.NDArray[np.int32]
    message: InitVar[Submit]
    seed: int
    submitted_us: int
    salt: int
    deadline_us: int
    prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    sampling: SamplingParams = field(init=False)
    model_defaults: tuple[str, ...] = ()
    stream: bool = field(init=False)
    detached: bool = field(init=False)
    priority: int = field(init=False)
    sequence_id: int = field(init=False)
    continues: int = field(init=False)
    keep_us: int = field(init=False)
    kept_id: int = 0
    pins: tuple[tuple[int, int], ...] = field(init=False)
    pinned: tuple[int, ...] = ()
    ahead: bool = field(init=False)
    siblings: list[Request] = field(default_factory=list)
    key: IdempotencyKey | None = None
    state: str = PENDING
    slot: int = NO_SLOT
    tokens: npt.NDArray[np.int32] = field(init=False)
    logprobs: npt.NDArray[np.float32] = field(init=False)
    tops: TopLogprobsRecord | None = field(init=False)
    prompt_logprobs: PromptLogprobs | None = field(init=False)
    phases: Phases = field(init=False)
    generated: int = 0
    cut: int = 0
    cached_tokens: int = 0
    computed: int = 0
    redone_tokens: int = 0
    returns: Return | None = None
    draft_count: int = 0
    draft_chance: int = UNKNOWN
    draft_later: int = UNKNOWN
    draft_by_model: bool = False
    draft_good: int = 0
    draft_expected: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    admitted_order: int = 0
    passed: int = 0
    preemptions: int = 0
    kept_epoch: int = 0
    disk_until_us: int = -1
    crashes: int = 0
    crash_length: int = 0
    paused: bool = False
    reads_prompt: bool = True
    prompt_known: bool = False
    wait: Wait | None = None
    hashes: Hashes | None = None
    reason: str = ""
    worker: str = ""
    error: KvforgeError | None = None
    first_scheduled_us: int = -1
    first_token_us: int = -1
    token_us: int = -1
    ended_us: int = -1
    orphan_us: int = -1

    def __post_init__(self, message: Submit) -> None:
        self.prompt_tokens = int(self.prompt.size)
        self.max_tokens, self.sampling = message.max_tokens, message.sampling
        self.stream, self.detached, self.priority = message.stream, message.detached, message.priority
        self.sequence_id = message.sequence_id
        self.pins, self.ahead = message.pins, message.ahead
        self.continues, self.keep_us = message.continues, message.keep_ms * 1000
        self.tokens, self.logprobs = NO_INT32, NO_FLOAT32
        self.phases = Phases(self.submitted_us)
        self.tops = TopLogprobsRecord(message.sampling.logprobs) if message.sampling.logprobs else None
        width = message.sampling.prompt_logprobs
        self.prompt_logprobs = PromptLogprobs(unmarked(self.prompt), width) if width is not None else None

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in TERMINAL

    @property
    def at_ceiling(self) -> bool:
        """Whether the request waits because of its tenant's ceiling."""
        return self.wait is not None and self.wait.limit == TENANT_CEILING

    @property
    def awaits_sibling(self) -> bool:
        """Whether the request waits for a sibling to compute the prompt."""
        return self.wait is not None and self.wait.limit == SIBLING

    @property
    def awaits_trial(self) -> bool:
        """Whether the request waits for its worker to try its grammar."""
        return self.wait is not None and self.wait.limit == GRAMMAR

    @property
    def awaits_disk(self) -> bool:
        """Whether the request waits for blocks from a disk tier."""
        return self.wait is not None and self.wait.limit == DISK

    def move(self, event: str) -> None:
        """Take the transition for `event`.

        Raises:
            AlreadyFinished: The request has ended; nothing has changed.
            InvalidTransition: The transition is not allowed; nothing has changed.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            if self.ended:
                raise AlreadyFinished(self.id, self.state)
            raise InvalidTransition(self.id, self.state, event)
        self.state = target

    @property
    def kept_bytes(self) -> int:
        """Bytes of its answer: tokens, log-probabilities, and what it wants besides."""
        tops = self.tops.bytes if self.tops is not None else 0
        prompt = self.prompt_logprobs.bytes if self.prompt_logprobs is not None else 0
        return int(self.tokens.nbytes + self.logprobs.nbytes) + tops + prompt

    @property
    def first_offset(self) -> int:
        """The offset of the first token in its stream: negative if log-probabilities of the prompt precede."""
        return -self.prompt_logprobs.total if self.prompt_logprobs is not None else 0

    @property
    def known_offset(self) -> int:
        """The offset behind the last known log-probability of its prompt: 0 if nothing of the prompt is due."""
        return self.prompt_logprobs.size - self.prompt_logprobs.total if self.prompt_logprobs is not None else 0

    @property
    def shareable_tokens(self) -> int | None:
        """How many leading tokens it may share with cached blocks; None: no limit.

        A token must be computed if the log-probability of its successor is unknown.
        """
        record = self.prompt_logprobs
        return record.size if record is not None and record.size < record.total else None

    def timings(self, now_us: int) -> Timings:
        """Return its timestamps in microseconds since submission, and the time spent in each phase."""
        queue, prefill, decode, preempted, stalled, recovering = self.phases.spent_by(now_us)
        return Timings(
            first_scheduled_us=self.since(self.first_scheduled_us),
            first_token_us=self.since(self.first_token_us),
            ended_us=self.since(self.ended_us),
            queue_us=queue,
            prefill_us=prefill,
            decode_us=decode,
            preempted_us=preempted,
            stalled_us=stalled,
            recovering_us=recovering,
            paused_us=self.phases.paused_by(now_us),
        )

    def since(self, at_us: int) -> int:
        """Return microseconds from its submission to `at_us`; -1 if that never happened."""
        return at_us - self.submitted_us if at_us >= 0 else -1
