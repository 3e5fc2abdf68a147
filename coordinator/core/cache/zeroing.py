"""Which blocks must be zeroed before a tenant gets them: those that another one wrote (`zero_on_tenant_change`).

A block's writer is the tenant that it was last given to. Others may come to hold it, who name the same salt: they read
what it wrote, and write into blocks of their own. What a pool holds at first nobody knows: its memory was not cleared,
and may be that of an earlier registration of the same process. So every block is zeroed before its first use.

The whole block is zeroed, also one that a copy fills in part or in full: what a copy leaves out would stay another's.
A block that is owed is free of every step that was sent (quarantine), and its worker zeroes it before anything else of
the step that names it: the first one that can write or read it.
"""

from __future__ import annotations

import numpy as np

from kvforge.protocol.messages import Int32Array

from .blocks import BlockIds

ANYBODY = -1


class Zeroing:
    """Of one pool: blocks [base, base + count), by global id."""

    def __init__(self, base: int, count: int) -> None:
        self._base = base
        self._writer = np.full(count, ANYBODY, np.int32)
        self._owed: dict[int, None] = {}  # in the order in which they were given out: the same in every process

    def given(self, ids: BlockIds, tenant: int) -> None:
        """The tenant may write the blocks from now on: [n] distinct."""
        local = ids - self._base
        foreign = self._writer[local] != tenant
        if np.count_nonzero(foreign):
            self._writer[local[foreign]] = tenant
            self._owed.update(dict.fromkeys(ids[foreign].tolist()))

    def forget_tenant(self, tenant: int) -> None:
        """The tenant's number will be another's: what it wrote is nobody's."""
        self._writer[self._writer == tenant] = ANYBODY

    def take(self) -> Int32Array:
        """The blocks that the next step must zero first: [n] int32 distinct. They are owed no longer."""
        ids = np.fromiter(self._owed, np.int32, len(self._owed))
        self._owed.clear()
        return ids
