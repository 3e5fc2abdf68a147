"""How the command line ends: one table of exit statuses, and which error means which."""

from __future__ import annotations

import signal

from protocol.errors import (
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidRequest,
    KvforgeError,
    NotFound,
    Unavailable,
    WorkerError,
)

OK, FAILED, USAGE, UNAVAILABLE, TIMED_OUT = 0, 1, 2, 3, 4
INTERRUPTED = 128 + signal.SIGINT

MEANINGS: dict[int, str] = {
    OK: "done; for `status` and `health`: ready to serve; for `up`: stopped as asked",
    FAILED: "failed, refused, or (`status`, `health`) not ready",
    USAGE: "wrong usage or input: an argument, a setting, a model or request that does not exist",
    UNAVAILABLE: "the coordinator or a worker is not available, or the runtime folder is in use",
    TIMED_OUT: "no answer in time",
    INTERRUPTED: "interrupted by Ctrl-C (128 + the signal's number; 143 for SIGTERM)",
}

# The first class that an error is an instance of decides.
STATUSES: tuple[tuple[type[KvforgeError], int], ...] = (
    (InvalidRequest, USAGE),
    (InvalidConfiguration, USAGE),
    (NotFound, USAGE),
    (CoordinatorUnavailable, UNAVAILABLE),
    (Unavailable, UNAVAILABLE),
    (WorkerError, UNAVAILABLE),
    (DeadlineExceeded, TIMED_OUT),
    (KvforgeError, FAILED),
)


def status_of(error: KvforgeError) -> int:
    """The exit status for an error."""
    return next(status for cls, status in STATUSES if isinstance(error, cls))


def table() -> str:
    """The statuses, for `kvforge --help`."""
    return "exit status:\n" + "\n".join(f"  {status:<4} {meaning}" for status, meaning in MEANINGS.items())


class Stopped(Exception):
    """A command ends early with an exit status; the message is one sentence for the user."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end. Like Ctrl-C for whoever cleans up on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number
