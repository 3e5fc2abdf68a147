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
