"""What a request would find here: asked by whoever chooses between coordinators. Nothing here changes anything.

The answer is of the index that requests are started by, under the same salt, and compares the tokens themselves: what
is said to be cached is what a Submit that came now would share. A guess that is kept elsewhere outlives what it is of.
"""

from __future__ import annotations

from itertools import islice

from kvforge.protocol.messages import FindPrefix, PrefixFound

from ..cache.cache import Cache
from ..requests.lifecycle import RequestTable
from ..scheduling.admission import Admission
from . import validate

LOOKED_AT_MAX = 64  # of the requests that wait; the others are taken to be like them


class Finding:
    """Answers FindPrefix."""

    def __init__(self, cache: Cache, requests: RequestTable, admission: Admission) -> None:
        self._cache, self._requests, self._admission = cache, requests, admission

    def find(self, message: FindPrefix, *, draining: bool) -> PrefixFound:
        """Raises InvalidRequest for an impossible tenant, salt or token."""
        cache, s = self._cache, self._cache.sequences
        cache.tenants.check(message.tenant)
        known = bool(message.key) and self._requests.keys.knows(message.tenant, message.key)
        text = validate.salt_text(message.tenant, message.salt)
        groups = [group for group in cache.groups.values() if not group.away]
        if not groups:
            return PrefixFound(rid=message.rid, ready=False, draining=draining, known=known)
        # Longer ones are refused when they are submitted.
        prompt = message.prompt[: s.context_tokens_max]
        validate.tokens("prompt", prompt, cache.vocab_size)
        salt, cached = cache.hasher.salt(text), 0
        if prompt.size:
            hashes = cache.indexing.hashes(salt, prompt)
            placements = (cache.plan_placement(group, salt, prompt, hashes) for group in groups)
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
        """What is known but has no KV yet, of those that run, and all of those that wait."""
        s = self._cache.sequences
        left = s.length[s.running] - s.scheduled[s.running]
        behind = int(left.clip(min=0).sum()) if left.size else 0
        waiting = self._admission.waiting
        looked = [int(request.prompt.size) for request in islice(waiting, LOOKED_AT_MAX)]
        return behind + (sum(looked) * len(waiting) // len(looked) if looked else 0)
