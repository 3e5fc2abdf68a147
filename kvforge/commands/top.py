"""`kvforge top`: watch the service as a table, one line at a time.

The lines come from the shared tables, without messages. The live page of the gateway shows more: `kvforge up --http`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvforge.client.tables import Tables
from kvforge.protocol import platforms, transport
from kvforge.protocol.errors import CoordinatorUnavailable, InvalidConfiguration
from kvforge.protocol.exits import OK

from . import parsing, printing

EVERY_S, EVERY_S_MIN = 1.0, 0.1
LINES_PER_HEADER = 20
LOOK_S = 0.1
IPC = "ipc://"
COLUMNS = {
    "running": "requests_running",
    "pending": "requests_pending",
    "sequences": "sequences",
    "free": "blocks_free",
    "cached": "blocks_cached",
    "referenced": "blocks_referenced",
    "quarantined": "blocks_quarantined",
    "blocks": "blocks_total",
}
RATES = {"tokens_per_s": "generated_tokens_total", "steps_per_s": "steps_total"}
WIDTHS = [*(max(7, len(title)) for title in COLUMNS), 8, 8, 9]
Rates = Mapping[str, float | None]


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(subparsers, "top", run, "Watch the cache and the requests, one line a second.")
    parser.add_argument(
        "--every",
        type=_every,
        default=EVERY_S,
        metavar="SECONDS",
        help=f"time between lines or refreshes [{EVERY_S:g}]",
    )
    parser.add_argument("--count", type=_count, metavar="N", help="end after N lines")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON document per line")
    output.add_argument("--lines", action="store_true", help=argparse.SUPPRESS)  # until 0.2: a table is all there is


def run(options: argparse.Namespace) -> int:
    """Print lines until there are enough.

    Raises:
        CoordinatorUnavailable: There is no coordinator, or it left and does not return.
    """
    platforms.check_tables()
    folder = _folder(options)
    tables = Tables(folder)
    before: dict[str, int] | None = None
    lines, wait_s = 0, 0.0
    while lines != options.count:
        if tables.ended(wait_s):
            tables = _successor(folder, tables, parsing.reconnect_s(options) if lines else 0.0)
            before = None
        now = tables.gauges()
        rates = _rates(before, now)
        if options.json:
            printing.print_json({"boot": tables.boot, **now, **rates})
        else:
            if lines % LINES_PER_HEADER == 0:
                _print_columns([*COLUMNS, "tokens/s", "steps/s", "up"])
            _print_columns([*(now[name] for name in COLUMNS.values()), *_shown(rates), _clock(now["uptime_us"])])
        sys.stdout.flush()  # show each line at once to the reader of a pipe
        lines, wait_s, before = lines + 1, options.every, now
    return OK


def _successor(folder: Path, ended: Tables, wait_s: float) -> Tables:
    """Return the tables of the coordinator that replaces an ended one. Raises CoordinatorUnavailable."""
    problem = f"the coordinator in {folder} is gone (process {ended.pid})"
    if wait_s:
        printing.print_note(f"kvforge: {problem}; reconnecting")
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        with suppress(CoordinatorUnavailable):  # its file does not exist yet
            if (tables := Tables(folder)).alive:
                return tables
        time.sleep(LOOK_S)
    raise CoordinatorUnavailable(f"{problem}. See its log; `kvforge up` starts it again")


def _folder(options: argparse.Namespace) -> Path:
    """Return the runtime folder of the coordinator that the options or the environment name."""
    if options.endpoint is None and options.runtime_dir is not None:
        return parsing.runtime_dir(options)
    endpoint: str = options.endpoint or transport.default_client_endpoint()
    socket = Path(endpoint.removeprefix(IPC))
    if not endpoint.startswith(IPC) or socket.name != transport.CLIENT_SOCKET:
        problem = f"is {endpoint!r}; the shared tables lie beside the socket ipc://DIR/{transport.CLIENT_SOCKET}"
        raise InvalidConfiguration("endpoint", f"{problem}: name their folder with --runtime-dir")
    return socket.parent.absolute()


def _rates(before: Mapping[str, int] | None, now: Mapping[str, int]) -> Rates:
    """Return the rates per second of the coordinator's clock since the last line; None in the first line.

    The clock stands still while nothing is published; the rate is then 0. A dying worker's pool takes its steps along,
    which must not give a negative rate.
    """
    if before is None:
        return dict.fromkeys(RATES)
    passed_s = (now["uptime_us"] - before["uptime_us"]) / 1e6
    done = {rate: max(0, now[name] - before[name]) for rate, name in RATES.items()}
    return {rate: round(count / passed_s, 3) if passed_s > 0 else 0.0 for rate, count in done.items()}


def _shown(rates: Rates) -> list[str]:
    return ["-" if rate is None else f"{rate:.1f}" for rate in rates.values()]


def _clock(uptime_us: int) -> str:
    minutes, seconds = divmod(uptime_us // 1_000_000, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _print_columns(cells: list[object]) -> None:
    print("  ".join(str(cell).rjust(width) for cell, width in zip(cells, WIDTHS, strict=True)))


def _every(text: str) -> float:
    value = parsing.seconds(text)
    if value < EVERY_S_MIN:
        raise ValueError
    return value


_every.__name__ = f"number of seconds ({EVERY_S_MIN:g} to a day)"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_count.__name__ = "number of lines (at least 1)"
