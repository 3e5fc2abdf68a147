"""Pytest plugin: the CPU seconds of each test, children included. `python -m pytest -p tests.cpu_seconds`.

User and system time of the test's process and its descendants, fixtures included. A shared fixture counts for the first
test that uses it. Processes that leave the tree (Ray's, a private systemd's) are missing. Linux only: /proc is read.
KVFORGE_CPU_SECONDS names the file, JSON: `tests` maps node ids to seconds, `collection` is the time of imports and
collection in all processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = "KVFORGE_CPU_SECONDS"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
TESTS, COLLECTION = "cpu_seconds_of_tests", "cpu_seconds_of_collection"


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, those that run and those that were waited for."""
    return sum(os.times()[:4]) + sum(map(_seconds_of, _children("self")))


def _seconds_of(pid: str) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_PER_SECOND + sum(map(_seconds_of, _children(pid)))


def _children(pid: str) -> list[str]:
    try:
        return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    except OSError:
        return []


class CpuSeconds:
    """Measures the tests of its process, and gathers those of xdist's workers."""

    def __init__(self) -> None:
        self._tests: dict[str, float] = {}
        self._collection = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Measure what came before the tests: the difference to the tests at the end would miss unwaited children."""
        self._collection = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test with its fixtures."""
        before = cpu_seconds()
        answer = yield
        self._tests[item.nodeid] = self._tests.get(item.nodeid, 0.0) + cpu_seconds() - before
        return answer

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the numbers to xdist's controller, or write the file."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[TESTS], output[COLLECTION] = self._tests, self._collection
        elif name := os.environ.get(FILE):
            found = {"tests": {test: round(seconds, 2) for test, seconds in sorted(self._tests.items())}}
            Path(name).write_text(json.dumps({**found, "collection": round(self._collection, 1)}, indent=1) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take a worker's numbers."""
        output = getattr(node, "workeroutput", {})
        self._tests.update(output.get(TESTS, {}))
        self._collection += output.get(COLLECTION, 0.0)


def pytest_configure(config: pytest.Config) -> None:
    """Install the measuring."""
    config.pluginmanager.register(CpuSeconds(), "kvforge-cpu-seconds")
