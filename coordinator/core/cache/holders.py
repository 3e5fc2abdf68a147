"""Descriptions of the holders of a pool's blocks, shown to clients that wait for blocks."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .groups import Group
from .kv_cache_manager import KVCacheManager
from .pins import shown

LISTED_MAX = 5


def largest_holders(
    cache: KVCacheManager, group: Group, seen: int, tenant: int = 0, but: int = -1, running: bool = True
) -> list[str]:
    """Describe the largest holders of the group's blocks: named holders, idle sequences and running requests.

    Args:
        cache: The cache.
        group: The group that holds the blocks.
        seen: The tenant that reads the answer; holders of other tenants appear only as a total. 0 shows all.
        tenant: Count only blocks charged to this tenant; 0 counts all.
        but: A slot to leave out.
        running: Include running requests.

    Returns:
        Phrases, at most `LISTED_MAX` for each kind of holder, largest first.
    """
    s, blocks, pool = cache.sequences, cache.blocks, group.pool
    names: Counter[str] = Counter()
    others = 0
    for block, holders in blocks.external.items():
        if pool.base <= block < pool.base + pool.count and tenant in (0, int(blocks.owner[block])):
            known = [shown(name) for name in holders if seen in (0, cache.pins.tenant_of(block, name))]
            names.update(known)
            others += len(holders) - len(known)
    listed = [f"{name!r} holds {_blocks(count)} by name" for name, count in names.most_common(LISTED_MAX)]
    resident = np.flatnonzero((s.pool == group.number) & (s.id != 0))
    held = {}
    for slot in resident[resident != but].tolist():
        ids = np.concatenate([s.blocks_of(slot), s.states_of(slot), cache.windows.of(slot)])
        held[slot] = int(ids.size if not tenant else np.count_nonzero(blocks.owner[ids] == tenant))
    if seen:
        others += sum(count for slot, count in held.items() if int(s.tenant[slot]) != seen)
        held = {slot: count for slot, count in held.items() if int(s.tenant[slot]) == seen}
    largest = sorted((slot for slot in held if held[slot]), key=lambda slot: -held[slot])
    idle = [slot for slot in largest if not s.running[slot]][:LISTED_MAX]
    rows = [slot for slot in largest if s.running[slot]][: LISTED_MAX if running else 0]
    states = {slot: "pinned" if s.pinned[slot] else "idle" for slot in idle}
    listed += [f"sequence {s.id[slot]} is {states[slot]} and holds {_blocks(held[slot])}" for slot in idle]
    listed += [f"request {s.request[slot]} runs and holds {_blocks(held[slot])}" for slot in rows]
    return [*listed, f"other tenants hold {_blocks(others)}"] if others else listed


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"
