"""Ids that no other life of a coordinator gives out.

Requests and sequences are numbered from where the clock stood when the process started: 1,024 numbers for each
millisecond since 2025, more than any coordinator gives out. So a later life begins behind all that an earlier one has
used, nothing has to be kept on a disk, and the numbers stay below 2^53, exact in every language, for 270 years. Two
lives could only meet where the clock was set back in between: then a client is still told by the boot that it names.
"""

from __future__ import annotations

EPOCH_MS = 1_735_689_600_000  # 2025-01-01, in milliseconds of Unix time
IDS_PER_MS = 1 << 10
ID_MAX = 1 << 53


def first_id(unix_ms: int) -> int:
    """The number before the first one that a coordinator that starts at `unix_ms` gives out."""
    return min(max(0, unix_ms - EPOCH_MS) * IDS_PER_MS, ID_MAX // 2)
