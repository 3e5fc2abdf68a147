"""Drafts of steps: proposals behind a finished step, and acceptance of the drafts that were in it."""

from __future__ import annotations

from collections.abc import Iterable

from kvforge.protocol.errors import InvalidRequest, KvforgeError
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.queue import DeviceEvent
from kvforge.worker.drafts.drafter import NO_ENDS, NO_PROPOSALS, Drafter, Proposals
from kvforge.worker.drafts.lookup import LookupDrafter
from kvforge.worker.drafts.model import ModelDrafter
from kvforge.worker.loading.model import LoadedModel

from .checks import Rows, StepLimits
from .draft_passes import DraftPasses
from .draft_states import accept_states
from .pending import PendingStep
from .row_ends import row_ends
from .row_sampler import RowSampler
from .step_failures import StateLostError
from .step_results import SampledParts, tokens_of


class StepDrafts:
    """Proposes drafts for the next steps, and advances slots by the accepted ones.

    Args:
        model: The model.
        pool: Its pool.
        limits: The limits of steps; without drafts there is no drafter.
        sampler: Advances slots.
        rows_max: The most rows of a step, drafts included: steps of as many rows look nothing up.

    Attributes:
        drafter: Proposes the drafts; None: nothing does.
        passes: The passes of a draft model or of heads; None: there is none.
    """

    def __init__(
        self, model: LoadedModel, pool: KvPool, limits: StepLimits, sampler: RowSampler, rows_max: int
    ) -> None:
        self._pool, self._sampler, self._rows_max, self._drafts_max = pool, sampler, rows_max, limits.drafts_max
        self.drafter: Drafter | None = None
        self.passes: DraftPasses | None = None
        # Finished steps with slots that are still to be advanced: see `accept`.
        self._unaccepted: list[tuple[SampledParts, PendingStep, frozenset[int]]] = []
        if not limits.drafts_max:
            return
        lookup = LookupDrafter(limits.slots_max, limits.context_tokens_max)
        self.drafter = lookup
        if model.draft is not None:
            self.passes = DraftPasses(model.draft, pool, model.vocab_size, limits.step_tokens_max)
            self.drafter = ModelDrafter(lookup, self.passes)

    @property
    def model_tokens_max(self) -> int:
        """The most tokens that a draft model proposes for a row; 0: there is none."""
        return min(self.passes.tokens_max, self._drafts_max) if self.passes is not None else 0

    def note_rows(self, rows: Rows) -> None:
        """Note which tokens of a step will lack the drafter's K and V, and catch up before prompts that need them."""
        if self._pool.beside is None or self._pool.beside.backlog is None:
            return
        if self.passes is not None and not rows.generated.all() and not self.passes.reads_hidden:
            self.passes.complete(rows.tables, rows.starts)
        self._pool.beside.backlog.write(rows.tables, rows.starts, rows.counts, rows.generated)

    def prepare(self, pending: PendingStep, end: DeviceEvent) -> None:
        """Let the drafter prepare while the device computes a step behind which it may propose. end: of the step."""
        if self.drafter is not None and len(pending.slots) < self._rows_max:
            self.drafter.prepare(pending.slots.tolist(), end.passed)

    def propose(
        self, pending: PendingStep, chosen: dict[int, list[int]], begun: frozenset[int], is_last: bool
    ) -> Proposals:
        """Add the tokens of a finished step to the drafter, and return its proposals for the step's slots.

        Only for a worker with a drafter.

        Args:
            pending: The step.
            chosen: The tokens that it sampled, by slot.
            begun: Slots that later steps have assigned to new requests.
            is_last: Whether no step is in flight behind it: a draft model needs that.
        """
        assert self.drafter is not None
        slots = [slot for slot in chosen if slot not in begun]
        for slot in slots:
            self.drafter.append(slot, chosen[slot])
        if len(pending.slots) >= self._rows_max and not pending.propose:
            return NO_PROPOSALS  # there is no room for drafts
        ends = NO_ENDS
        if pending.propose and self.passes is not None and is_last:
            ends = row_ends(pending, chosen, self._pool.block_size)
        return self.drafter.propose(slots, ends, pending.propose)

    def note_finished(self, read: SampledParts, pending: PendingStep, begun: frozenset[int]) -> None:
        """Note a finished step with drafts for `accept`.

        Args:
            read: Its sampled rows, as `read_results` returns them.
            pending: The step.
            begun: Slots that later steps have assigned to new requests.
        """
        self._unaccepted.append((read, pending, begun))

    def accept(self, refused: dict[int, KvforgeError]) -> None:
        """Advance the slots of finished steps by their accepted drafts, on the device.

        Args:
            refused: Gets the error of each slot that could not be advanced.

        Raises:
            StateLostError: The copies of recurrent states failed.
        """
        for read, pending, begun in self._unaccepted:
            refused |= self._sampler.advance(read, pending, begun)
            if self._pool.states is not None:
                self._accept_states(read, pending, begun)
        self._unaccepted.clear()

    def _accept_states(self, read: SampledParts, pending: PendingStep, begun: frozenset[int]) -> None:
        """Take the recurrent states of a finished step to the last accepted drafts.

        Raises:
            StateLostError: The copies failed.
        """
        try:
            accept_states(self._pool, pending, tokens_of(read, pending), begun)
        except Exception as error:
            raise StateLostError(f"accepting drafts over recurrent states failed: {error}") from error

    def forget(self) -> None:
        """Forget every slot, and the finished steps."""
        self._unaccepted.clear()
        if self.drafter is not None:
            self.drafter.forget()


def refuse_unsettled(rows: Rows, pending: PendingStep, earlier_steps: Iterable[PendingStep]) -> None:
    """Record an error for rows of slots with drafts in flight: how far these advance is not known yet.

    Args:
        rows: The rows of a step.
        pending: The same step; it gets the errors.
        earlier_steps: The steps in flight before it.
    """
    for earlier in earlier_steps:
        if not earlier.drafted:
            continue
        for slot in earlier.drafted.intersection(rows.slots.tolist()) - pending.begun:
            problem = f"slot {slot} has drafts in flight; send its next row after their result"
            pending.errors[slot] = InvalidRequest("slots", problem)
