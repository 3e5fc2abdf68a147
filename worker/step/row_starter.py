"""Assignment of slots to new requests."""

from __future__ import annotations

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import RowStart
from kvforge.worker.device.device import Device, as_worker_error
from kvforge.worker.drafts.drafter import Drafter
from kvforge.worker.sampling.sampler import SamplingState

from .checks import StepLimits
from .row_start_checks import Histories, problem_of
from .shaping import GrammarMasks
from .slot_records import SlotRecords


class RowStarter:
    """Assigns slots to new requests, in each part that has state of slots.

    Args:
        device: The device of the model.
        limits: The limits of steps.
        state: Sampling state of slots.
        shaping: Grammars of slots.
        records: The host's records of slots.
        drafter: Proposes tokens of slots; None: there is none.
    """

    def __init__(
        self,
        device: Device,
        limits: StepLimits,
        state: SamplingState,
        shaping: GrammarMasks,
        records: SlotRecords,
        drafter: Drafter | None,
    ) -> None:
        self._device, self._limits, self._state, self._shaping = device, limits, state, shaping
        self._records, self._drafter = records, drafter

    def begin(self, begins: tuple[RowStart, ...], histories: Histories | None, errors: dict[int, KvforgeError]) -> None:
        """Assign the slots that a step begins. A start that fails has its slot refused until a valid one comes.

        Args:
            begins: The starts.
            histories: The tokens of each that penalties count, as `split_history` returns them.
            errors: Gets the error of each start that fails, by slot.

        Raises:
            Exception: The starts could not be sent to the device; all their slots are refused.
        """
        assert histories is not None, "a malformed step begins nothing"
        limits, records = self._limits, self._records
        for start, history in zip(begins, histories, strict=True):
            problem: KvforgeError | None = problem_of(start, history, limits.slots_max, limits.vocab_size)
            if problem is None:
                try:
                    self._state.begin(start, *history)
                    self._shaping.begin(start, history[1])
                except Exception as error:  # noqa: BLE001 - no memory for its penalties: the other rows go on
                    problem = as_worker_error(error, "starting a row", self._device)
            if problem is not None:
                errors[start.slot] = records.refused[start.slot] = problem
            else:
                records.begin(start.slot, min(start.sampling.prompt_logprobs or 0, limits.vocab_size))
                if self._drafter is not None:
                    most = min(start.drafts, limits.drafts_max)
                    self._drafter.begin(start.slot, *history, most, start.shared_drafts)
        try:
            self._state.upload_starts()
        except Exception as error:
            records.refused |= {start.slot: as_worker_error(error, "starting a row", self._device) for start in begins}
            raise
