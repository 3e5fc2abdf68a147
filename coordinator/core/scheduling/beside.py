"""What requests of batches, which have the lowest priority, get of a step beside others.

A step with prompt tokens takes longer for each decode in it, up to twice as long on a GPU, and each row of a batch that
begins or ends delays the step behind it. Batches therefore wait for steps without others, and get a tenth of the time
where others leave them no such step for long. A request that comes waits for the step in flight: soon after others,
one step of batches alone is in flight, and the next one follows shortly before its end (`BatchRoom.send_us`). Decodes
of batches then leave most steps to their prompts: a step of 128 prompt tokens takes less time on a GPU than one of 64
decodes and 32 prompt tokens.

| the step has | decodes of batches | prompt tokens of batches |
|---|---|---|
| prompts of others | up to 1 / 32 of these tokens, with those of others | none, but in every sixteenth step |
| decodes of others | none | none |
| decodes of others, for 1,024 steps | a step 15 % longer; every third step none | every third step a third longer |
| none of others, for a while after them | all, in every eighth step | the other steps, 40 % longer |
| none of others | all | all |
"""

from __future__ import annotations

import numpy as np

from ..cache.costs import UNIT
from ..cache.groups import Group
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.sequences import Slots
from ..deadlines import NEVER
from .rows import RunningRows

CHUNK_TOKENS_MIN = 16
LOWER_SHARE = 16  # prompts of lower priority keep this part of a step's prefill tokens: 1 / LOWER_SHARE
DECODES_PERCENT = 15  # how much longer a step takes for decodes of batches beside those of others
DECODES_SHARE = 32  # beside others' prompts, decodes are at most 1 / DECODES_SHARE of their tokens, or one of a batch
AFTER_PERCENT = 40  # how much longer a step takes for prompts of batches, soon after others
STRETCHED_EVERY = 3  # beside decodes of others, one step of so many is stretched: by a tenth on average
DECODES_EVERY = 8  # after others, batches have one step of so many for decodes while they have prompts
BESIDE_PERCENT = 33  # the same beside decodes of others
WITHOUT_STEPS = 1024  # so many steps batches wait for one without others
INTERACTIVE_US = 30_000_000  # how long after other requests batches leave room for the next one


class BatchRoom:
    """Decides what batches get of a step."""

    def __init__(self, cache: KVCacheManager, rows: RunningRows) -> None:
        self._cache, self._rows = cache, rows

    def sends_in_time(self, group: Group) -> bool:
        """Return whether the next step is sent at `send_us`.

        It is while batches alone run and other requests are likely to come, because one ended lately. Where only one
        step may be in flight, it never is.
        """
        if self._cache.limits.schedule.steps_in_flight_max < 2 or not self._was_interactive(group):
            return False
        s = self._cache.sequences
        return not np.count_nonzero(s.running & (s.pool == group.number) & ~self._rows.batch)

    def send_us(self, group: Group) -> int:
        """Return when the step behind the one in flight is to be sent, while `sends_in_time`.

        Shortly before the end of that one, so that the device does not wait, and requests that come until then have
        their part of the next step. The end is expected by the costs of steps; a result that comes earlier has the next
        step sent at once.

        Returns:
            The time in microseconds. NEVER: with the result, because no lead is worth it, the times are not known, or
            drafts are due.
        """
        sent = group.sent[0] if len(group.sent) == 1 else None
        if sent is None or group.proposals or sent.message.drafts.size or sent.message.propose:
            return NEVER
        costs = group.costs if sent.prefill_tokens else group.row_costs.line
        takes_us = costs.of(sent.prefill_tokens or sent.slots.size) // UNIT
        lead_us = group.pauses.lead(takes_us)
        return max(sent.sent_us, group.result_us) + takes_us - lead_us if lead_us else NEVER

    def decodes(self, group: Group, decodes: Slots, prompts: Slots, tokens: int) -> Slots:
        """Return the rows that decode in the next step: the oldest ones of batches, as far as they have room.

        A step without others is recorded.

        Args:
            group: The group.
            decodes: Rows that could decode, [n].
            prompts: Rows with prompt tokens, [m].
            tokens: The most tokens of a step.
        """
        mine = self._rows.batch[decodes]
        if not np.count_nonzero(mine):
            return decodes
        waiting = prompts[~self._rows.batch[prompts]]
        if waiting.size:
            s = self._cache.sequences
            left = s.length[waiting] + s.pending[waiting] - s.scheduled[waiting]
            most = max(1, min(int(left.sum()), tokens) // DECODES_SHARE - int(np.count_nonzero(~mine)))
        elif mine.all():
            group.batch_step = group.next_step
            if not prompts.size or not self._was_interactive(group) or self._is_for_decodes(group):
                return decodes
            most = 0
        elif not self._is_long_beside(group) or (prompts.size and self._is_stretched(group)):
            most = 0
        else:
            costs, others = group.row_costs, int(np.count_nonzero(~mine))
            most = costs.line.stretched(DECODES_PERCENT, others) if costs.has_times else decodes.size
        batches = decodes[mine]
        oldest = batches[np.argsort(self._rows.order[batches], kind="stable")][:most]
        return np.sort(np.concatenate((decodes[~mine], oldest)))

    def repeats(self, group: Group, slots: Slots) -> None:
        """Record a step of decodes, [n], that repeats the one before it, if it has none of others."""
        if self._rows.batch[slots].all():
            group.batch_step = group.next_step

    def prompt_tokens(self, group: Group, decodes: Slots, others: int, budget: int) -> int:
        """Return how many of a step's prompt tokens batches may have. A step without others is recorded.

        Args:
            group: The group.
            decodes: The rows that decode in the step, [n].
            others: Prompt tokens of others in the step.
            budget: Prompt tokens of the step.
        """
        if others:
            room = self.kept(group, budget)
        elif np.count_nonzero(~self._rows.batch[decodes]):
            room = _stretched(group, budget, BESIDE_PERCENT) if self._is_stretched(group) else 0
        else:
            group.batch_step = group.next_step
            if not self._was_interactive(group):
                room = budget
            else:
                room = 0 if decodes.size else _stretched(group, budget, AFTER_PERCENT)
        return min(budget - others, max(room, group.prompt_chunk)) if room else 0

    def kept(self, group: Group, budget: int) -> int:
        """Return how many prompt tokens of a step others leave to batches: in every sixteenth step a sixteenth."""
        return lower_share(budget) if group.next_step % LOWER_SHARE == 0 else 0

    def _is_stretched(self, group: Group) -> bool:
        """Return whether the next step may be longer for prompts of batches, beside decodes of others."""
        return self._is_long_beside(group) and group.next_step % STRETCHED_EVERY == 0

    def _is_long_beside(self, group: Group) -> bool:
        """Return whether others have left batches no step for long."""
        return group.next_step - group.batch_step >= WITHOUT_STEPS

    def _is_for_decodes(self, group: Group) -> bool:
        """Return whether the next step of batches alone has their decodes, and not their prompts."""
        return group.next_step % DECODES_EVERY == 0

    def _was_interactive(self, group: Group) -> bool:
        """Return whether requests that were none of a batch ended lately, so that more are likely to come."""
        return group.interactive_us >= 0 and self._cache.clock.now_us - group.interactive_us < INTERACTIVE_US


def lower_share(budget: int) -> int:
    """Return how many of a step's prompt tokens rows of lower priority keep; 0 of a single one."""
    return -(-budget // LOWER_SHARE) if budget > 1 else 0


def _stretched(group: Group, budget: int, percent: int) -> int:
    """Return the tokens of a step that takes so much longer: a power of two, since captured graphs have such sizes."""
    chunk = group.costs.stretched(percent)
    return max(CHUNK_TOKENS_MIN, 1 << (chunk.bit_length() - 1)) if chunk else budget
