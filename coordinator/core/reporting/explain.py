"""Answers to "who holds this block", "why does this request wait", "what does this tenant occupy"."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import CapacityExceeded, Field, InvalidRequest, NotFound
from kvforge.protocol.messages import Explain, Explanation, Message

from ..cache.blocks import STATE_NAMES
from ..cache.cache import Cache
from ..cache.groups import Group
from ..cache.holders import LISTED_MAX, who_holds
from ..cache.pool import short_of
from ..cache.tenants import NO_CEILING
from ..commands.blocks import BlockCommands
from ..commands.sequences import SequenceCommands
from ..requests.lifecycle import NO_SLOT, RUNNING, Request, RequestTable
from ..scheduling.admission import Admission
from ..sizes import HOLDERS_LISTED_MAX
from ..waits import SIBLING, Wait
from .statistics import live_tokens

Facts = dict[str, Field]
Told = tuple[str, list[str], Facts]


class Explainer:
    """Reads everything, changes nothing."""

    def __init__(
        self,
        cache: Cache,
        requests: RequestTable,
        admission: Admission,
        sequences: SequenceCommands,
        blocks: BlockCommands,
    ) -> None:
        self._clock, self._cache, self._requests, self._admission = cache.clock, cache, requests, admission
        self._sequences, self._blocks = sequences, blocks

    def explain(self, message: Explain) -> Message:
        """Raises InvalidRequest unless exactly one subject is given, and NotFound where it does not exist."""
        given = [message.block_id >= 0, message.request_id >= 0, message.sequence_id >= 0, bool(message.tenant)]
        if sum(given) != 1:
            raise InvalidRequest("subject", "give exactly one of block_id, request_id, sequence_id, tenant")
        if message.block_id >= 0:
            subject, sentences, facts = self._block(message.block_id)
        elif message.request_id >= 0:
            subject, sentences, facts = self._request(self._requests.find(message.request_id))
        elif message.sequence_id >= 0:
            subject, sentences, facts = self._sequence(self._sequences.find(message.sequence_id))
        else:
            subject, sentences, facts = self._tenant(message.tenant)
        return Explanation(rid=message.rid, subject=subject, sentences=tuple(sentences), facts=facts)

    # ---------------------------------------------------------------------------------------------------------- blocks

    def _block(self, block: int) -> Told:
        cache = self._cache
        group = cache.group_of_block(block)
        blocks, holders = cache.blocks, self._blocks.holders(block)
        state = STATE_NAMES[int(blocks.state[block])]
        tenant = cache.tenants.names[int(blocks.owner[block])]
        sentences = [f"block {block} of worker {group.name} is {state}, generation {blocks.generation[block]}"]
        sentences += [f"held by {one.name} for {_time(one.since_us)}" for one in holders[:HOLDERS_LISTED_MAX]]
        if len(holders) > HOLDERS_LISTED_MAX:
            sentences.append(f"and by {len(holders) - HOLDERS_LISTED_MAX} more")
        if state == "cached":
            sentences.append(
                "nobody holds it; it is kept because its prefix may be used again, and evicted when needed"
            )
        if state == "quarantined":
            sentences.append(f"nobody holds it; step {blocks.touch[block]} of {group.name} may still touch it")
        if tenant:
            sentences.append(f"charged to tenant {tenant!r}")
        facts: Facts = {
            "state": state,
            "worker": group.name,
            "holders": len(holders),
            "refcount": int(blocks.refcount[block]),
            "generation": int(blocks.generation[block]),
            "tenant": tenant,
            "indexed": bool(blocks.indexed[block]),
        }
        return f"block {block}", sentences, facts

    # -------------------------------------------------------------------------------------------------------- requests

    def _request(self, request: Request) -> Told:
        subject = f"request {request.id}"
        facts: Facts = {"state": request.state, "age_us": self._clock.now_us - request.submitted_us}
        if request.ended:
            error = f": {request.error}" if request.error else ""
            return subject, [f"it has ended ({request.state}, reason {request.reason}){error}"], facts
        if request.state == RUNNING:
            return self._running(subject, request, facts)
        order = [waiting.id for waiting in self._admission.waiting]
        place = order.index(request.id)
        ahead = f"{place} requests are before it in the queue" if place else "it is the first in the queue"
        limit, sentences, details = self._why_waiting(request)
        head = self._requests.live[order[0]]
        if place and not limit:  # it would find room, which is kept for one before it, or not tried yet
            limit, sentences, details = self._why_waiting(head)
        if place:
            sentences = [f"it waits behind request {head.id}", *sentences]
        facts.update(details)
        facts.update({"place": place, "limit": limit})
        if request.passed:
            facts["passed"] = request.passed
            sentences.append(f"{request.passed} later requests that found room have started before it")
        since = f"it is {request.state} since {_time(self._clock.now_us - request.submitted_us)}"
        return subject, [f"{since}; {ahead}", *sentences], facts

    def _running(self, subject: str, request: Request, facts: Facts) -> Told:
        s, slot = self._cache.sequences, request.slot
        left = int(self._admission.rows.limit[slot] - s.length[slot])
        facts.update({"worker": request.worker, "blocks": int(s.used[slot]), "tokens_left_max": left})
        told = f"it runs on {request.worker}: {s.length[slot]} tokens in {s.used[slot]} blocks, at most {left} to come"
        if request.wait is not None:
            facts.update({"limit": request.wait.limit, "blocks_short": request.wait.short})
            group = self._cache.groups[int(s.pool[slot])]
            still = f"it stands still: {request.wait.short} blocks are missing ({request.wait.problem})"
            return subject, [told, still, *self._what_would_free(group)], facts
        prefill = int(s.length[slot] - s.scheduled[slot])
        if prefill > 1:
            return subject, [told, f"{prefill} tokens of its prompt are still to be computed"], facts
        return subject, [told], facts

    def _why_waiting(self, request: Request) -> tuple[str, list[str], Facts]:
        """The limit that a request waits for: (name, sentences, facts); "" where it will be tried next."""
        wait, cache = request.wait or self._untried(request), self._cache
        if wait is None:
            return "", ["nothing holds it back: it starts with the next turn of the loop"], {"blocks_short": 0}
        if wait.limit == "workers":
            return "workers", ["no worker is ready: it starts when one has registered its pool"], {}
        if wait.limit == "sequences_max":
            slots = cache.sequences.id.size
            return wait.limit, [f"all {slots} sequence slots are taken: it starts when one is freed"], {}
        if wait.limit == SIBLING:
            told = f"request {wait.other} computes the prompt that it shares: it starts when that is done"
            return wait.limit, [told], {"other": wait.other}
        if wait.limit == "step_rows_max":
            rows = cache.limits.schedule.step_rows_max
            return wait.limit, [f"every worker runs its limit of {rows} requests: it starts when one ends"], {}
        if wait.limit == "alone":
            return self._alone(request, wait)
        if wait.limit == "step":
            return wait.limit, ["a step that is under way still reads its sequence: it starts when that is done"], {}
        if wait.limit == "kept":
            return wait.limit, ["room is kept for requests before it: it is tried when one of them has started"], {}
        group = next(group for group in cache.groups.values() if group.epoch == wait.group)
        short, problem = self._short(request, group)
        sentences = [f"{short} blocks are missing on {group.name} ({problem})", *self._what_would_free(group)]
        return wait.limit, sentences, {"blocks_short": short, "worker": group.name}

    def _untried(self, request: Request) -> Wait | None:
        """What keeps requests from being tried at all."""
        groups, rows_max = self._cache.groups.values(), self._cache.limits.schedule.step_rows_max
        if not groups:
            return Wait("workers")
        if not request.sequence_id and not self._cache.sequences.slots_free:
            return Wait("sequences_max")
        if all(group.running >= rows_max for group in groups):
            return Wait("step_rows_max")
        return None

    def _alone(self, request: Request, wait: Wait) -> tuple[str, list[str], Facts]:
        if self._admission.choice.must_be_alone(request):
            told = f"{request.crashes} workers in a row died while running it: it runs alone, when a worker is idle"
            return wait.limit, [told], {"crashes": request.crashes}
        told = f"workers died while running request {wait.other}: that one runs alone until it has its next token"
        return wait.limit, [told], {"other": wait.other}

    def _short(self, request: Request, group: Group) -> tuple[int, str]:
        """How many blocks the request lacks in the group by now, and the refusal that it would meet."""
        cache, s = self._cache, self._cache.sequences
        slot = s.slot_of.get(request.sequence_id, NO_SLOT) if request.sequence_id else NO_SLOT
        hashes = request.hashes
        placement = self._admission.choice.plan(group, request)
        request.hashes = hashes  # asking leaves nothing behind, not even a faster next time
        needed = 0 if slot != NO_SLOT and s.pool[slot] == group.number else placement.needed
        asking, spare = np.array([slot] if slot >= 0 else [], int), self._admission.choice.spare(group, request)
        try:
            cache.check_room(group, request.tenant, needed, placement.hits, asking, spare)
        except CapacityExceeded as error:
            return short_of(error), str(error)
        return 0, "there is room by now: it is tried next"

    def _what_would_free(self, group: Group) -> list[str]:
        s, pool = self._cache.sequences, group.pool
        sentences = []
        if pool.quarantined:
            sentences.append(f"{pool.quarantined} blocks come back when step {group.last_step} is done")
        running = np.flatnonzero(s.running & (s.pool == group.number))
        soonest = running[np.argsort(self._admission.rows.limit[running] - s.length[running])][:LISTED_MAX]
        for slot in soonest.tolist():
            left = int(self._admission.rows.limit[slot] - s.length[slot])
            sentences.append(f"request {s.request[slot]} holds {s.used[slot]} blocks and ends within {left} tokens")
        return sentences + who_holds(self._cache, group, running=False)

    # ---------------------------------------------------------------------------------------------- sequences, tenants

    def _sequence(self, slot: int) -> Told:
        s, blocks = self._cache.sequences, self._cache.blocks
        ids = s.blocks_of(slot)
        shared = int(np.count_nonzero(blocks.refcount[ids] > 1))
        group = self._cache.groups.get(int(s.pool[slot]))
        sentences = [f"{s.length[slot]} tokens, {s.computed[slot]} of them with KV, last used {self._ago(slot)}"]
        if group is None:
            sentences.append(
                "it holds no blocks: its KV was evicted, lost, or never computed; it is computed when needed"
            )
        else:
            sentences.append(f"{ids.size} blocks on {group.name}, {shared} of them shared: {_ids(ids)}")
        if s.request[slot]:
            sentences.append(f"request {s.request[slot]} works on it")
        elif s.idle_ttl_us[slot]:
            left = int(s.idle_ttl_us[slot]) - (self._clock.now_us - int(s.accessed_us[slot]))
            sentences.append(f"it is removed in {_time(left)} if nobody uses it")
        facts: Facts = {
            "length": int(s.length[slot]),
            "computed_tokens": int(s.computed[slot]),
            "blocks": int(ids.size),
            "shared_blocks": shared,
            "worker": group.name if group else "",
            "request_id": int(s.request[slot]),
            "resident": group is not None,
        }
        return f"sequence {s.id[slot]}", sentences, facts

    def _ago(self, slot: int) -> str:
        return f"{_time(self._clock.now_us - int(self._cache.sequences.accessed_us[slot]))} ago"

    def _tenant(self, name: str) -> Told:
        tenants, cache = self._cache.tenants, self._cache
        index = tenants.peek(name)
        if not index:
            raise NotFound(f"there is no tenant {name!r}", tenant=name)
        sentences, total, integral, live = [], 0, float(tenants.past_byte_seconds[index]), 0
        for group in cache.groups.values():
            usage, each = int(group.pool.usage[index]), group.bytes_per_block
            total += usage * each
            integral += group.pool.block_us(index) * each / 1e6
            places, tokens = usage * cache.blocks.block_size, live_tokens(cache, group, index)
            live += tokens
            share = f"{tokens / places:.0%} of their token slots are live" if places else "none"
            sentences.append(f"{usage} of {group.pool.count} blocks on {group.name} ({usage * each} bytes): {share}")
        queried, hit = int(tenants.prefix_queried_tokens[index]), int(tenants.prefix_hit_tokens[index])
        if queried:
            sentences.append(f"prefix cache: {hit} of {queried} tokens were there ({hit / queried:.1%})")
        facts: Facts = {
            "bytes": total,
            "byte_seconds": integral,
            "live_tokens": live,
            "floor": int(tenants.floor[index]),
            "ceiling": 0 if tenants.ceiling_of(name) == NO_CEILING else tenants.ceiling_of(name),
            "prefix_queried_tokens": queried,
            "prefix_hit_tokens": hit,
        }
        return f"tenant {name}", sentences, facts


def _time(duration_us: int) -> str:
    return f"{duration_us / 1e6:.3g} s"


def _ids(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    shown = ", ".join(map(str, ids[:16].tolist()))
    return f"{shown}, ... ({ids.size} in all)" if ids.size > 16 else shown
