"""Faults to plant in how drafts are chosen, verified and accounted for; see `faults`.

They need worlds with drafts, so they are apart from the faults of all worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvforge.coordinator.core.cache.block_tables import BlockTables
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.model_drafts import ModelDrafts
from kvforge.coordinator.core.cache.residency import Residency
from kvforge.coordinator.core.scheduling import step_builder
from kvforge.coordinator.core.scheduling.admission import Admission
from kvforge.coordinator.core.scheduling.drafts import Drafts, place
from kvforge.coordinator.core.scheduling.scheduler import Scheduler
from kvforge.coordinator.core.workers.appending import TokenAppender
from kvforge.coordinator.journal import restoring
from kvforge.protocol.messages import GENERATED
from tools.simulation import workers
from tools.simulation.drafting import accepted as real_accepted
from tools.simulation.faults import Patch

FAULTS_OF_DRAFTS: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_DRAFTS[make.__name__] = make
    return make


def verified(sent: Any, rows: Any) -> Any:
    """Return the rows of a step that had drafts, among [n] rows."""
    drafted = dict(zip(sent.slots.tolist(), sent.message.drafts.tolist(), strict=True))
    return rows[[drafted[slot] > 0 for slot in rows.tolist()]]


@fault
def wrong_draft_accepted() -> list[Patch]:
    """A worker accepts a draft without comparing it with the token that it sampled."""

    def accepted(text: list[int], end: int, seed: int, generated: int, vocabulary: int) -> list[int]:
        tokens = real_accepted(text, end, seed, generated, vocabulary)
        if len(tokens) > len(text) - end:
            return tokens
        drafts = [token % GENERATED for token in text[end:]]
        return [*drafts, real_accepted(text, len(text), seed, generated + len(drafts), vocabulary)[0]]

    return [(workers, "accepted", accepted)]


@fault
def rejected_draft_indexed() -> list[Patch]:
    """The KV of the last accepted token's position, which is that of a rejected draft, is indexed as its own."""
    real = TokenAppender.append_drafted

    def append_drafted(self: TokenAppender, group: Group, sent: Any, rows: Any, *rest: Any) -> Any:
        last = real(self, group, sent, rows, *rest)
        s, slots = self._cache.sequences, verified(sent, rows)
        computed = s.computed[slots]
        s.computed[slots] = s.length[slots]
        self._cache.indexing.filled(group)
        s.computed[slots] = computed
        return last

    return [(TokenAppender, "append_drafted", append_drafted)]


@fault
def rejected_drafts_stay_scheduled() -> list[Patch]:
    """What was computed of a row with drafts counts as planned up to its last token."""
    real = TokenAppender.append_drafted

    def append_drafted(self: TokenAppender, group: Group, sent: Any, rows: Any, *rest: Any) -> Any:
        last = real(self, group, sent, rows, *rest)
        slots = verified(sent, rows)
        self._cache.sequences.scheduled[slots] = self._cache.sequences.length[slots]
        return last

    return [(TokenAppender, "append_drafted", append_drafted)]


@fault
def rejected_drafts_charged() -> list[Patch]:
    """A tenant pays for every draft of its requests."""
    real = Drafts.learn

    def learn(self: Drafts, group: Group, requests: Any, drafted: Any, accepted: Any) -> None:
        real(self, group, requests, drafted, accepted)
        tenants = self._cache.tenants
        for request, tried, good in zip(requests, drafted, accepted, strict=True):
            tenants.service[request.tenant] += (tried - good) / tenants.weight[request.tenant]

    return [(Drafts, "learn", learn)]


@fault
def accepted_drafts_charged_twice() -> list[Patch]:
    """An accepted draft is charged as a token and again as a draft."""
    real = Drafts.learn

    def learn(self: Drafts, group: Group, requests: Any, drafted: Any, accepted: Any) -> None:
        real(self, group, requests, drafted, accepted)
        tenants = self._cache.tenants
        for request, good in zip(requests, accepted, strict=True):
            tenants.service[request.tenant] += good / tenants.weight[request.tenant]

    return [(Drafts, "learn", learn)]


@fault
def tokens_behind_a_stop_token_kept() -> list[Patch]:
    """Only the first and the last token of a result are compared with stop tokens."""
    real = TokenAppender.append_drafted

    def append_drafted(self: TokenAppender, *arguments: Any) -> Any:
        rows = self._admission.rows
        most, rows.stops_most = rows.stops_most, 0
        last = real(self, *arguments)
        rows.stops_most = most
        return last

    return [(TokenAppender, "append_drafted", append_drafted)]


@fault
def proposal_outlives_its_row() -> list[Patch]:
    """A request leaves its slot, and what was proposed for it waits for the next one."""
    real = Admission.vacate

    def vacate(self: Admission, request: Any) -> None:
        group = self._cache.groups.get(int(self._cache.sequences.pool[request.slot]))
        kept = {} if group is None else dict(group.proposals)
        real(self, request)
        if group is not None:
            group.proposals.update(kept)

    return [(Admission, "vacate", vacate)]


@fault
def step_planned_behind_drafts() -> list[Patch]:
    """A step follows one whose drafts are not verified yet."""

    def in_flight_max(self: Scheduler, group: Group) -> int:
        return self._limits.steps_in_flight_max

    return [(Scheduler, "_in_flight_max", in_flight_max)]


@fault
def step_planned_behind_one_that_asks() -> list[Patch]:
    """A step follows one that asks a draft model, before the proposals come."""
    real = Scheduler._in_flight_max

    def in_flight_max(self: Scheduler, group: Group) -> int:
        asks = bool(group.sent and group.sent[-1].message.propose and not group.sent[-1].message.drafts.size)
        return self._limits.steps_in_flight_max if asks and not group.proposals else real(self, group)

    return [(Scheduler, "_in_flight_max", in_flight_max)]


@fault
def draft_model_learns_nothing_in_a_restart() -> list[Patch]:
    """A snapshot is read back without what is known of a draft model."""
    real = restoring._Restoring._group

    def group(self: Any, saved: Any) -> Group:
        found = real(self, saved)
        found.model_drafts = ModelDrafts(found.model_drafts.most)
        return found

    return [(restoring._Restoring, "_group", group)]


@fault
def drafts_beyond_the_last_block() -> list[Patch]:
    """Drafts go on behind the blocks of their row, which gets none for them."""
    return [(BlockTables, "grow_to", lambda self, *_: True)]


@fault
def blocks_of_rejected_drafts_kept() -> list[Patch]:
    """Blocks that no accepted token uses stay with their row."""
    return [(Residency, "give_back", lambda self, group, slots: None)]


@fault
def blocks_of_rejected_drafts_charged() -> list[Patch]:
    """A tenant pays for the blocks that its rows give back, as if they held tokens."""
    real = TokenAppender.append_drafted

    def append_drafted(self: TokenAppender, group: Group, sent: Any, rows: Any, *rest: Any) -> Any:
        found = real(self, group, sent, rows, *rest)
        s, slots = self._cache.sequences, verified(sent, rows)
        unused = s.used[slots] * s.block_size - s.length[slots]
        tenants = self._cache.tenants
        for tenant, tokens in zip(s.tenant[slots].tolist(), (unused // s.block_size).tolist(), strict=True):
            tenants.service[tenant] += tokens / tenants.weight[tenant]
        return found

    return [(TokenAppender, "append_drafted", append_drafted)]


@fault
def blocks_of_rejected_drafts_indexed() -> list[Patch]:
    """Blocks that rows give back are indexed, as if all that was written into them were their rows' own tokens."""
    real = Residency.give_back

    def give_back(self: Residency, group: Group, slots: Any) -> None:
        s = self._sequences
        computed = s.computed[slots]
        s.computed[slots] = s.used[slots] * s.block_size
        self._indexing.filled(group)
        s.computed[slots] = computed
        real(self, group, slots)

    return [(Residency, "give_back", give_back)]


@fault
def drafts_beyond_a_ceiling() -> list[Patch]:
    """Blocks for drafts are taken without a look at quotas."""
    real = BlockTables.grow_to

    def grow_to(self: BlockTables, *arguments: Any) -> bool:
        has_quotas, self._tenants.has_quotas = self._tenants.has_quotas, False
        try:
            return real(self, *arguments)
        finally:
            self._tenants.has_quotas = has_quotas

    return [(BlockTables, "grow_to", grow_to)]


@fault
def drafts_beyond_max_tokens() -> list[Patch]:
    """Drafts may take a request beyond the tokens that it asked for."""
    real = Drafts._wanted

    def wanted(self: Drafts, group: Group, slots: Any, proposals: Any) -> list[int]:
        limit = self._rows.limit
        limit[slots] += 8
        try:
            return real(self, group, slots, proposals)
        finally:
            limit[slots] -= 8

    return [(Drafts, "_wanted", wanted)]


@fault
def more_drafts_than_rows() -> list[Patch]:
    """Drafts do not count as rows of a step."""
    return [(Drafts, "_room", lambda self, group: 1 << 20)]


@fault
def drafts_sent_as_prompt_tokens() -> list[Patch]:
    """Drafts are sent without the mark of generated tokens."""

    def unmarked(tokens: Any, slots: Any, drafts: Any, marked: bool) -> Any:
        return place(tokens, slots, drafts, False)

    return [(step_builder, "place", unmarked)]


@fault
def draft_of_another_row() -> list[Patch]:
    """The drafts of a step are those of its rows in another order."""

    def rolled(tokens: Any, slots: Any, drafts: Any, marked: bool) -> Any:
        own, places = list(drafts), {slot: at for at, slot in enumerate(slots.tolist())}
        for slot, other in zip(own, np.roll(own, 1).tolist(), strict=True):
            if slot != other:  # the row feeds what another one would
                tokens[places[slot]] = tokens[places[other]]
        return place(tokens, slots, drafts, marked)

    return [(step_builder, "place", rolled)]


@fault
def proposals_not_restored() -> list[Patch]:
    """A snapshot is read back without the proposals that wait for the next step."""
    real = restoring._Restoring._group

    def group(self: Any, saved: Any) -> Group:
        found = real(self, saved)
        found.proposals = {}
        return found

    return [(restoring._Restoring, "_group", group)]
