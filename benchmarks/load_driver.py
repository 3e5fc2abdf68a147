"""Load that one driver process of the load harness carries on one core before it is late itself.

    python -m benchmarks.load_driver [--only NAME ...] [--json benchmarks/results/load_driver.json]

The driver is pinned to one core, with all its threads; a null server, which answers at once or at a given pace, has
another one. Late: the driver's delay in handling a due request or a tick of its own clock (every 5 ms), in
milliseconds, once all streams are open. The CPU share is of the whole run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from kvforge.loadtest.drive.driver_check import null_server
from kvforge.loadtest.drive.engine import TICK_S
from kvforge.loadtest.drive.outcome import FINISHED, INTERRUPTED, DriverStats, Outcome
from kvforge.loadtest.drive.processes import drive
from kvforge.loadtest.drive.spec import HTTP, KVFORGE, RunSpec
from kvforge.protocol.errors import Unavailable

from .report import report

PROMPT_TOKENS = 64
HEADER = ("", "streams", "requests/s", "tokens/s", "late p50", "p99", "p99.9", "max", "cpu")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A load. tokens_per_s: rate of each stream; 0: all at once. warm_s: time until all streams are open."""

    name: str
    kind: str = KVFORGE
    requests_per_s: float
    tokens: int
    tokens_per_s: float = 0.0
    steps: bool = False
    warm_s: float
    measured_s: float = 10.0


SCENARIOS = (
    Scenario(name="zeromq-streams", requests_per_s=200, tokens=100, tokens_per_s=10, warm_s=10.0),
    Scenario(name="zeromq-steps", requests_per_s=200, tokens=100, tokens_per_s=10, steps=True, warm_s=10.0),
    Scenario(name="zeromq-one-token", requests_per_s=5000, tokens=1, warm_s=2.0),
    Scenario(name="http-streams", kind=HTTP, requests_per_s=50, tokens=100, tokens_per_s=10, warm_s=10.0),
    Scenario(name="http-one-token", kind=HTTP, requests_per_s=5000, tokens=1, warm_s=2.0),
    # Requests to a gateway.
    Scenario(name="http-gateway-requests", kind=HTTP, requests_per_s=800, tokens=16, warm_s=2.0),
    Scenario(name="http-gateway-streams", kind=HTTP, requests_per_s=50, tokens=500, tokens_per_s=50, warm_s=10.0),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures after `warm_s`. streams: mean number of open streams. late_ms: p50, p99, p99.9 and the largest."""

    name: str
    streams: int
    requests_per_s: float
    tokens_per_s: float
    late_ms: tuple[float, ...]
    cpu: float
    failed: int


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep processes that the block starts on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def measured(scenario: Scenario, cores: Sequence[int]) -> Row:
    """One scenario, with the driver on the first of two cores."""
    wall_s = scenario.warm_s + scenario.measured_s
    load = {
        "arrivals": f"poisson:{scenario.requests_per_s:g}",
        "duration_s": wall_s,
        "input": str(PROMPT_TOKENS),
        "output": str(scenario.tokens),
    }
    options = ("--steps",) if scenario.steps else ()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    with pinned(cores[1]):
        server = null_server(scenario.kind, scenario.tokens_per_s, *options)
        where = await server.__aenter__()
    try:
        http = {"url": where, "model": "null"} if scenario.kind == HTTP else {}
        spec = RunSpec(load=load, target=scenario.kind, endpoint=where, http=http, timeout_s=2 * wall_s, proof_s=0)

        def began(_: float) -> None:  # the driver runs; this process leaves its core
            os.sched_setaffinity(0, {cores[1]})
            loop.call_later(wall_s + 0.2, stop.set)

        os.sched_setaffinity(0, {cores[0]})
        _, outcomes, (drove,) = await drive(spec, 1, stop, began=began)
    finally:
        os.sched_setaffinity(0, set(cores))
        await server.__aexit__(None, None, None)
    return row(scenario, outcomes, drove)


def row(scenario: Scenario, outcomes: Sequence[Outcome], drove: DriverStats) -> Row:
    """Return the reported figures of a run."""
    begin, end = scenario.warm_s, scenario.warm_s + scenario.measured_s
    due = [outcome for outcome in outcomes if begin <= outcome.due_s < end and outcome.awake_s >= 0]
    late_s = [outcome.awake_s - outcome.due_s for outcome in due]
    late_s += drove.late_s[round(begin / TICK_S) : round(end / TICK_S)]
    tokens = sum(begin <= at < end for outcome in outcomes for at in outcome.tokens_s)
    open_s = sum(
        max(0.0, min(outcome.ended_s, end) - max(outcome.sent_s, begin)) for outcome in outcomes if outcome.sent_s >= 0
    )
    cuts = statistics.quantiles(late_s, n=1000)
    return Row(
        name=scenario.name,
        streams=round(open_s / scenario.measured_s),
        requests_per_s=round(len(due) / scenario.measured_s, 1),
        tokens_per_s=round(tokens / scenario.measured_s, 1),
        late_ms=tuple(round(1000 * at, 3) for at in (cuts[499], cuts[989], cuts[998], max(late_s))),
        cpu=round(drove.cpu_s / drove.wall_s, 3),
        failed=sum(outcome.state not in (FINISHED, INTERRUPTED) for outcome in outcomes),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_driver", description=__doc__)
    names = tuple(scenario.name for scenario in SCENARIOS)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("load_driver: two cores are needed, one for the driver and one for the server", file=sys.stderr)
        return 1
    rows = []
    for scenario in SCENARIOS:
        if scenario.name in options.only:
            try:
                rows.append(asyncio.run(measured(scenario, cores)))
            except Unavailable as missing:
                print(f"{scenario.name}: {missing}", file=sys.stderr)
    shown = [
        (one.name, one.streams, one.requests_per_s, one.tokens_per_s, *one.late_ms, f"{one.cpu:.0%}") for one in rows
    ]
    title = "One driver process on one core, and a null server on another (late: ms)"
    report(title, HEADER, shown, [asdict(one) for one in rows], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
