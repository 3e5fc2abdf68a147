"""The effect of the faults on a run, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .durability import DurabilityCheck
from .kill import KillRecord


def fault_effects(strikes: Sequence[KillRecord], promise: DurabilityCheck) -> dict[str, Any]:
    """Return `chaos` of `measure.document`: {kept, sentences, faults (the number of kills), kills, promise}."""
    return {
        "kept": promise.kept,
        "sentences": [*promise.sentences(), *(strike.sentence() for strike in strikes)],
        "faults": sum(strike.pid > 0 for strike in strikes),
        "kills": [strike.json() for strike in strikes],
        "promise": promise.json(),
    }
