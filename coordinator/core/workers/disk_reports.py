"""Worker messages about disk tiers: what was found there, and orders that have ended."""

from __future__ import annotations

from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import DiskEntries, DiskResults

from ..cache.disk_copies import DiskCopies
from ..cache.kv_cache_manager import KVCacheManager
from ..events import Effect
from ..waits import load_of
from .worker import Worker, log_of


class DiskReports:
    """Handlers of these messages, of workers and of their ranks."""

    def __init__(self, cache: KVCacheManager, effects: list[Effect]) -> None:
        self._cache, self._effects = cache, effects

    def entries(self, worker: Worker, message: DiskEntries) -> None:
        """Take the entries that a process found.

        Raises:
            ProtocolError: The message is malformed, or the worker has no disk tier.
        """
        disk = self._disk_of(worker, message.epoch, "entries")
        if disk is None:
            return
        before, tier = disk.tier.announced, disk.tier
        tenants = self._cache.wipes.known() if message.owners.size else {}
        disk.announce(message, self._cache.hasher, tenants, worker.rank)
        if tier.announced and not before:
            counts = {"blocks": tier.total, "cached": tier.cached, "pruned": tier.pruned_total}
            self._effects.append(log_of("info", "disk tier ready", "disk_ready", worker, **counts))

    def results(self, worker: Worker, message: DiskResults) -> None:
        """Record orders that a process has carried out, and wake the requests that wait for them.

        Raises:
            ProtocolError: The message is malformed, or the worker has no disk tier.
        """
        disk = self._disk_of(worker, message.epoch, "results")
        if disk is None:
            return
        assert worker.group is not None
        off = disk.off
        for load in disk.ended(message, worker.rank):
            self._cache.waits.wake(load_of(worker.group.epoch, load))
        if disk.off and not off:
            text, failed = "disk tier off: its copies failed", disk.tier.failed_total
            self._effects.append(log_of("error", text, "disk_off", worker, failed=failed))

    def _disk_of(self, worker: Worker, epoch: int, what: str) -> DiskCopies | None:
        """Return the disk copies of a worker that sent a message about them; None for one of another epoch."""
        group = worker.group
        if group is None or epoch != group.epoch:
            text = f"worker {worker.name}: disk {what} of another epoch ignored"
            self._effects.append(log_of("warning", text))
            return None
        if group.disk is None:
            raise ProtocolError(f"disk_{what}: the worker has no disk tier")
        return group.disk
