"""Ids that are unique across all processes of a coordinator.

Requests and sequences are numbered from the clock time of the process start: 1,024 numbers for each millisecond since
2025, more than any coordinator can use. A later process therefore starts above all earlier ids without persistent
state, and for 270 years the numbers stay below 2^53, which every language represents exactly. Ids can collide only if
the clock was set back; clients then notice the restart by the boot id.
"""

from __future__ import annotations

EPOCH_MS = 1_735_689_600_000  # 2025-01-01, in milliseconds of Unix time
IDS_PER_MS = 1 << 10
ID_MAX = 1 << 53


def first_id(unix_ms: int) -> int:
    """Return the number before the first id of a coordinator that starts at `unix_ms`."""
    return min(max(0, unix_ms - EPOCH_MS) * IDS_PER_MS, ID_MAX // 2)
