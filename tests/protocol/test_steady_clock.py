"""The clock that skips the process's own suspensions, and its use in all comparisons of times."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.protocol.steady_clock import COUNTED_S, STANDSTILL_S, WAIT_S_MAX, SteadyClock

ROOT = Path(__file__).parents[2]
SECOND = 1_000_000_000
# Files that read the plain clock, with the reason why it decides about no peer, lease or deadline.
PLAIN = {
    "coordinator/journal/state_folder.py": "measures snapshots",
    "coordinator/journal/log.py": "spaces out a line of the log",
    "coordinator/journal/recovery.py": "measures recovery",
    "coordinator/server.py": "measures spinning; feeds systemd's watchdog, which counts by this clock",
    "gateway/http/stream.py": "measures the silence that a client sees, which a standstill is a part of",
    "gateway/serve/main.py": "feeds systemd's watchdog, which counts by this clock",
    "gateway/serve/process.py": "feeds systemd's watchdog, which counts by this clock",
    "kvforge/client/reconnector.py": "measures how long a connection lasted, between calls too",
    "kvforge/client/link.py": "stamps received messages; limits the input of one pump",
    "protocol/log_output.py": "spaces out lines of the log",
    "protocol/service_metrics.py": "stamps written data for readers in other processes",
    "protocol/steady_clock.py": "is the steady clock",
    "protocol/steady_timeout.py": "is the timeout on the steady clock",
    "worker/step/draft_passes.py": "measures passes of a draft model",
    "worker/step/graphs.py": "bounds work of its own",
    "worker/step/prompt_graphs.py": "bounds work of its own",
    "worker/step/engine.py": "measures loading",
    "worker/step/connection.py": "measures watching of shared memory",
    "worker/step/loop.py": "measures steps; feeds systemd's watchdog, which counts by this clock",
    "worker/step/meter.py": "measures steps",
    "worker/step/poll_backoff.py": "measures steps",
    "worker/step/runner.py": "measures steps",
}
# Files that read the wall clock for a date shown to users or other programs.
WALL = {
    "coordinator/host/downtime.py",
    "coordinator/machine_store.py",
}
PLAIN_CLOCKS = {"monotonic", "monotonic_ns", "time", "time_ns", "perf_counter", "perf_counter_ns"}
CLOCKS_OF = {
    "time": PLAIN_CLOCKS,
    "loop": {"time"},
    "asyncio": {"timeout", "timeout_at", "wait_for"},  # they measure with the loop's clock
}
# Files that judge peers by their last message.
ROOMS = (
    "coordinator",
    "gateway/http",
    "gateway/replicas",
    "gateway/serve",
    "gateway/text",
    "kvforge/client",
    "kvforge/launch",
    "protocol",
    "worker/step",
)


class Hand:
    """A plain clock in nanoseconds, moved by the test."""

    def __init__(self) -> None:
        self.now_ns = 7 * SECOND

    def read(self) -> int:
        return self.now_ns


@pytest.mark.parametrize("stood_s", [STANDSTILL_S + 0.1, 60.0, 86_400.0])
def test_a_standstill_counts_next_to_nothing_and_waits_count_in_full(stood_s: float) -> None:
    hand = Hand()
    clock = SteadyClock(hand.read)
    began_ns = clock.now_ns()
    for _ in range(5):
        hand.now_ns += int(WAIT_S_MAX * SECOND)
        clock.now_ns()
    assert clock.now_ns() - began_ns == 5 * SECOND
    hand.now_ns += int(stood_s * SECOND)
    assert clock.now_ns() - began_ns == (5 + COUNTED_S) * SECOND
    assert clock.left_out_ns() == int(stood_s * SECOND) - int(COUNTED_S * SECOND)


def test_time_goes_on_however_often_it_stands_still() -> None:
    hand = Hand()
    clock = SteadyClock(hand.read)
    readings = []
    for _ in range(100):
        hand.now_ns += 10 * SECOND
        readings.append(clock.now_ns())
    assert all(later > earlier for earlier, later in itertools.pairwise(readings))


def _files() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def _reads_plain_clock(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "time" and PLAIN_CLOCKS & {a.name for a in node.names}:
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in CLOCKS_OF.get(node.value.id, ()):
                return True
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and node.attr == "time":
            return True  # get_running_loop().time()
    return False


def test_whatever_compares_times_uses_the_steady_clock() -> None:
    """A new comparison with the plain clock would count the process's own suspension against its peers."""
    found = {path.relative_to(ROOT).as_posix() for path in _files() if _reads_plain_clock(path)}
    assert sorted(found - PLAIN.keys() - WALL) == []
    assert sorted(PLAIN.keys() - found) == [], "these read it no longer"
