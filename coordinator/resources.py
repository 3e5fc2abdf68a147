"""What the operating system gives this process: descriptors for its connections, and memory that goes back."""

from __future__ import annotations

import ctypes
import resource

from kvforge.protocol.errors import InvalidConfiguration

OTHER_DESCRIPTORS = 32  # standard streams, tables, lock, wake-ups, and what the interpreter opens for a moment
DESCRIPTORS_MAX = 1 << 20  # where there is no limit at all
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 4 << 20  # what comes and goes with every message is smaller


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open descriptors to the hard one. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


def check_descriptors(needed: int) -> None:
    """Raises InvalidConfiguration where this process may not open so many for its connections, and what else it has."""
    allowed, needed = raise_descriptor_limit(), needed + OTHER_DESCRIPTORS
    if needed > allowed:
        raise InvalidConfiguration(
            "limits.clients_max",
            f"so many connections need {needed} descriptors, and this process may open {allowed}: lower clients_max, "
            "strangers_max or pools_max, or raise the hard limit (`ulimit -Hn`, systemd's LimitNOFILE)",
        )


def return_large_blocks() -> None:
    """Large blocks are given back when they are freed.

    Once one was freed, glibc takes the next of up to 32 MiB from its heap, where what lives above keeps it; large
    messages left hundreds of MiB behind. A threshold that was set stays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, and no such habit
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
