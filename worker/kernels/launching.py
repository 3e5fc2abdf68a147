"""How the kernels of this package are launched: the first argument of their launching functions.

`fused.FusedOperations` has these properties, so a launching function with the other arguments of an operation is its
method as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvforge.worker.device.target import Target


class Launching(Protocol):
    """Properties that a launch depends on, beyond the arguments of its operation."""

    @property
    def target(self) -> Target:
        """The architecture."""

    @property
    def overlap(self) -> bool:
        """Whether kernels may start before the previous one has ended: see `kvforge.worker.device.overlap`."""


@dataclass(frozen=True)
class LaunchSettings:
    """Properties of launches without `FusedOperations`: in checks, tests, benchmarks and ahead-of-time compilation."""

    target: Target
    overlap: bool = False
