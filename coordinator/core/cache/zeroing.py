"""Blocks to zero before another tenant uses them (`zero_on_tenant_change`).

The writer of a block is the tenant it was last allocated to. Tenants that share a salt may also hold the block; they
read it, and write only blocks of their own. The initial content of a pool is unknown: the worker does not clear its
memory, which may come from an earlier registration of the same process. Every block is therefore zeroed before its
first use.

The whole block is zeroed even if a copy fills a part, because the copy leaves the rest as it was. Quarantine
ensures that no step in flight touches a block on the list. The worker zeroes the block before any other work of the
first step that uses it.
"""

from __future__ import annotations

import numpy as np

from kvforge.protocol.messages import Int32Array

from .blocks import BlockIds

ANYBODY = -1


class Zeroing:
    """The blocks of one pool that must be zeroed: global ids [base, base + count)."""

    def __init__(self, base: int, count: int) -> None:
        self._base = base
        self._writer = np.full(count, ANYBODY, np.int32)
        self._owed: dict[int, None] = {}  # in allocation order, so that replay gives the same order

    def note_writer(self, ids: BlockIds, tenant: int) -> None:
        """Record that a tenant may write blocks from now on.

        Args:
            ids: Distinct block ids, [n].
            tenant: Tenant index.
        """
        local = ids - self._base
        foreign = self._writer[local] != tenant
        if np.count_nonzero(foreign):
            self._writer[local[foreign]] = tenant
            self._owed.update(dict.fromkeys(ids[foreign].tolist()))

    def forget_tenant(self, tenant: int) -> None:
        """Clear the tenant as a writer, because its index will be reused."""
        self._writer[self._writer == tenant] = ANYBODY

    def pop_blocks(self) -> Int32Array:
        """Return and clear the blocks that the next step must zero first: distinct ids, [n] int32."""
        ids = np.fromiter(self._owed, np.int32, len(self._owed))
        self._owed.clear()
        return ids
