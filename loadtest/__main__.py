"""`python -m loadtest`: reads the options, runs, prints the tables, writes the document."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvforge.protocol import transport
from kvforge.protocol.errors import InvalidRequest, KvforgeError, NotReady, restore
from kvforge.protocol.exits import FAILED, INTERRUPTED, OK, status_of
from kvforge.protocol.messages import ModelInfo

from . import one_report as report
from .arrivals import PATTERNS, arrival_times
from .driver import FAILED as REQUEST_FAILED
from .driver import FINISHED, TIMED_OUT, Driver, Measured, Plan
from .prompts import Lengths, Prompts

REQUESTS = 500
DAY_S = 86_400.0
CONNECTIONS_MAX = 64
STATUS = """exit status: 0 measured; 1 measured, and requests failed or ran out of time; 2 wrong usage; 3 nobody there;
4 no answer in time; 130 interrupted (what was measured so far is printed). A refused request is not a failed one."""


def parser() -> argparse.ArgumentParser:
    """All options."""
    top = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__, epilog=STATUS)
    add = top.add_argument
    add("--rate", type=float, required=True, metavar="R", help="requests a second, on average")
    add("--requests", type=int, metavar="N", help=f"how many [{REQUESTS}, or what --duration allows]")
    add("--duration", type=_seconds, metavar="S", help="no request arrives later than this")
    add("--input", default="128", metavar="TOKENS", help="prompt length, N or LOW:HIGH [128]")
    add("--output", default="64", metavar="TOKENS", help="tokens to generate, N or LOW:HIGH [64]")
    add("--prefix", type=int, default=0, metavar="TOKENS", help="tokens that all prompts begin with [0]")
    add("--arrivals", choices=PATTERNS, default="poisson", help="gaps: exponential, or all equal [poisson]")
    add("--burst", type=int, default=1, metavar="N", help="so many arrive together, at the same average rate [1]")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals and prompts [0]")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy [0]")
    add("--tenant", default="default", help="whose requests they are [default]")
    add("--vocab", type=int, metavar="N", help="token ids are below this [the model's vocabulary]")
    add("--timeout", type=_seconds, default=600.0, metavar="S", help="from the intended arrival to the end [600]")
    add("--concurrency-max", type=int, default=10_000, metavar="N", help="under way at once; more must wait [10000]")
    add("--connections", type=int, default=1, metavar="N", help=f"1 to {CONNECTIONS_MAX} [1]")
    add("--endpoint", metavar="URL", help="the coordinator, as ipc://PATH or tcp://HOST:PORT [KVFORGE_ENDPOINT]")
    add("--runtime-dir", type=Path, metavar="DIR", help="of the coordinator [KVFORGE_RUNTIME_DIR]")
    add("--json", type=Path, metavar="FILE", help="write the document here")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one load test; returns its exit status."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as ended:  # argparse has printed why, or the help
        return ended.code if isinstance(ended.code, int) else FAILED
    try:
        return asyncio.run(_run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except KvforgeError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return status_of(error)
    except OSError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return FAILED


async def _run(options: argparse.Namespace) -> int:
    _check(options)
    count = options.requests if options.requests or options.duration else REQUESTS
    arrivals = arrival_times(
        options.rate,
        count=count,
        duration_s=options.duration,
        seed=options.seed,
        pattern=options.arrivals,
        burst=options.burst,
    )
    lengths = Lengths.parse(options.input), Lengths.parse(options.output)
    endpoint = options.endpoint
    if endpoint is None and options.runtime_dir is not None:
        endpoint = transport.client_endpoint(options.runtime_dir)
    stop = asyncio.Event()
    async with Driver(endpoint, connections=options.connections, timeout_s=options.timeout) as driver:
        model = driver.health.model if driver.health is not None else None
        prompts = Prompts(
            seed=options.seed,
            vocab=_vocabulary(options.vocab, model),
            input=lengths[0],
            output=lengths[1],
            prefix=options.prefix,
        )
        plan = Plan(
            arrivals=arrivals,
            prompts=prompts,
            tenant=options.tenant,
            temperature=options.temperature,
            timeout_s=options.timeout,
            concurrency_max=options.concurrency_max,
        )
        _stop_on_signals(stop)
        measured = await driver.run(plan, stop)
    _write(options, model, measured)
    return _status(measured)


def _check(options: argparse.Namespace) -> None:
    """Raises InvalidRequest naming the option."""
    if options.concurrency_max < 1:
        raise InvalidRequest("concurrency-max", f"is {options.concurrency_max}; it must be at least 1")
    if not 1 <= options.connections <= CONNECTIONS_MAX:
        raise InvalidRequest("connections", f"is {options.connections}; it must be 1 to {CONNECTIONS_MAX}")
    if options.seed < 0:
        raise InvalidRequest("seed", f"is {options.seed}; it must be 0 or more")
    if options.requests is not None and options.requests < 1:
        raise InvalidRequest("requests", f"is {options.requests}; it must be at least 1")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        # Found out now, not after an hour of measuring.
        raise InvalidRequest("json", f"{options.json} is in a folder that does not exist")


def _vocabulary(asked: int | None, model: ModelInfo | None) -> int:
    if asked is not None:
        return asked
    if model is None:
        raise NotReady("no worker has said which model it serves: give --vocab")
    return model.vocab_size


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first Ctrl-C ends the run and prints what was measured; the next one ends the program."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first)


def _write(options: argparse.Namespace, model: ModelInfo | None, measured: Measured) -> None:
    # Where and how, not what: left out of the description of the workload.
    apart = {"endpoint", "runtime_dir", "json"}
    workload = {name: value for name, value in vars(options).items() if name not in apart}
    document = report.document(workload, model, measured)
    print(report.text(document), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _status(measured: Measured) -> int:
    if measured.interrupted:
        return INTERRUPTED
    bad = [outcome.code for outcome in measured.outcomes if outcome.state in (REQUEST_FAILED, TIMED_OUT)]
    if not bad:
        return OK
    if any(outcome.state == FINISHED for outcome in measured.outcomes):
        return FAILED
    return status_of(restore(bad[-1], "", {}))  # nothing worked at all: say what it was


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= DAY_S:
        raise ValueError
    return value


_seconds.__name__ = "number of seconds (above 0, at most a day)"

if __name__ == "__main__":
    sys.exit(main())
