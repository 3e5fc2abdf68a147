"""Commands on client sequences: create, append, fork, read, remove, expire."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import (
    CapacityExceeded,
    InvalidRequest,
    SequenceBusy,
    SequenceNotFound,
)
from kvforge.protocol.messages import (
    Append,
    Appended,
    CreateSequence,
    Fork,
    Forked,
    GetSequence,
    GetTokens,
    KeepSequence,
    Message,
    Removed,
    RemoveSequences,
    Rewind,
    SequenceInfo,
    SequenceTokens,
)

from ..cache.kv_cache_manager import KVCacheManager
from ..cache.placement import Placement
from ..cache.sequences import NO_POOL, Slots
from ..cache.supply import NO_SPARE
from ..deadlines import NEVER
from ..events import FromClient
from ..limits import microseconds
from ..requests.table import LOST, RequestTable
from ..scheduling.finisher import RequestFinisher
from . import validate


class SequenceCommands:
    """Handlers of the sequence messages."""

    def __init__(self, cache: KVCacheManager, requests: RequestTable, finisher: RequestFinisher) -> None:
        self._clock, self._cache, self._requests, self._finisher = cache.clock, cache, requests, finisher
        self._again: Slots = np.zeros(0, np.int64)  # slots of the last append of one token each

    def find(self, sequence_id: int, tenant: str = "") -> int:
        """Return the slot of a client's sequence that belongs to the tenant ("": any).

        Raises:
            SequenceNotFound: There is no such sequence; the error has the reason if the coordinator removed it.
        """
        s = self._cache.sequences
        slot = s.slot_of.get(sequence_id)
        if slot is not None and s.owned[slot] and (not tenant or self._tenant(slot) == tenant):
            return slot
        why = self._cache.kept.removals.reason(sequence_id, tenant)
        if not why:
            why = LOST if 0 < sequence_id <= self._requests.first_id else ""
        raise SequenceNotFound(sequence_id, why)

    def _tenant(self, slot: int) -> str:
        return self._cache.tenants.names[int(self._cache.sequences.tenant[slot])]

    def check_all(self, ids: np.ndarray[tuple[int], np.dtype[np.int64]], tenant: str) -> None:
        """Check that all sequences belong to the tenant. The handler refuses lists that are too long.

        Raises:
            SequenceNotFound: For the first sequence that does not.
        """
        if ids.size <= self._cache.limits.bounds.bulk_max:
            for sequence_id in ids.tolist():
                self.find(sequence_id, tenant)

    # --------------------------------------------------------------------------------------------------------- create

    def create(self, event: FromClient, message: CreateSequence) -> Message:
        """Create a sequence in the group that shares most with it; without a worker, it waits for one.

        Raises:
            KvforgeError: The command is refused; nothing has changed.
        """
        cache, s = self._cache, self._cache.sequences
        cache.check_tenant(message.tenant)
        validate.tokens("tokens", message.tokens, self._cache.vocab_size)
        if not 0 <= message.idle_ttl_ms <= validate.IDLE_TTL_MS_MAX:
            most = validate.IDLE_TTL_MS_MAX
            raise InvalidRequest("idle_ttl_ms", f"must be 0 to {most} ms, not {message.idle_ttl_ms}")
        if message.tokens.size > s.context_tokens_max:
            raise CapacityExceeded("context", message.tokens.size, s.context_tokens_max, "use fewer tokens")
        self._need_slots(1)
        salt = cache.hasher.salt(validate.salt_text(message.tenant, message.salt))
        placement, forgotten = self._place(message, salt), cache.tenants.forgotten_total
        tenant = cache.intern(message.tenant)
        if cache.tenants.forgotten_total != forgotten:  # this evicted cached blocks, perhaps the ones in the plan
            placement = self._place(message, salt)
        cache.kept.free_slots(1)
        slot = s.create(tenant, salt)
        s.owned[slot], s.client[slot] = True, event.client
        s.keep_idle(slot, message.idle_ttl_ms * 1000)
        s.extend(slot, message.tokens)
        if placement is not None:
            cache.residency.move_in(slot, placement)
            cache.tenants.prefix_queried_tokens[tenant] += message.tokens.size
            cache.tenants.prefix_hit_tokens[tenant] += int(s.scheduled[slot])
        return self._info(slot, message.rid)

    def _place(self, message: CreateSequence, salt: int) -> Placement | None:
        """Plan the placement of a sequence; None without workers. Raise CapacityExceeded without room."""
        cache = self._cache
        tenant = cache.tenants.peek(message.tenant)
        hashes = cache.indexing.hashes(salt, message.tokens)
        best, refusal, best_rank = None, None, (-1, -1)
        for group in cache.groups.values():
            placement = cache.planner.plan_placement(group, salt, message.tokens, hashes)
            try:
                placement = cache.residency.with_room(placement, tenant, NO_SPARE, np.zeros(0, np.int64))
            except CapacityExceeded as error:
                refusal = error
                continue
            rank = (placement.cached_tokens(cache.blocks.block_size), group.pool.available(tenant))
            if rank > best_rank:
                best, best_rank = placement, rank
        if best is None and refusal is not None:
            raise refusal
        return best

    # --------------------------------------------------------------------------------------------------- append, fork

    def append(self, message: Append) -> Message:
        """Append tokens to several sequences, all or nothing.

        Raises:
            KvforgeError: The command is refused; nothing has changed.
        """
        if message.tokens.size == message.counts.size == message.sequence_ids.size:
            reply = self._append_one(message) if message.tokens.size == 1 else self._append_again(message)
            if reply is not None:
                return reply
        s = self._cache.sequences
        counts = message.counts.astype(np.int64)
        if not message.sequence_ids.size == counts.size:
            raise InvalidRequest("counts", f"{counts.size} counts for {message.sequence_ids.size} sequences")
        if counts.size and counts.min() < 1:
            raise InvalidRequest("counts", f"must be at least 1 token for each sequence, not {counts.min()}")
        if int(counts.sum()) != message.tokens.size:
            raise InvalidRequest("tokens", f"{message.tokens.size} tokens, but counts of {int(counts.sum())}")
        validate.tokens("tokens", message.tokens, self._cache.vocab_size)
        slots = self._find_all(message.sequence_ids)
        for slot in slots[s.request[slots] != 0].tolist():
            raise SequenceBusy(int(s.id[slot]), int(s.request[slot]))
        if slots.size and not (s.tenant[slots] == s.tenant[slots[0]]).all():
            raise InvalidRequest("sequence_ids", "belong to several tenants: append to each tenant's separately")
        if slots.size:
            self._cache.tables.append(slots, message.tokens, counts)
            s.pinned[slots] = False
            if counts.size == message.tokens.size:
                # Such clients repeat the command: the fast path of the next one skips the look-up.
                self._again = slots
        return Appended(rid=message.rid, lengths=s.length[slots].astype(np.int32))

    def _append_one(self, message: Append) -> Appended | None:
        """Fast path for one token to one sequence; None if the general path must handle the command."""
        s, token = self._cache.sequences, int(message.tokens[0])
        slot = s.slot_of.get(int(message.sequence_ids[0]), NO_POOL)
        if slot == NO_POOL or not s.owned[slot] or s.request[slot] or message.counts[0] != 1:
            return None
        if not 0 <= token < self._cache.vocab_size or not self._cache.tables.append_one(slot, token):
            return None
        return Appended(rid=message.rid, lengths=np.array([s.length[slot]], np.int32))

    def _append_again(self, message: Append) -> Appended | None:
        """Fast path for one token each to the sequences of the previous append, which share a tenant.

        Returns None if the general path must handle or refuse the command.
        """
        s, slots = self._cache.sequences, self._again
        # Ids are never reused: a slot with the same id has the same sequence, owner and tenant.
        if s.id.take(slots).tobytes() != message.sequence_ids.tobytes() or not (message.counts == 1).all():
            return None
        if s.request.take(slots).any():
            return None
        # Viewed as unsigned, negative ids are large.
        if np.maximum.reduce(message.tokens.view(np.uint32)) >= self._cache.vocab_size:
            return None
        after = self._cache.tables.append_each(slots, message.tokens)
        return None if after is None else Appended(rid=message.rid, lengths=after.astype(np.int32))

    def fork(self, event: FromClient, message: Fork) -> Message:
        """Create sequences that share the blocks of another one."""
        slot, s = self.find(message.sequence_id), self._cache.sequences
        if not 1 <= message.count <= self._cache.limits.bounds.bulk_max:
            raise InvalidRequest("count", f"must be 1 to {self._cache.limits.bounds.bulk_max}")
        self._need_slots(message.count, but=message.sequence_id)
        self._cache.kept.free_slots(message.count, but=message.sequence_id)
        ids = []
        for _ in range(message.count):
            child = self._cache.residency.fork(slot)
            s.owned[child], s.client[child] = True, event.client
            s.keep_idle(child, 0 if s.leased[slot] else int(s.idle_ttl_us[slot]))  # a lease is not inherited
            ids.append(int(s.id[child]))
        s.touch(slot)
        return Forked(rid=message.rid, sequence_ids=np.array(ids, np.int64))

    def _need_slots(self, count: int, but: int = 0) -> None:
        """Check that there are free slots, or kept sequences except `but` that can be dropped for them."""
        if not self._cache.kept.could_free(count, but):
            self._cache.sequences.need_slots(count)

    # -------------------------------------------------------------------------------------------------- rewind, keep

    def rewind(self, message: Rewind) -> SequenceInfo:
        """Cut a sequence off behind its first tokens.

        Raises:
            SequenceNotFound: There is no such sequence.
            SequenceBusy: A request runs on it.
            InvalidRequest: The sequence is shorter.
        """
        slot, s = self.find(message.sequence_id), self._cache.sequences
        if s.request[slot]:
            raise SequenceBusy(message.sequence_id, int(s.request[slot]))
        if not 0 <= message.length <= s.length[slot]:
            problem = f"must be 0 to {int(s.length[slot])}, the tokens of the sequence, not {message.length}"
            raise InvalidRequest("length", problem)
        self._cache.residency.truncate(slot, message.length)
        s.pinned[slot] = False
        s.touch(slot)
        return self._info(slot, message.rid)

    def keep(self, message: KeepSequence) -> SequenceInfo:
        """Set the time to live of a sequence, which is then dropped for no other.

        Raises:
            SequenceNotFound: There is no such sequence.
            InvalidRequest: The time is out of range.
        """
        slot, s, most = self.find(message.sequence_id), self._cache.sequences, validate.IDLE_TTL_MS_MAX
        if not 1 <= message.idle_ttl_ms <= most:
            raise InvalidRequest("idle_ttl_ms", f"must be 1 to {most} ms, not {message.idle_ttl_ms}")
        s.kept[slot] = s.leased[slot] = False
        s.touch(slot)
        s.keep_idle(slot, message.idle_ttl_ms * 1000)
        return self._info(slot, message.rid)

    # ----------------------------------------------------------------------------------------------------------- read

    def info(self, message: GetSequence) -> SequenceInfo:
        """Return the state of a sequence. This does not count as an access."""
        return self._info(self.find(message.sequence_id), message.rid)

    def read(self, message: GetTokens) -> Message:
        """Return the tokens of a sequence. This counts as an access."""
        slot = self.find(message.sequence_id)
        self._cache.sequences.touch(slot)
        return SequenceTokens(rid=message.rid, tokens=self._cache.sequences.text(slot))

    def _info(self, slot: int, rid: int) -> SequenceInfo:
        s = self._cache.sequences
        group = self._cache.groups.get(int(s.pool[slot]))
        blocks = int(s.used[slot] + s.state_used[slot]) + self._cache.windows.of(slot).size
        return SequenceInfo(
            rid=rid,
            sequence_id=int(s.id[slot]),
            tenant=self._cache.tenants.names[int(s.tenant[slot])],
            length=int(s.length[slot]),
            computed_tokens=int(s.computed[slot]),
            blocks=blocks,
            bytes=blocks * (group.bytes_per_block if group else 0),
            resident=group is not None,
            worker=group.name if group else "",
            request_id=int(s.request[slot]),
            age_us=self._clock.now_us - int(s.created_us[slot]),
            idle_us=self._clock.now_us - int(s.accessed_us[slot]),
            accesses=int(s.accesses[slot]),
            idle_ttl_ms=int(s.idle_ttl_us[slot]) // 1000,
            pinned=bool(s.pinned[slot]),
        )

    # --------------------------------------------------------------------------------------------------------- remove

    def remove(self, message: RemoveSequences) -> Message:
        """Remove sequences, cancelling the requests that run on them."""
        slots = self._find_all(message.sequence_ids)
        freed = sum(self._end(slot, "") for slot in slots.tolist())
        return Removed(rid=message.rid, freed_blocks=freed)

    def remove_idle(self, tenant: int, why: str) -> int:
        """Remove a tenant's sequences that no request works on. Return how many there were."""
        s = self._cache.sequences
        slots = np.flatnonzero((s.id != 0) & (s.tenant == tenant) & (s.request == 0))
        for slot in slots.tolist():
            self._end(slot, why)
        return int(slots.size)

    def pass_time(self) -> int:
        """Remove expired sequences. Return the earliest time when another may expire, or NEVER."""
        s = self._cache.sequences
        for slot in s.collect_expired():
            self._end(slot, f"it was idle for its time to live of {s.idle_ttl_us[slot] / 1e6:g} s")
        return NEVER if s.expiry_us is None else s.expiry_us

    def client_gone(self, client: int) -> None:
        """Remove the sequences of a connection that ended, except those with a time to live.

        The connection's requests have ended before. A sequence that a live request continues gets the lease as its time
        to live.
        """
        s = self._cache.sequences
        mine = s.owned & (s.client == client)
        for slot in np.flatnonzero(mine & (s.idle_ttl_us == 0)).tolist():
            if s.request[slot]:
                s.keep_idle(slot, max(microseconds(self._cache.limits.bounds.lease_s), 1))
                s.leased[slot] = True
            else:
                self._end(slot, "its owner's connection ended")
        s.client[mine] = 0

    def _end(self, slot: int, why: str) -> int:
        s = self._cache.sequences
        request = self._requests.live.get(int(s.request[slot]))
        if request is not None:
            self._finisher.end(request, "cancel", "cancelled", None)
        if why:
            self._cache.kept.removals.note(int(s.id[slot]), self._tenant(slot), why)
        return self._cache.residency.remove(slot)

    # --------------------------------------------------------------------------------------------------------- checks

    def _find_all(self, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Slots:
        """Return the slots of distinct sequences. Raise InvalidRequest or SequenceNotFound."""
        if ids.size > self._cache.limits.bounds.bulk_max:
            raise InvalidRequest("sequence_ids", f"at most {self._cache.limits.bounds.bulk_max} in one command")
        slot_of, owned = self._cache.sequences.slot_of, self._cache.sequences.owned
        found = [slot_of.get(sequence_id, NO_POOL) for sequence_id in ids.tolist()]
        slots = np.array(found, np.int64)
        if (slots < 0).any() or not owned[slots].all():
            for sequence_id in ids.tolist():
                self.find(sequence_id)
        if len(set(found)) != len(found):
            raise InvalidRequest("sequence_ids", "a sequence is listed twice")
        return slots
