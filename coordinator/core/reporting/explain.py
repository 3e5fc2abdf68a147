"""Explanations: the holders of a block, the reason why a request waits, the blocks of a tenant."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import CapacityExceeded, Field, InvalidRequest, NotFound
from kvforge.protocol.messages import Explain, Explanation, GetBlock, GetSequence, Message

from ..cache.blocks import KV, NO_BLOCKS
from ..cache.groups import Group
from ..cache.holders import LISTED_MAX, largest_holders
from ..cache.host_copies import HostCopies
from ..cache.host_node import NO_HOST_BLOCK
from ..cache.host_yield import WHOLE, permille
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.model_drafts import CERTAIN, ModelDrafts, own_chance
from ..cache.placement import Placement
from ..cache.sequences import NO_POOL
from ..cache.supply import short_of
from ..commands.blocks import BlockCommands
from ..commands.sequences import SequenceCommands
from ..requests.request import NO_SLOT, RUNNING, Request
from ..requests.table import RequestTable
from ..scheduling.admission import Admission
from ..scheduling.rows import BATCH_PRIORITY
from ..waits import DISK, GRAMMAR, HOST, SIBLING, Wait
from .spent import duration, where_time_went
from .statistics import live_tokens

Facts = dict[str, Field]
Explained = tuple[str, list[str], Facts]


class Explainer:
    """Builds explanations without side effects."""

    def __init__(
        self,
        cache: KVCacheManager,
        requests: RequestTable,
        admission: Admission,
        sequences: SequenceCommands,
        blocks: BlockCommands,
    ) -> None:
        self._clock, self._cache, self._requests, self._admission = cache.clock, cache, requests, admission
        self._sequences, self._blocks = sequences, blocks

    def explain(self, tenant: str, message: Explain) -> Message:
        """Explain a subject to a client that sees one tenant ("": all).

        Raises:
            InvalidRequest: The message does not name exactly one subject.
            NotFound: The subject does not exist.
        """
        given = [message.block_id >= 0, message.request_id >= 0, message.sequence_id >= 0, bool(message.tenant)]
        if sum(given) != 1:
            raise InvalidRequest("subject", "give exactly one of block_id, request_id, sequence_id, tenant")
        if message.block_id >= 0:
            subject, sentences, facts = self._block(tenant, message.block_id)
        elif message.request_id >= 0:
            subject, sentences, facts = self._request(
                self._cache.tenants.peek(tenant), self._requests.find(message.request_id)
            )
        elif message.sequence_id >= 0:
            subject, sentences, facts = self._sequence(message.sequence_id)
        else:
            subject, sentences, facts = self._tenant(message.tenant)
        return Explanation(rid=message.rid, subject=subject, sentences=tuple(sentences), facts=facts)

    # ---------------------------------------------------------------------------------------------------------- blocks

    def _block(self, tenant: str, block: int) -> Explained:
        info = self._blocks.info(tenant, GetBlock(rid=0, block_id=block))
        sentences = [f"block {block} of worker {info.worker} is {info.state}, generation {info.generation}"]
        sentences += [f"held by {one.name} for {duration(one.since_us)}" for one in info.holders]
        if info.refcount > len(info.holders):
            sentences.append(f"and by {info.refcount - len(info.holders)} more")
        if info.state == "cached":
            sentences.append(
                "it has no holder; it is kept because its prefix may be used again, and evicted when needed"
            )
        if info.state == "quarantined":
            touch = self._cache.blocks.touch[block]
            sentences.append(f"it has no holder; step {touch} of {info.worker} may still touch it")
        sentences += self._host_copy(block)
        if info.tenant:
            sentences.append(f"charged to tenant {info.tenant!r}")
        facts = _facts(info, "state", "worker") | {"holders": info.refcount}
        return f"block {block}", sentences, facts | _facts(info, "refcount", "generation", "tenant", "indexed")

    def _host_copy(self, block: int) -> list[str]:
        """Describe the copy of a block's content in the host tier, and the copies between both that are under way."""
        host = self._cache.group_of_block(block).host
        if host is None:
            return []
        tier = host.tier
        if block in host.reads:
            at = tier.nodes[host.reads[block]].block
            return [f"the next step fills it from block {at} of the host tier: a request's prefix goes on there"]
        if block in host.writes:
            at = tier.nodes[host.writes[block]].block
            return [f"the next step copies its old content to block {at} of the host tier: the pool evicted it"]
        part = self._cache.group_of_block(block).pool.parts.part_of(block)
        if part is not None:
            node, disk = host.part_entry_of(*part), []
        else:
            node, disk = host.entry_of(block), self._disk_copy(host, block)
        if node is None or node.block == NO_HOST_BLOCK:
            return [*disk, *_eviction(host, block)]
        if node.written:
            return [f"its content is in block {node.block} of the host tier too", *disk]
        return [f"its content is being copied to block {node.block} of the host tier"]

    def _disk_copy(self, host: HostCopies, block: int) -> list[str]:
        """Describe the copy of an indexed block's content on the disk."""
        if host.disk is None or self._cache.blocks.kind[block] != KV or not host.index.alive(host.index.key(block)):
            return []
        tier, tokens = host.disk.tier, host.index.tokens_of(block).tobytes()
        found = tier.find(host.index.hash_of(block), tokens)
        if found is None or tier.nodes[found].block == NO_HOST_BLOCK:
            return []
        at = tier.nodes[found]
        if at.written:
            return [f"its content is in block {at.block} of the disk tier"]
        return [f"its content is being written to block {at.block} of the disk tier"]

    # -------------------------------------------------------------------------------------------------------- requests

    def _request(self, seen: int, request: Request) -> Explained:
        """Explain a request. Requests of tenants other than `seen` stay anonymous, unless it is 0."""
        subject = f"request {request.id}"
        facts: Facts = {"state": request.state, "age_us": self._clock.now_us - request.submitted_us}
        if request.ended:
            error = f": {request.error}" if request.error else ""
            spent, details = where_time_went(request, self._clock.now_us)
            ended = f"it has ended ({request.state}, reason {request.reason}){error}"
            return subject, [ended, spent, *_drafts(request)], facts | details | _draft_facts(request)
        if request.state == RUNNING:
            return self._running(seen, subject, request, facts)
        order = [waiting.id for waiting in self._admission.waiting]
        place = order.index(request.id)
        ahead = f"{place} requests are before it in the queue" if place else "it is the first in the queue"
        limit, sentences, details = self._why_waiting(seen, request)
        head = self._requests.live[order[0]]
        if place and not limit:  # its room is kept for an earlier request, or it has not been tried yet
            limit, sentences, details = self._why_waiting(seen, head)
        if place:
            sentences = [f"it waits behind {self._named(seen, head.id)}", *sentences]
        facts.update(details)
        facts.update({"place": place, "limit": limit})
        if request.passed:
            facts["passed"] = request.passed
            sentences.append(f"{request.passed} later requests that found room have started before it")
        since = f"it is {request.state} since {duration(self._clock.now_us - request.submitted_us)}"
        return subject, [f"{since}; {ahead}", *sentences], facts

    def _named(self, seen: int, request_id: int) -> str:
        request = self._requests.known(request_id)
        known = not seen or (request is not None and request.tenant == seen)
        return f"request {request_id}" if known else "a request of another tenant"

    def _running(self, seen: int, subject: str, request: Request, facts: Facts) -> Explained:
        s, slot = self._cache.sequences, request.slot
        left = int(self._admission.rows.limit[slot] - s.length[slot])
        facts.update({"worker": request.worker, "blocks": int(s.used[slot]), "tokens_left_max": left})
        runs = f"it runs on {request.worker}: {s.length[slot]} tokens in {s.used[slot]} blocks, at most {left} to come"
        if request.wait is not None:
            facts.update({"limit": request.wait.limit, "blocks_short": request.wait.short})
            group = self._cache.groups[int(s.pool[slot])]
            still = f"it is stalled: {request.wait.short} blocks are missing ({request.wait.problem})"
            return subject, [runs, still, *self._what_would_free(seen, group)], facts
        if self._cache.groups[int(s.pool[slot])].away:
            away = "it waits for its worker to reconnect after a restart: it continues then, or elsewhere"
            return subject, [runs, away], {**facts, "limit": "away"}
        model = self._cache.groups[int(s.pool[slot])].model_drafts
        sentences = [runs, *self._state(slot), *self._load(slot), *_returns(request), *_drafts(request, model)]
        facts.update(_draft_facts(request))
        prefill = int(s.length[slot] - s.scheduled[slot])
        if prefill > 1:
            return subject, [*sentences, f"{prefill} tokens of its prompt are still to be computed"], facts
        return subject, sentences, facts

    def _why_waiting(self, seen: int, request: Request) -> tuple[str, list[str], Facts]:
        """Return the limit that a request waits for, as (name, sentences, facts); "" if it will be tried next."""
        wait, cache = request.wait or self._untried(request), self._cache
        if wait is None:
            return "", ["nothing holds it back: it starts in the next turn"], {"blocks_short": 0}
        slots, rows = cache.sequences.id.size, self._rows_max(request)
        other = self._named(seen, wait.other)
        reasons = {
            "workers": "no worker is ready: it starts when one has registered its pool",
            "away": "no worker has reconnected since the coordinator restarted: it starts when one has",
            "sequences_max": f"all {slots} sequence slots are taken: it starts when one is freed",
            "step_rows_max": f"every worker runs its limit of {rows} requests: it starts when one ends",
            "step": "a step in flight still reads its sequence: it starts when that is done",
            "kept": "room is kept for requests before it: it is tried when one has started",
            SIBLING: f"{other} computes the prompt that it shares: it starts when that is done",
            GRAMMAR: "its worker tries its grammar within limits of time and memory: it continues when that is done",
            HOST: "a step brings its sequence back from the host tier: it starts when that is done",
            DISK: "blocks of its prompt come from the disk tier: it starts when they are there, or without them",
            "alone": f"workers died while running {other}: that one runs alone until it has its next token",
        }
        if wait.limit == "alone" and self._admission.choice.must_be_alone(request):
            dead = f"{request.crashes} workers in a row died while running it: it runs alone, when a worker is idle"
            return wait.limit, [dead], {"crashes": request.crashes}
        if wait.limit in reasons:
            names_one = wait.limit in (SIBLING, "alone") and other.endswith(str(wait.other))
            return wait.limit, [reasons[wait.limit]], {"other": wait.other} if names_one else {}
        group = next(group for group in cache.groups.values() if group.epoch == wait.group)
        short, problem = self._short(request, group)
        sentences = [f"{short} blocks are missing on {group.name} ({problem})", *self._what_would_free(seen, group)]
        return wait.limit, sentences, {"blocks_short": short, "worker": group.name}

    def _untried(self, request: Request) -> Wait | None:
        """Return what keeps requests from being tried at all, or None."""
        groups, rows_max = self._cache.groups.values(), self._rows_max(request)
        if not groups:
            return Wait("workers")
        if not request.sequence_id and not self._cache.sequences.slots_free:
            return Wait("sequences_max")
        if all(group.running >= rows_max for group in groups):
            return Wait("step_rows_max")
        return None

    def _rows_max(self, request: Request) -> int:
        """Return the most rows of a worker with which the request starts."""
        return self._admission.choice.rows_max(batch=request.priority == BATCH_PRIORITY)

    def _short(self, request: Request, group: Group) -> tuple[int, str]:
        """Return how many blocks the request lacks in the group now, and the refusal that it would get."""
        cache, s = self._cache, self._cache.sequences
        slot = s.slot_of.get(request.sequence_id, NO_SLOT)
        hashes = request.hashes
        resident = slot != NO_SLOT and s.pool[slot] == group.number
        placement = self._admission.choice.plan(group, request)
        request.hashes = hashes  # explaining must not have side effects, not even on speed
        if resident:
            placement = Placement(group, NO_BLOCKS, (-1, 0), 0)
        asking, spare = np.array([slot] if slot >= 0 else [], int), self._admission.choice.spare(group, request)
        try:
            cache.residency.with_room(placement, request.tenant, spare, asking)
        except CapacityExceeded as error:
            return short_of(error), str(error)
        return 0, "there is room by now: it is tried next"

    def _what_would_free(self, seen: int, group: Group) -> list[str]:
        s, pool = self._cache.sequences, group.pool
        sentences = []
        if pool.quarantined:
            sentences.append(f"{pool.quarantined} blocks come back when step {group.last_step} is done")
        running = np.flatnonzero(s.running & (s.pool == group.number))
        soonest = running[np.argsort(self._admission.rows.limit[running] - s.length[running])][:LISTED_MAX]
        for slot in soonest[(s.tenant[soonest] == seen) | (not seen)].tolist():
            left = int(self._admission.rows.limit[slot] - s.length[slot])
            sentences.append(f"request {s.request[slot]} holds {s.used[slot]} blocks and ends within {left} tokens")
        return sentences + largest_holders(self._cache, group, seen, running=False)

    # ---------------------------------------------------------------------------------------------- sequences, tenants

    def _sequence(self, sequence_id: int) -> Explained:
        info = self._sequences.info(GetSequence(rid=0, sequence_id=sequence_id))
        s, slot = self._cache.sequences, self._sequences.find(sequence_id)
        ids, ttl_us = s.blocks_of(slot), int(s.idle_ttl_us[slot])
        shared = int(np.count_nonzero(self._cache.blocks.refcount[ids] > 1))
        used = f"last used {duration(info.idle_us)} ago"
        sentences = [f"{info.length} tokens, {info.computed_tokens} with KV, {used}"]
        if not info.resident:
            sentences.append(self._not_resident(slot))
        else:
            sentences.append(f"{ids.size} blocks on {info.worker}, {shared} shared: {_ids(ids)}")
            sentences += self._state(slot) + self._window(slot)
        if not info.request_id:
            sentences += self._return(slot)
        if info.pinned:
            sentences.append(
                "it is pinned for later prompts: it is evicted only where no running row frees blocks, "
                "or to a host tier before a request is preempted"
            )
        if info.request_id:
            sentences.append(f"request {info.request_id} works on it")
        elif ttl_us:
            sentences.append(f"it is removed in {duration(ttl_us - info.idle_us)} if it stays unused")
        facts = _facts(info, "length", "computed_tokens", "blocks") | {"shared_blocks": shared}
        return f"sequence {sequence_id}", sentences, facts | _facts(info, "worker", "request_id", "resident", "pinned")

    def _not_resident(self, slot: int) -> str:
        """Describe where the KV of a sequence without blocks is."""
        s, indexing, size = self._cache.sequences, self._cache.indexing, self._cache.blocks.block_size
        salt, tokens = int(s.salt[slot]), indexing.contents(s.tokens[slot, : int(s.length[slot])])
        hashes = indexing.hashes(salt, tokens)
        for group in self._cache.groups.values():
            if group.host is None:
                continue
            placement = self._cache.planner.plan_placement(group, salt, tokens, hashes)
            first, found = placement.hits.size, placement.host
            if found:
                words = f"it holds no blocks: {size * len(found)} of its tokens are in the host tier of {group.name}"
                return f"{words}, behind {size * first} in cached blocks; they come back when a request needs them"
        return "it holds no blocks: its KV was evicted, lost, or never computed; it is computed when needed"

    def _return(self, slot: int) -> list[str]:
        """Describe why an idle sequence came back before a request, or when it may.

        Idle times of other tenants decide too, but are not shown.
        """
        s, idle = self._cache.sequences, self._cache.idle
        own = idle.times.own(int(s.tenant[slot]))
        expected = own.expected() if own is not None else None
        if s.pinned[slot]:
            when = "it is pinned"
        elif expected is not None:
            when = f"it is expected when it has been idle for {_times(*expected)}, as others of its tenant were"
        else:
            when = "few idle times of its tenant are known, so those of all tenants count"
        if s.returned[slot]:
            since = duration(self._clock.now_us - int(s.resident_us[slot]))
            return [f"it came back from the host tier before a request, {since} ago: {when}"]
        if s.return_us[slot] and s.pool[slot] == NO_POOL and expected is not None and not s.pinned[slot]:
            return [f"{when}; then it comes back if there is room"]
        return []

    def _window(self, slot: int) -> list[str]:
        """Describe the window blocks of a resident sequence."""
        s = self._cache.sequences
        group, held = self._cache.groups[int(s.pool[slot])], self._cache.windows.of(slot).size
        if not group.window_pages:
            return []
        since = int(s.window_first[slot]) * s.block_size
        words = f"{held} more blocks hold the KV of layers with a window of {group.window} tokens"
        return [f"{words}, from token {since} on"]

    def _state(self, slot: int) -> list[str]:
        """Describe the recurrent state of a resident sequence, and the checkpoint that it can go back to."""
        s = self._cache.sequences
        if not s.state_used[slot]:
            return []
        group = self._cache.groups[int(s.pool[slot])]
        indexing, salt = self._cache.indexing, int(s.salt[slot])
        tokens = indexing.contents(s.tokens[slot, : s.length[slot]])
        found = group.index.match(salt, tokens, indexing.hashes(salt, tokens))
        last = self._cache.checkpoints.last(group, found) * s.block_size
        back = f"its last checkpoint is behind {last} tokens" if last else "there is no checkpoint of it"
        return [f"{s.state_used[slot]} more blocks hold its recurrent state, behind {s.scheduled[slot]} tokens; {back}"]

    def _load(self, slot: int) -> list[str]:
        """Describe what a resident sequence gets from the host tier."""
        s = self._cache.sequences
        host = self._cache.groups[int(s.pool[slot])].host
        load = host.loads.get(slot) if host is not None else None
        if load is None:
            return []
        when = f"step {load.step}" if load.step else "the next step"
        return [f"{load.end - int(s.computed[slot])} tokens of its prefix come from the host tier with {when}"]

    def _tenant(self, name: str) -> Explained:
        tenants, cache = self._cache.tenants, self._cache
        index = tenants.peek(name)
        if not index:
            raise NotFound(f"there is no tenant {name!r}", tenant=name)
        sentences, total, integral, live = [], 0, float(tenants.past_byte_seconds[index]), 0
        for group in cache.groups.values():
            usage, each = int(group.pool.usage[index]), group.bytes_per_block
            total += usage * each
            integral += int(group.pool.block_us_each()[index]) * each / 1e6
            places, tokens = usage * cache.blocks.block_size, live_tokens(cache, group, index)
            live += tokens
            share = f"{tokens / places:.0%} of their token slots are live" if places else "none"
            sentences.append(f"{usage} of {group.pool.count} blocks on {group.name} ({usage * each} bytes): {share}")
            if group.host is not None:
                tier = group.host.tier
                sentences.append(f"{tier.usage.get(index, 0)} of {tier.total} blocks of its host file")
            if group.disk is not None:
                tier = group.disk.tier
                sentences.append(f"{tier.usage.get(index, 0)} of {tier.total} blocks of its disk")
        queried, hit = int(tenants.prefix_queried_tokens[index]), int(tenants.prefix_hit_tokens[index])
        if queried:
            sentences.append(f"prefix cache: {hit} of {queried} tokens were there ({hit / queried:.1%})")
        facts: Facts = {
            "bytes": total,
            "byte_seconds": integral,
            "live_tokens": live,
            "floor": int(tenants.floor[index]),
            "ceiling": tenants.ceiling_blocks(index),
            "prefix_queried_tokens": queried,
            "prefix_hit_tokens": hit,
        }
        return f"tenant {name}", sentences, facts


def _facts(info: Message, *names: str) -> Facts:
    """Return the named fields of a reply."""
    return {name: getattr(info, name) for name in names}


def _times(early_us: int, late_us: int) -> str:
    return f"{duration(early_us)} to {duration(late_us)}"


def _ids(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    shown = ", ".join(map(str, ids[:16].tolist()))
    return f"{shown}, ... ({ids.size} in all)" if ids.size > 16 else shown


def _eviction(host: HostCopies, block: int) -> list[str]:
    """Describe whether the host tier gets an indexed block without a copy when the pool evicts it."""
    if host.kind_of(block) != KV or not host.index.alive(host.index.key(block)):
        return []
    if host.is_reused(block):
        return ["the host tier gets a copy when it is evicted: it was used again, or its sequence goes on"]
    share, needed = host.tier.yields.share_of(host.owner_of(block)), 1000 * host.needed_yield() // WHOLE
    facts = f"it was used once, {permille(share)} of 1,000 such blocks are wanted again, and {needed} pay"
    if share.copying:
        return [f"the host tier gets a copy when it is evicted: {facts}"]
    return [f"the host tier gets no copy when it is evicted: {facts}"]


def _returns(request: Request) -> list[str]:
    """Describe how a request came back after its last preemption, if the host tier had blocks of it."""
    how = request.returns
    if how is None:
        return []
    copy = f"copying them takes {how.copy_us} us" if how.copy_us >= 0 else "no copy from the host has been measured"
    compute = f"computing them {how.compute_us} us" if how.compute_us >= 0 else "no prompt token has been measured"
    done = "it was computed again after its preemption" if not how.read else "it came back from the host tier"
    return [f"{done}: {how.read} of the {how.found} blocks there were read, since {copy} and {compute}"]


def _drafts(request: Request, model: ModelDrafts | None = None) -> list[str]:
    """Return a sentence about what was drafted for a request, if anything was.

    Args:
        request: The request.
        model: The draft model of its group; None for a request that has ended.
    """
    if not request.drafted_tokens:
        return []
    now = ""
    if model is not None:
        chances = request.draft_chance, request.draft_later
        if request.draft_by_model:
            own = request.draft_good, request.draft_expected
            chances = own_chance(model.first, *own), own_chance(model.later, *own)
        first, later = (100 * chance // CERTAIN for chance in chances)
        source = "the draft model" if request.draft_by_model else "lookup"
        now = (
            f"; its last step with drafts had {request.draft_count}, the next draft by {source} has a chance of "
            f"{first} %, and one behind an accepted draft of {later} %"
        )
    return [f"{request.accepted_tokens} of {request.drafted_tokens} drafted tokens were accepted{now}"]


def _draft_facts(request: Request) -> Facts:
    if not request.drafted_tokens:
        return {}
    facts: Facts = {"drafted_tokens": request.drafted_tokens, "accepted_tokens": request.accepted_tokens}
    return facts if request.ended else facts | {"drafts": request.draft_count}
