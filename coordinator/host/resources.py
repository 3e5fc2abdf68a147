"""Operating system resources: file descriptors for connections, and memory that returns to the system."""

from __future__ import annotations

import ctypes
import resource

from kvforge.protocol.errors import InvalidConfiguration

OTHER_DESCRIPTORS = 32  # standard streams, tables, lock, wake-ups, and temporary ones of the interpreter
DESCRIPTORS_MAX = 1 << 20  # used if the hard limit is infinite
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 4 << 20  # per-message allocations are smaller


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one. Return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


def check_descriptors(needed: int) -> None:
    """Check that this process may open enough descriptors for its connections.

    Raises:
        InvalidConfiguration: It may not.
    """
    allowed, needed = raise_descriptor_limit(), needed + OTHER_DESCRIPTORS
    if needed > allowed:
        raise InvalidConfiguration(
            "limits.clients_max",
            f"the connections need {needed} descriptors, but this process may open {allowed}: lower clients_max, "
            "pending_handshakes_max or pools_max, or raise the hard limit (`ulimit -Hn`, systemd's LimitNOFILE)",
        )


def return_large_blocks() -> None:
    """Make the allocator return large blocks to the system when they are freed.

    glibc raises its mmap threshold to up to 32 MiB when such a block is freed, and serves the next ones from the heap,
    where live blocks above prevent their return; large messages left hundreds of MiB behind. An explicit threshold is
    fixed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # specific to glibc, like the behaviour
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
