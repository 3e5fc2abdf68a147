"""The results of a run: one `Outcome` for each planned request, samples of the server, and the driver's lateness.

Invariants: every planned request ends in exactly one of ENDS. All times are seconds since the start of the run on
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvforge import Stats
from kvforge.protocol.messages import Timings

UNSENT, RUNNING, FINISHED, REFUSED, FAILED, TIMED_OUT, INTERRUPTED = (
    "unsent",
    "running",
    "finished",
    "refused",
    "failed",
    "timed_out",
    "interrupted",
)
ENDS = (FINISHED, REFUSED, FAILED, TIMED_OUT, INTERRUPTED, UNSENT)

NEVER = Timings()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one planned request: turn `turn` of session `session`. A time is -1 if the event did not happen.

    Attributes:
        session: The session.
        turn: The turn within the session.
        due_s: When it was meant to be sent. A later turn is due at the end of the previous one plus its think time; in
            a closed loop, when its place became free.
        tenant: Its tenant.
        kind: Its kind of traffic.
        state: One of ENDS, or RUNNING.
        code: The error's wire code, or the finish reason if fewer tokens arrived than requested.
        message: The server's message.
        awake_s: When the driver handled it; later than due_s if the driver was late.
        sent_s: When it was sent; later than awake_s if it waited for a place.
        accepted_s: When it was accepted.
        ended_s: When it ended.
        prompt_tokens: The length of the prompt.
        asked_tokens: The requested length of the answer.
        cached_tokens: Prompt tokens from the prefix cache.
        request_id: The coordinator's id; 0 for none.
        timings: Times on the coordinator's clock.
        tokens_s: When each token arrived.
        tokens: The token ids; for servers that return text see `http_word_map`, empty if the session does not continue.
        stood_in: Whether the token ids are stand-ins.
        answer: The text of the answer, if the server returns text and the session continues.
    """

    session: int
    turn: int = 0
    due_s: float
    tenant: str = "default"
    kind: str = ""
    state: str = UNSENT
    code: str = ""
    message: str = ""
    awake_s: float = -1.0
    sent_s: float = -1.0
    accepted_s: float = -1.0
    ended_s: float = -1.0
    prompt_tokens: int = 0
    asked_tokens: int = 0
    cached_tokens: int = 0
    request_id: int = 0
    timings: Timings = NEVER
    tokens_s: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("i"))
    stood_in: bool = False
    answer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The server at one moment: requests, and the blocks of all pools by state."""

    at_s: float
    pending: int
    running: int
    free: int = 0
    cached: int = 0
    referenced: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStats:
    """The statistics of one driver process.

    Attributes:
        late_s: The lateness of each clock tick (see `drive.engine`).
        cpu_s: CPU time.
        wall_s: Wall time.
    """

    late_s: array[float]
    cpu_s: float
    wall_s: float


@dataclass(kw_only=True)
class RunResult:
    """The results of a run.

    Attributes:
        outcomes: One for each planned request.
        samples: Samples of the server.
        before, after: The coordinator's counters; None if there is no coordinator, or no answer.
        drivers: The statistics of the driver processes.
        null_late_s: The driver's lateness against the null server at the same rate before the run; empty if not
            measured.
        wall_s: The duration.
        interrupted: Whether the run was interrupted.
    """

    outcomes: list[Outcome]
    samples: list[Sample] = field(default_factory=list)
    before: Stats | None = None
    after: Stats | None = None
    drivers: list[DriverStats] = field(default_factory=list)
    null_late_s: array[float] = field(default_factory=lambda: array("d"))
    wall_s: float = 0.0
    interrupted: bool = False
