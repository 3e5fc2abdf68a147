"""How a preempted request came back."""

from __future__ import annotations

import msgspec


class Return(msgspec.Struct, frozen=True):
    """How a preempted request came back, of which the host tier had blocks.

    Attributes:
        found: Blocks that the host tier had, behind those on the device.
        read: How many of these were read; the tokens of the others were computed again.
        copy_us: What reading all takes by the measured cost; -1: not measured.
        compute_us: What computing their tokens takes by the measured cost; -1: not measured.
    """

    found: int
    read: int
    copy_us: int = -1
    compute_us: int = -1

    @property
    def saved_us(self) -> int:
        """The measured time that reading saves: what computing would take, less the copy; 0 if it was not measured."""
        return (
            self.compute_us - self.copy_us if self.read == self.found and min(self.copy_us, self.compute_us) >= 0 else 0
        )
