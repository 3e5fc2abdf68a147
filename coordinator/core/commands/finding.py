"""Prefix look-up for routers that choose between coordinators. It changes nothing.

The answer comes from the live prefix index, under the same salt, with tokens compared: `cached_tokens` is exactly what
a Submit at this moment would share. A router's own estimate could outlast the blocks it describes.
"""

from __future__ import annotations

from itertools import islice

from kvforge.protocol.messages import FindPrefix, PrefixFound

from ..cache.kv_cache_manager import KVCacheManager
from ..requests.table import RequestTable
from ..scheduling.admission import Admission
from . import validate

LOOKED_AT_MAX = 64  # waiting requests that are measured; the estimate assumes the same mean for the rest


class Finding:
    """Handler of FindPrefix."""

    def __init__(self, cache: KVCacheManager, requests: RequestTable, admission: Admission) -> None:
        self._cache, self._requests, self._admission = cache, requests, admission

    def find(self, message: FindPrefix, *, draining: bool) -> PrefixFound:
        """Return what a request with this prompt would share, and how loaded this coordinator is.

        Raises:
            InvalidRequest: The tenant, the salt or a token is invalid.
        """
        cache, s = self._cache, self._cache.sequences
        cache.tenants.check(message.tenant)
        known = bool(message.key) and self._requests.keys.has(message.tenant, message.key)
        text = validate.salt_text(message.tenant, message.salt)
        groups = [group for group in cache.groups.values() if not group.away]
        if not groups:
            return PrefixFound(rid=message.rid, ready=False, draining=draining, known=known)
        # A longer prompt is refused on Submit.
        prompt = message.prompt[: s.context_tokens_max]
        validate.tokens("prompt", prompt, cache.vocab_size)
        salt, cached = cache.hasher.salt(text), 0
        if prompt.size:
            hashes = cache.indexing.hashes(salt, prompt)
            placements = (cache.planner.plan_placement(group, salt, prompt, hashes) for group in groups)
            cached = max(placement.cached_tokens(s.block_size) for placement in placements)
        tenant, running = cache.tenants.peek(message.tenant), self._admission.running_total
        return PrefixFound(
            rid=message.rid,
            ready=not draining,
            draining=draining,
            cached_tokens=cached,
            queued_tokens=self._queued_tokens(),
            running=running,
            pending=len(self._admission.waiting),
            rows_free=max(0, len(groups) * cache.limits.schedule.step_rows_max - running),
            room_tokens=max(group.pool.available(tenant) for group in groups) * s.block_size,
            known=known,
        )

    def _queued_tokens(self) -> int:
        """Estimate tokens without KV: the rest of the running requests, and the prompts of the waiting ones."""
        s = self._cache.sequences
        left = s.length[s.running] - s.scheduled[s.running]
        behind = int(left.clip(min=0).sum()) if left.size else 0
        waiting = self._admission.waiting
        looked = [int(request.prompt.size) for request in islice(waiting, LOOKED_AT_MAX)]
        return behind + (sum(looked) * len(waiting) // len(looked) if looked else 0)
