"""Progress and fairness: no livelock by preemption, no starvation, and tenants are charged for what they compute."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvforge.coordinator.core.cache.blocks import BlockIds
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.kv_cache_manager import KVCacheManager
from kvforge.coordinator.core.cache.placement import Placement
from kvforge.coordinator.core.cache.sequences import NO_POOL
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.requests.request import NO_SLOT, Request
from kvforge.coordinator.core.scheduling.queue import WaitingQueue
from kvforge.coordinator.core.waits import load_of
from kvforge.protocol.messages import Step
from tools.simulation.settings import Settings
from tools.simulation.workers import Violation

WAITS = 8


class Progress:
    """Observes the starts, the preemptions and the steps of one machine."""

    def __init__(self, machine: Machine, settings: Settings) -> None:
        self._machine, self._settings = machine, settings
        self._reached: dict[int, int] = {}
        self._fruitless: Counter[int] = Counter()
        self.fruitless_most = 0
        self._passed: Counter[int] = Counter()
        self._charged = np.zeros_like(machine.admission.waiting.service)
        self._lifted = np.zeros_like(self._charged)
        self._generated = np.zeros_like(self._charged)
        # The oldest request of a pool is not preempted and has a share of every step. A step without progress for any
        # request is therefore one in which the oldest recomputes what a death or an earlier preemption took (at most a
        # context of tokens), or waits for a block that a step in flight still uses.
        self._fruitless_max = settings.context + WAITS * settings.steps_in_flight_max

    def goes_on(self, before: Progress) -> None:
        """Take over from the machine that was rebuilt."""
        self._reached, self.fruitless_most = before._reached, before.fruitless_most
        self._passed, self._charged = before._passed, before._charged
        self._lifted, self._generated = before._lifted, before._generated

    # ------------------------------------------------------------------------------------------------------- livelock

    def planned(self, group: Group, step: Step) -> None:
        """Check a planned step: it makes progress for some request, or counts as fruitless. Copies alone do neither."""
        if not step.slots.size:
            return
        s, further = self._machine.cache.sequences, False
        for slot, end in zip(step.slots.tolist(), (step.starts + step.counts).tolist(), strict=True):
            request_id = int(s.request[slot])
            if end > self._reached.get(request_id, 0):
                self._reached[request_id] = end
                further = True
        if further:
            self._fruitless[group.epoch] = 0
            return
        self._fruitless[group.epoch] += 1
        self.fruitless_most = max(self.fruitless_most, self._fruitless[group.epoch])
        if self._fruitless[group.epoch] > self._fruitless_max:
            raise Violation(f"livelock: {self._fruitless_max} steps of {group.name} only recomputed tokens")

    def preempted(self, request: Request, asking: int) -> None:
        """Check the preemption of a running request for the row in slot `asking`.

        The request is never the oldest of a pool, unless it is alone there, and never one of another tenant within its
        floor. At a tenant's ceiling, a request is alone if no other request of the tenant runs in the pool.
        """
        s, order = self._machine.cache.sequences, self._machine.admission.rows.order
        floor = int(self._machine.cache.tenants.floor[request.tenant])
        usage = int(self._machine.cache.groups[int(s.pool[request.slot])].pool.usage[request.tenant])
        if s.tenant[asking] != request.tenant and 0 < usage <= floor:
            raise Violation(
                f"request {request.id} is preempted though its tenant holds {usage} of its floor of {floor}"
            )
        sharing = s.running & (s.pool == s.pool[request.slot])
        rivals = sharing & (s.tenant == request.tenant) if self._settings.quotas else sharing
        if np.count_nonzero(rivals) > 1 and order[sharing].min() == order[request.slot]:
            raise Violation(f"livelock: request {request.id}, the oldest in its pool, is preempted")

    def disturbed(self) -> None:
        """Reset the count: a worker died or a request ended, so another request may be the oldest of a pool."""
        self._fruitless.clear()

    def turned(self, now_us: int) -> None:
        """Check after a turn that groups with rows have steps in flight, and that no request waits needlessly."""
        if self._machine.due_us() == now_us:
            return  # more work is due at once
        for group in self._machine.cache.groups.values():
            if group.running and not group.sent and not group.away:
                raise Violation(f"{group.running} rows of {group.name} are idle, but no step is in flight")
        admission = self._machine.admission
        waiting = [request for request in admission.waiting if request.wait is not None]
        if any(self._is_kept_for(request) for request in waiting):
            return
        for request in waiting:
            if request.awaits_sibling or request.awaits_trial:
                continue
            if request.awaits_disk:
                if not self._load_is_coming(request, now_us):
                    raise Violation(f"request {request.id} waits for {request.wait}, which no order is going to end")
                continue
            hashes, found = request.hashes, admission.choice.choose(request, ())
            request.hashes = hashes
            if isinstance(found, Placement) and (request.wait is None or request.wait.limit != "kept"):
                raise Violation(f"request {request.id} waits for {request.wait}, but would find room")

    def _load_is_coming(self, request: Request, now_us: int) -> bool:
        """Return whether a load that the request waits for is in flight, and its time is not over."""
        wait = request.wait
        if wait is None or request.disk_until_us <= now_us:
            return False
        groups = [group for group in self._machine.cache.groups.values() if group.epoch == wait.group]
        return any(
            load_of(group.epoch, order.load) in wait.events
            for group in groups
            if group.disk is not None
            for order in group.disk.orders.values()
        )

    def _is_kept_for(self, request: Request) -> bool:
        """Return whether room is reserved for the request, without the side effect of choosing a group."""
        chosen, hashes = request.kept_epoch, request.hashes
        kept = self._machine.admission._kept_for(request) is not None
        request.kept_epoch, request.hashes = chosen, hashes
        return kept

    def hopeless(self, request: Request) -> None:
        """Check the end of a row that can never continue: a second opinion, with sets.

        It is right if the row would find no block even alone, or if no step is in flight in its group.
        """
        assert request.wait is not None, "a row that was not stalled was ended"
        cache = self._machine.cache
        group = cache.groups[int(cache.sequences.pool[request.slot])]
        could = self._could_have(group, request.tenant, {request.slot})
        if group.sent and could >= max(1, request.wait.needed):
            raise Violation(f"request {request.id} was ended though {could} blocks would become free: {request.wait}")

    def _could_have(self, group: Group, tenant: int, stay: set[int]) -> int:
        """Return how many blocks the tenant could get if all rows except `stay` had ended; clients hold the others."""
        cache, s, pool = self._machine.cache, self._machine.cache.sequences, group.pool
        if self._settings.policy == "none":
            stay = stay | {
                t for t in np.flatnonzero(s.pool == group.number).tolist() if s.owned[t] and not s.request[t]
            }
        kept = {block for slot in stay for ids in _held(cache, slot) for block in ids.tolist()}
        kept |= set(cache.blocks.external)
        owner = cache.blocks.owner
        used = Counter(int(owner[block]) for block in kept if pool.base <= block < pool.base + pool.count)
        floors = {t: int(floor) for t, floor in enumerate(cache.tenants.floor.tolist()) if t != tenant}
        free = pool.count - used.total() - sum(max(0, floor - used[t]) for t, floor in floors.items())
        return min(free, int(cache.tenants.ceiling[tenant]) - used[tenant])

    # ------------------------------------------------------------------------------------------------------- fairness

    def starts(self, request: Request, group: Group) -> None:
        """Check a start against the requests that it overtakes.

        A request that only one group can hold, and that neither its tenant's ceiling, its siblings nor a disk hold up,
        is overtaken in that group at most `passes_max` times.
        """
        admission = self._machine.admission
        at_ceiling: set[int] = set()
        for earlier in admission.waiting:
            if earlier is request:
                break
            if earlier.tenant in at_ceiling or earlier.awaits_sibling or earlier.awaits_trial or earlier.awaits_disk:
                continue
            if earlier.at_ceiling:
                at_ceiling.add(earlier.tenant)
            elif self._only_group(earlier) == group.number and self._could_start(earlier, group):
                self._pass(earlier, request)
        self._passed.pop(request.id, None)

    def _could_start(self, request: Request, group: Group) -> bool:
        """Return whether the request would find room if all rows had ended; otherwise it waits for a client."""
        s = self._machine.cache.sequences
        blocks = s.blocks_for(request.prompt.size + request.tokens.size + 1)
        needed = blocks + group.state_blocks + self._windows_most(blocks)
        return self._could_have(group, request.tenant, set()) >= needed

    def _windows_most(self, blocks: int) -> int:
        """Return how many blocks the windows of a sequence of so many blocks take at most."""
        settings = self._settings
        seen = -(-(settings.window + settings.step_tokens_max) // settings.block_size) + 1
        return settings.window_pages * min(blocks, seen)

    def _pass(self, earlier: Request, request: Request) -> None:
        if self._passed[earlier.id] >= self._settings.passes_max:
            raise Violation(
                f"starvation: {request.id} starts before {earlier.id}, overtaken {self._settings.passes_max} times"
            )
        self._passed[earlier.id] += 1

    def _only_group(self, request: Request) -> int:
        """Return the only group that can take the request; NO_POOL if there are several, or none."""
        cache = self._machine.cache
        slot = cache.sequences.slot_of.get(request.sequence_id, NO_SLOT) if request.sequence_id else NO_SLOT
        if slot != NO_SLOT and cache.sequences.pool[slot] != NO_POOL:
            return int(cache.sequences.pool[slot])
        able = [g.number for g in cache.groups.values() if self._machine.admission.choice.could_hold(g, request)]
        return able[0] if len(able) == 1 else NO_POOL

    # --------------------------------------------------------------------------------------------------------- shares

    def started(self, request: Request) -> None:
        """Charge the tenant of a started request for what must be computed first."""
        s = self._machine.cache.sequences
        self._charged[request.tenant] += int(s.length[request.slot] - s.scheduled[request.slot])

    def added(self, queue: WaitingQueue, tenant: int, before: float) -> None:
        """Check that a tenant without work gets no credit when a request joins the queue."""
        if queue.service[tenant] < before:
            raise Violation("a tenant gained credit")
        self._lifted[tenant] += queue.service[tenant] - before

    def over(self, request: Request) -> None:
        """Record the generated tokens of an ended request; each token was charged."""
        self._generated[request.tenant] += request.tokens.size + request.cut
        self._reached.pop(request.id, None)
        self._passed.pop(request.id, None)

    def check_shares(self) -> None:
        """Check each tenant's counter: computed tokens by weight, plus its lifts."""
        machine: Any = self._machine
        generated = self._generated.copy()
        s, rows = machine.cache.sequences, machine.admission.rows
        for request in machine.requests.live.values():
            slot = request.slot
            size = request.tokens.size if slot == NO_SLOT else int(s.length[slot] - rows.base[slot])
            generated[request.tenant] += size
        expected = (self._charged + generated) / machine.cache.tenants.weight + self._lifted
        if not np.allclose(machine.admission.waiting.service, expected):
            raise Violation(f"tenants were charged {machine.admission.waiting.service}, not {expected}")


def _held(cache: KVCacheManager, slot: int) -> tuple[BlockIds, ...]:
    s = cache.sequences
    return s.blocks_of(slot), s.states_of(slot), cache.windows.of(slot)
