"""`kvforge loadtest`: one run or a sweep, the table on the terminal, the report in a folder."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any

from kvforge.loadtest.chaos import plan
from kvforge.loadtest.drive import outcome as ends
from kvforge.loadtest.drive.progress import Progress as Counts
from kvforge.loadtest.measure.objective import Objective
from kvforge.loadtest.report import compare as comparing
from kvforge.loadtest.report import result, terminal
from kvforge.loadtest.report import sweep as sweeping
from kvforge.loadtest.report.folder import write
from kvforge.loadtest.report.progress import Progress
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import FAILED, INTERRUPTED, OK, status_of

from . import options as command_line
from .places import ServerUnderTest, place
from .run import FinishedRun, run
from .spec import sweep, swept

BAD = (ends.REFUSED, ends.FAILED, ends.TIMED_OUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load test and return the exit status."""
    try:
        options = command_line.parse(argv)
        return asyncio.run(_all(options))
    except SystemExit as ended:  # argparse has printed the error or the help
        return ended.code if isinstance(ended.code, int) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except KvforgeError as error:
        print(f"kvforge loadtest: {' '.join(str(error).split())}", file=sys.stderr)
        return status_of(error)
    except OSError as error:
        print(f"kvforge loadtest: {error}", file=sys.stderr)
        return FAILED


async def _all(options: argparse.Namespace) -> int:
    # Validate everything before the run, not after an hour of measuring.
    if options.slo is not None:
        Objective.parse(options.slo)
    plan.parse(options.kill)
    earlier = result.read(options.compare) if options.compare is not None else None
    values = sweep(options) if options.sweep is not None else None
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    stop = asyncio.Event()
    _stop_on_signals(stop)
    async with place(options) as there:
        if values is not None:
            return await _sweep(options, *values, there, stop, earlier)
        ran = await _shown(options, there, stop)
    print(terminal.text(ran.document), flush=True)
    compared = _compared(earlier, ran.document)
    if options.out is not None:
        write(options.out, ran.document, ran.measured, compare=compared)
        print(f"\nthe report: {options.out / 'index.html'}")
    return ran.status


async def _sweep(
    options: argparse.Namespace,
    attribute: str,
    values: Sequence[float],
    there: ServerUnderTest,
    stop: asyncio.Event,
    earlier: dict[str, Any] | None,
) -> int:
    """Run once for each value, each with a folder of its own.

    The highest value that meets the objective represents the sweep.
    """
    option = attribute.replace("_", "-")
    runs: list[tuple[float, FinishedRun]] = []
    for value in values:
        ran = await _shown(swept(options, attribute, value), there, stop)
        runs.append((value, ran))
        print(f"{option} {value:g}: {terminal.verdict_line(ran.document)}", flush=True)
        if options.out is not None:
            write(options.out / f"{option}-{value:g}", ran.document, ran.measured)
        if stop.is_set():
            break
    found = sweeping.sweep(option, [(value, ran.document) for value, ran in runs])
    chosen = next((ran for value, ran in runs if value == found["knee"]["value"]), runs[0][1])
    print(f"\n{sweeping.text(found)}", flush=True)
    compared = _compared(earlier, chosen.document)
    if options.out is not None:
        write(options.out, chosen.document, chosen.measured, compare=compared, sweep=found)
        print(f"\nthe report: {options.out / 'index.html'}")
    if stop.is_set():
        return INTERRUPTED
    # Requests beyond the knee are expected to time out.
    return OK if all(ran.document["verdict"]["valid"] for _, ran in runs) else FAILED


def _compared(earlier: dict[str, Any] | None, document: dict[str, Any]) -> dict[str, Any] | None:
    if earlier is None:
        return None
    compared = comparing.compare(earlier, document)
    print(f"\n{comparing.text(compared)}", flush=True)
    return compared


async def _shown(options: argparse.Namespace, there: ServerUnderTest, stop: asyncio.Event) -> FinishedRun:
    """Run once and show the progress on standard error, from the start of the load."""
    line, start = Progress(options.requests, quiet=options.quiet), monotonic()

    def began(at: float) -> None:
        nonlocal start
        start = at

    def watch(counts: Counts) -> None:
        line.show(
            max(0.0, monotonic() - start),
            sent=counts.due,
            running=counts.under_way,
            finished=counts.ends.get(ends.FINISHED, 0),
            bad=sum(counts.ends.get(end, 0) for end in BAD),
            tokens=counts.output_tokens,
        )

    try:
        return await run(options, there, stop, watch, began)
    finally:
        line.done()


def _stop_on_signals(stop: asyncio.Event) -> None:
    """Let the first Ctrl-C end the run and report what was measured; the next one ends the program."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first)
