"""Exit statuses that all kvforge commands share, and the mapping from errors to them."""

from __future__ import annotations

import signal

from .errors import (
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidRequest,
    JournalCorrupt,
    KernelError,
    KvforgeError,
    NotFound,
    StateRemoved,
    Unavailable,
    UnsupportedModel,
)

OK, FAILED, USAGE, UNAVAILABLE, TIMED_OUT, DAMAGED = 0, 1, 2, 3, 4, 5
INTERRUPTED = 128 + signal.SIGINT

MEANINGS: dict[int, str] = {
    OK: "done; for `status` and `health`: ready to serve; for `up`: stopped on request",
    FAILED: "failed, refused, or (`status`, `health`) not ready",
    USAGE: "wrong usage or input: an argument, a setting, or an unknown model, request or file",
    UNAVAILABLE: "not available: no coordinator or worker, the runtime folder in use, a model that cannot be served "
    "here (or a kernel that it needs)",
    TIMED_OUT: "no answer in time",
    DAMAGED: "the journal in state_dir is damaged; nothing was changed: see `kvforge replay`",
    INTERRUPTED: "interrupted by Ctrl-C (128 + the signal's number; 143 for SIGTERM)",
}

# The first class in this order that matches decides.
STATUSES: tuple[tuple[type[KvforgeError], int], ...] = (
    (StateRemoved, FAILED),  # a supervisor restarts the process, and the next one carries on
    (InvalidRequest, USAGE),
    (InvalidConfiguration, USAGE),
    (NotFound, USAGE),
    (Unavailable, UNAVAILABLE),
    (UnsupportedModel, UNAVAILABLE),
    (KernelError, UNAVAILABLE),
    (DeadlineExceeded, TIMED_OUT),
    (JournalCorrupt, DAMAGED),
    (KvforgeError, FAILED),
)


def status_of(error: KvforgeError) -> int:
    """Return the exit status for an error."""
    return next(status for cls, status in STATUSES if isinstance(error, cls))


def table() -> str:
    """Return the table of statuses for the help of a command."""
    return "exit status:\n" + "\n".join(f"  {status:<4} {meaning}" for status, meaning in MEANINGS.items())
