"""One run: drives the load, asks the coordinator about the slowest requests and builds the document."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvforge import Stats
from kvforge.loadtest.chaos import plan
from kvforge.loadtest.chaos.durability import check
from kvforge.loadtest.chaos.fault_effects import fault_effects
from kvforge.loadtest.chaos.kill import Killer
from kvforge.loadtest.drive import outcome as ends
from kvforge.loadtest.drive.outcome import RunResult
from kvforge.loadtest.drive.processes import Watch
from kvforge.loadtest.drive.run import measure
from kvforge.loadtest.drive.spec import RunSpec
from kvforge.loadtest.load.build import Load
from kvforge.loadtest.measure.document import Context, document
from kvforge.loadtest.measure.objective import Objective
from kvforge.loadtest.measure.tail import slowest
from kvforge.protocol.errors import restore
from kvforge.protocol.exits import FAILED, INTERRUPTED, OK, status_of

from . import spec as specs
from .infinite import infinite
from .places import ServerUnderTest

BLOCK_SIZE = 16
Began = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """The measurements of a run and its document."""

    measured: RunResult
    document: dict[str, Any]

    @property
    def status(self) -> int:
        """The exit status of the command."""
        if self.measured.interrupted:
            return INTERRUPTED
        outcomes = self.measured.outcomes
        bad = [outcome for outcome in outcomes if outcome.state in (ends.FAILED, ends.TIMED_OUT)]
        if bad and not any(outcome.state == ends.FINISHED for outcome in outcomes):
            return status_of(restore(bad[-1].code, "", {}))  # nothing worked at all: report the cause
        chaos = self.document["chaos"]
        whole = self.document["verdict"]["valid"] and not bad and (chaos is None or chaos["kept"])
        return OK if whole else FAILED


async def run(
    options: argparse.Namespace, place: ServerUnderTest, stop: asyncio.Event, watch: Watch | None, began: Began
) -> FinishedRun:
    """Run the load.

    Args:
        options: The options.
        place: The server under test.
        stop: Set to end the run early.
        watch: Called with the progress.
        began: Called when the load begins, with its time.monotonic.

    Raises:
        KvforgeError: An option is invalid, the server is unavailable, or a driver failed.
    """
    objective = Objective.parse(options.slo) if options.slo is not None else Objective()
    spec = specs.run_spec(options, place)
    workload = spec.workload()
    if options.kill:
        measured, chaos = await _disturbed(options, spec, place, stop, watch, began, workload)
    else:
        measured, chaos = await measure(spec, stop, watch, began=began), None
    context = Context(
        options=specs.described(options),
        seed=options.seed,
        objective=objective,
        warmup_s=options.warmup,
        windows=options.windows,
        model=place.model or None,
        infinite=infinite(workload, measured.outcomes, _block_size(measured.before)),
        tail=await _tail(place, measured),
        chaos=chaos,
        notes=list(_notes(options, workload, measured)),
    )
    return FinishedRun(measured=measured, document=document(measured, context))


async def _disturbed(
    options: argparse.Namespace,
    spec: RunSpec,
    place: ServerUnderTest,
    stop: asyncio.Event,
    watch: Watch | None,
    began: Began,
    workload: Load,
) -> tuple[RunResult, dict[str, Any]]:
    """Run the load with kills, then check the promise."""
    async with Killer(place.endpoint, plan.parse(options.kill)) as killer:

        def both(start: float) -> None:
            began(start)
            killer.begin(start)

        measured = await measure(spec, stop, watch, began=both)
        strikes = await killer.end()
    draw = spec.plan(0, 1, len(workload)).draw
    async with place.client() as client:
        temperature = spec.temperature
        promise = await check(measured.outcomes, workload, client, draw=draw, temperature=temperature, stop=stop)
    return measured, fault_effects(strikes, promise)


async def _tail(place: ServerUnderTest, measured: RunResult) -> list[dict[str, Any]]:
    """Return the slowest requests with the coordinator's explanations, as far as it answers."""
    async with place.client() as client:
        return await slowest(client, measured.outcomes)


def _notes(options: argparse.Namespace, workload: Load, measured: RunResult) -> Iterator[str]:
    """Yield how the load differs from what the options ask for."""
    if workload.shortened:
        yield (
            f"{workload.shortened} of the load's {workload.requests} requests were shortened to fit the model's "
            "context (or --context-max): use --length-scale to scale all requests alike"
        )
    if stood_in := sum(outcome.stood_in for outcome in measured.outcomes):
        yield (
            f"the server returned text without token ids: later prompts repeat {stood_in} answers as other tokens of "
            "the same number; pass --tokenizer to repeat them exactly"
        )
    arrivals = workload.arrivals
    if options.trace and options.duration and arrivals is not None and arrivals[-1] < 0.9 * options.duration:
        yield f"the trace's last arrival is at {arrivals[-1]:.0f} s: the rest of the run had none"


def _block_size(stats: Stats | None) -> int:
    """Return the coordinator's block size, or the usual one if the server does not report it."""
    sizes = {pool.block_size for pool in stats.pools} if stats is not None else set()
    return min(sizes, default=BLOCK_SIZE)
