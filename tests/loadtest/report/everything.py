"""A report with all of its parts, of three short runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvforge.loadtest.measure.document import document
from kvforge.loadtest.measure.objective import Objective
from kvforge.loadtest.report import sweep as sweeping
from kvforge.loadtest.report.compare import compare
from kvforge.loadtest.report.folder import write
from tests.loadtest.synthetic import context, run

PICTURES = ("throughput", "latency", "distributions", "occupancy", "slowest", "breakdown", "sweep")


def write_everything(folder: Path) -> dict[str, Any]:
    """A report with all of its parts, of short runs."""
    objective = Objective.parse("ttft=300ms,itl=60ms")
    made = []
    for rate in (4.0, 16.0, 29.0):
        measured = run(rate=rate, duration_s=8, seed=int(rate))
        made.append((rate, measured, document(measured, context(measured, objective=objective))))
    rate, measured, found = made[1]
    swept = sweeping.sweep("rate", [(rate, each) for rate, _, each in made])
    write(folder, found, measured, compare=compare(made[0][2], found), sweep=swept)
    return found
