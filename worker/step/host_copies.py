"""The place of host copies in a step: saved before anything is written, loaded behind the zeroing, settled at its end.

A copy that fails ends the worker, because later steps depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Step
from kvforge.worker.attention.pool import KvPool

from .host_transfers import COPY_NUMBERS, HostTransfers, HostWork, copied_blocks
from .pending import PendingStep
from .step_failures import HostCopyError


def save_blocks(host: HostTransfers, step: Step, pending: PendingStep) -> None:
    """Wipe host blocks, and queue a step's copies to the host.

    Args:
        host: Makes the copies.
        step: The step, checked by `bad_host_copies`.
        pending: The same step; it gets the copies.

    Raises:
        HostCopyError: A copy failed.
    """
    with _fatal_failures():
        if step.host_wipes.size:
            host.wipe(step.host_wipes)
        pending.host = HostWork(host.save(step.host_writes) if step.host_writes.size else None)


def load_blocks(host: HostTransfers, step: Step, pending: PendingStep, pool: KvPool) -> None:
    """Queue a step's copies from the host.

    Args:
        host: Makes the copies.
        step: The step, behind `save_blocks`.
        pending: The same step; it gets the copies.
        pool: The pool that the blocks are copied to.

    Raises:
        HostCopyError: A copy failed.
    """
    assert pending.host is not None
    with _fatal_failures():
        if step.host_reads.size:
            pending.host.loaded = host.load(step.host_reads)
            if pool.beside is not None and pool.beside.backlog is not None:
                pool.beside.backlog.load(step.host_reads[::COPY_NUMBERS])
    pending.host_copied = copied_blocks(step)


def settle_copies(pending: PendingStep) -> None:
    """Wait for the host copies of a step, and record the blocks that they missed and the time that they took.

    Args:
        pending: The step; its end has passed.

    Raises:
        HostCopyError: A copy failed.
    """
    if pending.host is None:
        return
    with _fatal_failures():
        pending.host_missed = pending.host.settle()
        pending.host_us = pending.host.took_us()


@contextmanager
def _fatal_failures() -> Iterator[None]:
    """Convert failures of copies from and to the host."""
    try:
        yield
    except (KvforgeError, RuntimeError, OSError, MemoryError) as error:
        raise HostCopyError(f"a copy from or to the host failed: {error}") from error
