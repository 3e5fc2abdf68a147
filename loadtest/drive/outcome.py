"""What a run has found: one `Outcome` for each planned request, samples of the server, and how late the driver was.

Kept here: every planned request ends in exactly one of ENDS, whatever happens; all times are seconds since the start of
the run on CLOCK_MONOTONIC, which all processes of a machine share.
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
    """One planned request: turn `turn` of session `session`. Times are -1 where it never happened.

    due_s: when it was meant to be sent; of a later turn of a session: the end of the turn before and its think time; in
    a closed loop: when its place became free. awake_s: when the driver turned to it (later than due_s: the driver was
    late). sent_s: when it was handed to the client (later than awake_s: it had to wait for a place). tokens_s: when
    each token was seen here; tokens: which ones; of a server that sends text see `http_words`, empty where the session
    does not go on. stood_in: they are stand-ins. answer: the same as text, where the server sends that and the session
    goes on. request_id: the coordinator's; 0: it has none. timings: on the coordinator's clock. code: the error's wire
    code, or the reason where fewer tokens came than were asked for; message: what the server said.
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
    """The server at one moment: requests, and blocks of all pools by state."""

    at_s: float
    pending: int
    running: int
    free: int = 0
    cached: int = 0
    referenced: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drove:
    """One driver process. late_s: how late each of its clock's ticks was (see `drive.engine`); cpu_s, wall_s: of it."""

    late_s: array[float]
    cpu_s: float
    wall_s: float


@dataclass(kw_only=True)
class Measured:
    """All that a run has found. before, after: the coordinator's counters; None where there are none, or no answer.

    null_late_s: how late the driver was at the null server, at the same rate, before the run; empty: not tried.
    """

    outcomes: list[Outcome]
    samples: list[Sample] = field(default_factory=list)
    before: Stats | None = None
    after: Stats | None = None
    drivers: list[Drove] = field(default_factory=list)
    null_late_s: array[float] = field(default_factory=lambda: array("d"))
    wall_s: float = 0.0
    interrupted: bool = False
