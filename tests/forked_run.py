"""Pytest plugin: one process collects the tests and its forks run them. `-p tests.forked_run --processes 3`.

Each process of xdist imports torch and collects all tests, and sends three reports of each test. Here the imports and
the collection are shared, and only reports that say something are sent. Each fork begins with an equal part of the
tests. When it has no more, it takes the second half of the longest part that remains. In a run of all tests the forks
share the imports of their fork servers too. `--beside COMMAND` runs a check at the same time: if it fails, the tests
end.

A fork looks like a worker of xdist to plugins and fixtures: `config.workerinput`, PYTEST_XDIST_WORKER, a folder of its
own for `tmp_path`. Linux only, and not where tests use a GPU: a driver that was asked before a fork fails after it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from mmap import mmap
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tools.cluster.fork_server import SharedForkServers, die_with_parent
from tools.cluster.leaving import leave

SHORT_S = 0.005  # of set-up and teardown: what `--durations` leaves out too
LOOK_S = 1.0  # between two looks for a process whose pipe a child of its own keeps open
END_S = 60.0  # for the teardown of interrupted tests
NONE = -1
CHECK = "kvforge-check-beside"
Message = tuple[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--processes` and `--beside`."""
    group = parser.getgroup("forked run")
    group.addoption("--processes", type=int, default=1, help="the processes that run tests")
    group.addoption("--beside", metavar="COMMAND", help="a check that runs beside the tests: if it fails, they end")


def pytest_configure(config: pytest.Config) -> None:
    """Replace pytest's loop over the tests."""
    count = config.getoption("processes")
    if count > 1 and not config.getoption("collectonly"):
        if config.getoption("usepdb"):
            raise pytest.UsageError("--pdb needs --processes 1")
        config.pluginmanager.register(ForkedRun(config, count), "kvforge-forked-run")
    if command := config.getoption("beside"):
        config.pluginmanager.register(CheckBeside(shlex.split(command)), CHECK)


class Shares:
    """The tests that each process has yet to run, in memory that all share. Tests are numbers.

    Args:
        bounds: the first test of each process, and the number of all tests.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        rows = [(begin, end, NONE, NONE) for begin, end in pairwise(bounds)]
        values = array("q", [value for row in rows for value in row])
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._file.truncate(values.itemsize * len(values))
        self._bytes = mmap(self._file.fileno(), 0)
        self._memory = memoryview(self._bytes).cast("q")
        self._memory[:] = values
        self._processes = range(len(rows))

    def close(self) -> None:
        """Free the memory."""
        self._memory.release()
        self._bytes.close()
        self._file.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep the other processes out. The kernel unlocks for a process that dies."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _left(self, process: int) -> int:
        return self._memory[4 * process + 1] - self._memory[4 * process]

    def advance(self, process: int) -> tuple[int, int]:
        """Take the next test of a process.

        Returns:
            The test to run now and the one after it, which no other process can take any more. NONE: there is none.
        """
        row = 4 * process
        with self._locked():
            current = self._memory[row + 3]
            if current == NONE:
                current = self._take(process)
            following = self._take(process)
            self._memory[row + 2], self._memory[row + 3] = current, following
        return current, following

    def _take(self, process: int) -> int:
        row = 4 * process
        if not self._left(process):
            other = max(self._processes, key=self._left)
            if not self._left(other):
                return NONE
            end = self._memory[4 * other + 1]
            middle = end - (self._left(other) + 1) // 2
            self._memory[4 * other + 1] = middle
            self._memory[row], self._memory[row + 1] = middle, end
        self._memory[row] += 1
        return self._memory[row] - 1

    def current(self, process: int) -> int:
        """Return the test that a process runs, or NONE."""
        return self._memory[4 * process + 2]

    def stop(self) -> None:
        """Leave no tests to any process but those that it has taken."""
        with self._locked():
            for process in self._processes:
                self._memory[4 * process] = self._memory[4 * process + 1]
                self._memory[4 * process + 3] = NONE


class ForkedRun:
    """Forks, and reports what the forks send."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self._config = config
        self._count = count
        self._pids: dict[Connection, int] = {}  # by the pipe that a process writes into
        self._names: dict[Connection, int] = {}
        self._nodes: dict[Connection, Any] = {}  # what pytest prints of a process of xdist
        self._servers: SharedForkServers | None = None
        terminal: Any = config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.showfspath = False  # the reports of several files mix

    @pytest.hookimpl
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests."""
        count = min(self._count, len(session.items))
        if count < 2 or session.testsfailed:
            return None
        shares = Shares([place * len(session.items) // count for place in range(count + 1)])
        folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if not self._config.getoption("file_or_dir") and not self._config.getoption("keyword"):
            # A run of all tests needs them. Before the collection they would compile the same modules as it does.
            self._servers = SharedForkServers()
        try:
            for process in range(count):
                self._fork(session, shares, process, folder)
            while self._pids:
                self._receive(session, shares, folder)
                check: CheckBeside | None = self._config.pluginmanager.getplugin(CHECK)
                if check is not None and check.has_failed():
                    session.shouldfail = check.problem
                if session.shouldfail or session.shouldstop:
                    shares.stop()
        finally:
            shares.stop()
            self._end()
            shares.close()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        """End the fork servers."""
        if self._servers is not None:
            self._servers.close()

    def _fork(self, session: pytest.Session, shares: Shares, process: int, folder: Path) -> None:
        reading, writing = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            reading.close()
            _become(session, shares, process, self._count, folder, writing)
        writing.close()
        self._pids[reading], self._names[reading] = pid, process
        name = f"gw{process}"
        about = {
            "id": name,
            "sysplatform": sys.platform,
            "version_info": sys.version_info,
            "executable": sys.executable,
        }
        self._nodes[reading] = SimpleNamespace(gateway=SimpleNamespace(id=name), workerinfo=about)

    def _receive(self, session: pytest.Session, shares: Shares, folder: Path) -> None:
        ready = wait([*self._pids], LOOK_S)
        for pipe in [*self._pids]:
            if pipe in ready:
                try:
                    messages: list[Message] | None = pipe.recv()
                except EOFError:
                    messages = None
                if messages is None:
                    self._died(session, shares, folder, pipe, os.waitpid(self._pids[pipe], 0)[1])
                    continue
                for name, value in messages:
                    self._handle(session, pipe, name, value)
            elif not pipe.poll() and (ended := os.waitpid(self._pids[pipe], os.WNOHANG))[0]:
                self._died(session, shares, folder, pipe, ended[1])

    def _handle(self, session: pytest.Session, pipe: Connection, name: str, value: Any) -> None:
        hook = self._config.hook
        if name == "passed":
            number, when, duration = value
            self._report(pipe, _report_of(session.items[number], "passed", None, when, duration))
        elif name == "report":
            self._report(pipe, hook.pytest_report_from_serializable(config=self._config, data=value))
        elif name == "warning":
            warning, when, nodeid, location = value
            found = warnings.WarningMessage(*warning)
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": found, "when": when, "nodeid": nodeid, "location": location}
            )
        elif name == "finished":
            os.waitpid(self._pids.pop(pipe), 0)
            pipe.close()
            if hasattr(hook, "pytest_testnodedown"):
                hook.pytest_testnodedown(node=SimpleNamespace(workeroutput=value), error=None)
        else:
            raise AssertionError(f"process {self._names[pipe]} failed:\n{value}")

    def _report(self, pipe: Connection, report: pytest.TestReport) -> None:
        report.node = self._nodes[pipe]
        self._config.hook.pytest_runtest_logreport(report=report)

    def _died(self, session: pytest.Session, shares: Shares, folder: Path, pipe: Connection, status: int) -> None:
        """Report the test that a process ran when it died, and let another process run the rest."""
        del self._pids[pipe]
        pipe.close()
        process = self._names[pipe]
        ended = f"process {process} of the tests ended with status {os.waitstatus_to_exitcode(status)}"
        if (current := shares.current(process)) == NONE:
            raise AssertionError(ended)
        item = session.items[current]
        text = f"{ended} while it ran {item.nodeid}"
        self._report(pipe, _report_of(item, "failed", text, "???"))
        self._fork(session, shares, process, folder)

    def _end(self) -> None:
        """Interrupt the processes that still run, after an error of ours or Ctrl-C, and wait for them."""
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        for pipe, pid in self._pids.items():
            with suppress(EOFError, OSError):
                while pipe.poll(END_S):
                    pipe.recv()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids.clear()


class CheckBeside:
    """A command that runs beside the tests.

    Attributes:
        problem: what to report when it fails.
    """

    def __init__(self, command: list[str]) -> None:
        self.problem = f"this check failed: {shlex.join(command)}"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `pytest_unconfigure` closes it
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output)

    def has_failed(self) -> bool:
        """Return whether it has ended with another status than 0."""
        return bool(self._process.poll())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Wait for its end. A check that failed fails the run."""
        if hasattr(session.config, "workerinput"):
            return
        if session.exitstatus == pytest.ExitCode.INTERRUPTED:
            self._process.kill()
        if self._process.wait() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what a check that failed has printed."""
        if self.has_failed():
            self._output.seek(0)
            terminalreporter.section(self.problem, red=True)
            terminalreporter.write(self._output.read().decode(errors="replace"))

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        """Close the file of the output."""
        self._process.kill()
        self._process.wait()
        self._output.close()


def _report_of(
    item: pytest.Item, outcome: Any, text: str | None, when: Any, duration: float = 0.0
) -> pytest.TestReport:
    where: Any = item.location
    return pytest.TestReport(item.nodeid, where, {}, outcome, text, when, duration=duration)


class Sender:
    """Sends what happens in a fork, once for each test."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.test = NONE
        self._config = config
        self._pipe = pipe
        self._messages: list[Message] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report: of a passed test its time, of a passed set-up nothing."""
        if type(report) is not pytest.TestReport or not report.passed or report.sections or hasattr(report, "wasxfail"):
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            self._messages.append(("report", data))
        elif report.when == "call" or report.duration >= SHORT_S or report.user_properties:
            self._messages.append(("passed", (self.test, report.when, report.duration)))

    @pytest.hookimpl
    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Send a warning, with its message as a string: not every warning can be pickled."""
        if self.test == NONE:
            return  # one that the parent has: this hook repeats its calls for a new plugin
        found = warning_message
        warning = (str(found.message), found.category, found.filename, found.lineno)
        self._messages.append(("warning", (warning, when, nodeid, location)))

    def send(self, *messages: Message) -> None:
        """Send these messages after all that wait."""
        self._pipe.send([*self._messages, *messages])
        self._messages.clear()


def _become(
    session: pytest.Session, shares: Shares, process: int, count: int, folder: Path, pipe: Connection
) -> NoReturn:
    """Run this process's tests and end it."""
    _forget_parent()
    sender = Sender(session.config, pipe)
    status = pytest.ExitCode.OK
    try:
        _look_like_a_worker(session.config, sender, process, count, folder)
        _run(session, shares, process, sender)
        last = ("finished", session.config.workeroutput)  # type: ignore[attr-defined]
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        # Ctrl-C in a shell reaches all processes, and the parent sends one more.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = pytest.ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else pytest.ExitCode.INTERNAL_ERROR
        last = ("failed", traceback.format_exc())
    try:
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=status)
    except BaseException:  # noqa: BLE001 - the parent raises it
        last = ("failed", traceback.format_exc())
    with suppress(OSError):  # the parent has died
        sender.send(last)
    leave(status)


def _forget_parent() -> None:
    """Leave to the parent what it does at its end, and end with it."""
    die_with_parent(signal.SIGINT)
    atexit._clear()
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _look_like_a_worker(config: Any, sender: Sender, process: int, count: int, folder: Path) -> None:
    name = f"gw{process}"
    os.environ["PYTEST_XDIST_WORKER"], os.environ["PYTEST_XDIST_WORKER_COUNT"] = name, str(count)
    config.workerinput, config.workeroutput = {"workerid": name, "workercount": count, "testrunuid": folder.name}, {}
    factory = config._tmp_path_factory
    factory._given_basetemp, factory._basetemp = folder / f"popen-{name}", None
    if (terminal := config.pluginmanager.getplugin("terminalreporter")) is not None:
        config.pluginmanager.unregister(terminal)
    if (capture := config.pluginmanager.getplugin("capturemanager")) is not None and capture.is_globally_capturing():
        # The parent's temporary files have one position for all processes.
        capture.suspend_global_capture(in_=True)
        capture.read_global_capture()
        capture.stop_global_capturing()
        capture.start_global_capturing()
    config.pluginmanager.register(sender, "kvforge-forked-run-sender")


def _run(session: pytest.Session, shares: Shares, process: int, sender: Sender) -> None:
    while True:
        current, following = shares.advance(process)
        if current == NONE:
            return
        sender.test = current
        item, nextitem = session.items[current], None if following == NONE else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        sender.send()
        if session.shouldfail or session.shouldstop:
            return
