"""Sampling of a step's rows: queued on the device, by the path of each row's sampling parameters.

Rows of requests with drafts sample ahead (`kvforge.worker.sampling.ahead`): the rows of a request stay together, and
its slot advances by the accepted tokens once the host knows them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Int32Array
from kvforge.worker.device.device import Device, as_worker_error
from kvforge.worker.device.queue import AsyncCopy
from kvforge.worker.sampling.ahead import UNDRAFTED, AheadRows
from kvforge.worker.sampling.sampler import HostRows, SamplingState

from .checks import BoolArray, Rows
from .pending import DeferredRows, PendingStep, Sampled
from .shaping import GrammarMasks


def sampling_rows(rows: Rows) -> tuple[Int32Array, AheadRows | None, BoolArray]:
    """Return what samples in a step, in the order of the logits.

    Returns:
        The slots of the rows that sample, [n] int32, once for each token of a row with drafts; the rows with drafts,
        None for none; and which of the n rows these are, [n] bool.
    """
    samples = rows.samples == 1
    if rows.drafts is None:
        return rows.slots[samples], None, np.zeros(int(samples.sum()), np.bool_)
    each = np.where(rows.drafts > 0, rows.counts, 1)[samples]
    slots = np.repeat(rows.slots[samples], each)
    drafted = np.repeat(rows.drafts[samples] > 0, each)
    if not drafted.any():
        return slots, None, drafted
    counts = rows.counts[rows.drafts > 0]
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = rows.tokens[np.repeat(rows.drafts > 0, rows.counts)]
    return slots, AheadRows(slots[drafted], offsets.astype(np.int32), tokens), drafted


def drafts_before(rows: Rows) -> Int32Array | None:
    """Return how many drafts each token is behind, [sum(counts)] int32; UNDRAFTED in rows without drafts.

    None: no row has drafts.
    """
    if rows.drafts is None:
        return None
    places = np.arange(len(rows.tokens)) - np.repeat(np.cumsum(rows.counts) - rows.counts, rows.counts)
    return np.where(np.repeat(rows.drafts > 0, rows.counts), places, UNDRAFTED).astype(np.int32)


class RowSampler:
    """Queues the sampling of rows, and advances the slots of rows with drafts."""

    def __init__(self, device: Device, state: SamplingState, shaping: GrammarMasks) -> None:
        self._device, self._state, self._shaping = device, state, shaping

    def sample_step(self, logits: torch.Tensor, rows: Rows, pending: PendingStep) -> None:
        """Queue the sampling of the rows of a pass. logits: [n, vocab], as `sampling_rows` orders them."""
        slots, ahead, drafted = sampling_rows(rows)
        if ahead is None:
            if len(slots):
                self.sample(logits, slots, pending)
            return
        if not drafted.all():
            plain = np.flatnonzero(~drafted)
            self.sample(logits[self._device.upload(plain)], slots[plain], pending)
            logits = logits[self._device.upload(np.flatnonzero(drafted))]
        self.sample(logits, ahead.slots, pending, ahead=ahead)

    def sample_others(
        self, logits: torch.Tensor, rows: Rows, places: npt.NDArray[np.int64], pending: PendingStep
    ) -> None:
        """Queue the sampling of the rows that a graph has left.

        Args:
            logits: [n, vocab].
            rows: The rows of the step.
            places: [n] int64, the places of theirs among the step's tokens; all tokens of rows with drafts.
            pending: The step.
        """
        if rows.drafts is None:
            self.sample(logits, rows.slots[places], pending)
            return
        of = np.repeat(np.arange(len(rows)), rows.counts)[places]
        left = np.zeros(len(rows), np.bool_)
        left[of] = True
        self.sample_step(logits, rows.pick(left), pending)

    @torch.inference_mode()
    def sample_deferred(self, waiting: DeferredRows, pending: PendingStep) -> None:
        """Queue the sampling of rows that waited for the tokens before them; their masks are computed now."""
        chosen, masks = self._shaping.masked(waiting, pending)
        if len(chosen.slots):
            self.sample(chosen.logits, chosen.slots, pending, masks, chosen.ahead)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Int32Array,
        pending: PendingStep,
        masks: torch.Tensor | None = None,
        ahead: AheadRows | None = None,
    ) -> None:
        """Queue the sampling of all rows, or of single requests if that fails. Rows with a grammar wait for masks.

        Args:
            logits: [n, vocab].
            slots: [n] on the host.
            pending: The step.
            masks: [n, words] int32 on the device, if all rows have a grammar.
            ahead: The rows, if they sample behind drafts; None: none does.
        """
        device, state, grammars = self._device, self._state, self._shaping.grammars
        if masks is None and grammars:
            shaped = grammars.holds(slots)
            if shaped.any():
                part, rest = np.flatnonzero(shaped), np.flatnonzero(~shaped)
                waiting = logits[device.upload(part)] if len(rest) else logits
                self._shaping.wait(pending, waiting, slots[part], None if ahead is None else ahead.pick(part))
                if len(rest):
                    behind = None if ahead is None else ahead.pick(rest)
                    self.sample(logits[device.upload(rest)], slots[rest], pending, None, behind)
                return
        simple = (state.simple(slots) if masks is None else state.plain(slots)) & state.splits
        if simple.any() and not simple.all():
            for part in (np.flatnonzero(simple), np.flatnonzero(~simple)):
                on_device = device.upload(part)
                some = None if masks is None else masks[on_device]
                behind = None if ahead is None else ahead.pick(part)
                self.sample(logits[on_device], slots[part], pending, some, behind)
            return
        try:
            choose = self._choose_simple if simple.all() else self._choose
            pending.sampled.append(choose(logits, slots, masks, ahead))
        except Exception as error:  # noqa: BLE001 - no memory for a few rows' filters: the others go on
            requests = np.arange(len(slots)) if ahead is None else np.flatnonzero(ahead.offsets == 0)
            if len(requests) == 1 or not device.survives():
                failure = as_worker_error(error, "sampling", device)
                pending.errors.update((slot, failure) for slot in slots.tolist())
                return
            device.release_cached()
            for begin, end in zip(requests.tolist(), [*requests[1:].tolist(), len(slots)], strict=True):
                one = slice(begin, end)
                behind = None if ahead is None else ahead.pick(np.arange(begin, end))
                self.sample(logits[one], slots[one], pending, None if masks is None else masks[one], behind)

    def read(self, sampled: Sampled) -> tuple[Int32Array, HostRows]:
        """Return the slots and rows of a sampled part that count: of each request with drafts the accepted ones."""
        rows = sampled.rows()
        if sampled.ahead is None:
            return sampled.slots, rows
        kept = np.flatnonzero(sampled.ahead.accepted(rows.tokens, rows.finite & ~rows.banned))
        return sampled.slots[kept], rows.pick(kept)

    @torch.inference_mode()
    def advance(
        self, read: list[tuple[Int32Array, HostRows]], pending: PendingStep, begun: frozenset[int]
    ) -> dict[int, KvforgeError]:
        """Advance the slots of rows with drafts by their accepted tokens.

        Args:
            read: What `read` returned for each of `PendingStep.sampled`.
            pending: The step, with its errors.
            begun: Slots that later steps have assigned to new requests.

        Returns:
            The error of each slot that could not be advanced.
        """
        left_out, failed = begun | pending.errors.keys(), dict[int, KvforgeError]()
        for sampled, (slots, rows) in zip(pending.sampled, read, strict=True):
            if sampled.ahead is None:
                continue
            kept = ~np.isin(slots, np.fromiter(left_out, np.int64, len(left_out)))
            if not kept.any():
                continue
            try:
                self._state.advance(slots[kept], rows.tokens[kept])
            except Exception as error:  # noqa: BLE001 - the state of these slots is unknown: their requests fail
                failure = as_worker_error(error, "accepting drafts", self._device)
                failed.update((slot, failure) for slot in slots[kept].tolist())
        return failed

    def _choose(
        self, logits: torch.Tensor, slots: Int32Array, masks: torch.Tensor | None, ahead: AheadRows | None
    ) -> Sampled:
        chosen = self._state.sample(logits, slots, masks, ahead)
        return Sampled(slots, AsyncCopy(self._device, chosen.packed()), chosen.top_counts, ahead=ahead)

    def _choose_simple(
        self, logits: torch.Tensor, slots: Int32Array, masks: torch.Tensor | None, ahead: AheadRows | None
    ) -> Sampled:
        packed = torch.empty(3 * len(slots), dtype=torch.int32, device=self._device.torch_device)
        if ahead is None:
            on_device = self._device.upload(slots.astype(np.int64))
            self._state.sample_simple(logits, on_device, torch.ones_like(on_device), packed, masks)
        else:
            self._state.sample_ahead(logits, ahead, packed, masks)
        return Sampled(slots, AsyncCopy(self._device, packed), np.zeros(len(slots), np.int32), ahead=ahead)
