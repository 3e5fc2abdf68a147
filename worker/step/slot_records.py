"""The state of slots that the host needs without asking the device."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Int32Array

from .pending import PendingStep


class SlotRecords:
    """Records, for each slot, what its last steps did.

    Args:
        slots_max: Slots are [0, slots_max).

    Attributes:
        has_sampled: [slots] bool, slots with a last sampled token on the device.
        sampled_in: [slots] int64, number of the step that sampled last.
        prompt_tops: [slots] int32, top tokens that a slot wants for each prompt token.
        refused: Errors of slots with an invalid start or state, until a valid start comes.
    """

    def __init__(self, slots_max: int) -> None:
        self.has_sampled = np.zeros(slots_max, np.bool_)
        self.sampled_in = np.zeros(slots_max, np.int64)
        self.prompt_tops = np.zeros(slots_max, np.int32)
        self.refused: dict[int, KvforgeError] = {}

    def begin(self, slot: int, prompt_tops: int) -> None:
        """Assign a slot to a new request that wants so many top tokens for each prompt token."""
        self.refused.pop(slot, None)
        self.prompt_tops[slot] = prompt_tops
        self.has_sampled[slot] = False

    def note_sampled(self, slots: Int32Array, number: int) -> None:
        """Record that the step with this number samples tokens of slots: [n] int32."""
        self.has_sampled[slots] = True
        self.sampled_in[slots] = number

    def withdraw_failed(self, pending: PendingStep) -> None:
        """Withdraw the tokens of a step's failed rows, of slots that no later step has sampled for."""
        for slot in pending.errors:
            if 0 <= slot < len(self.has_sampled) and self.sampled_in[slot] == pending.number:
                self.has_sampled[slot] = False

    def forget(self) -> None:
        """Forget every slot: another coordinator begins each before it uses it."""
        self.has_sampled[:] = False
        self.refused.clear()
