"""Hung processes are asked for their stack and killed; no other process ever is."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import select
import signal
import socket as sockets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from kvforge.coordinator.host.replacing import GRACE_S, Replacer

GRACE_US = int(GRACE_S * 1e6)
WAIT_S = 60.0
WORKER = 7

CHILD = """
import faulthandler, signal, socket, sys
faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
def where_it_hangs():
    signal.alarm(120)  # ends the process if no test does
    connection.send(b"!")
    while True:
        pass
where_it_hangs()
"""


class Hung:
    """A process that is connected to the test and spins."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "s")
        with sockets.socket(sockets.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(WAIT_S)
            self.process = subprocess.Popen([sys.executable, "-c", CHILD, path], stderr=subprocess.PIPE)
            self.connection, _ = listener.accept()
        self.connection.settimeout(WAIT_S)
        assert self.connection.recv(1) == b"!"
        self.pid = self.process.pid

    def read_until(self, words: str) -> str:
        """Return its output up to a line with these words."""
        assert self.process.stderr is not None
        text, deadline = b"", monotonic() + WAIT_S
        while words.encode() not in text:
            assert select.select([self.process.stderr], [], [], max(0.0, deadline - monotonic()))[0], text
            chunk = os.read(self.process.stderr.fileno(), 1 << 16)
            assert chunk, text
            text += chunk
        return text.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.connection.close()


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Hung]:
    made = Hung(tmp_path)
    yield made
    made.close()


@pytest.fixture
def replacer() -> Iterator[Replacer]:
    """A replacer, which must leave no descriptor open."""
    before = descriptors()
    made = Replacer()
    yield made
    made.close()
    made.close()
    assert descriptors() <= before


def descriptors() -> set[str]:
    """The test's open pidfds; fixtures open and close others."""
    found = set()
    for entry in Path("/proc/self/fdinfo").iterdir():
        try:
            if "\nPid:" in entry.read_text():
                found.add(entry.name)
        except FileNotFoundError:
            continue  # the descriptor of this listing
    return found


def watched(replacer: Replacer, hung: Hung) -> Replacer:
    replacer.watch(WORKER, hung.pid, hung.connection.fileno())
    assert len(descriptors()) == 1
    return replacer


def test_a_hung_process_writes_its_stack_and_is_killed_a_little_later(
    replacer: Replacer, hung: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    watched(replacer, hung)
    replacer.leave(WORKER)  # the connection is dropped first
    replacer.replace(WORKER, hung.pid, "no step for 60 s", 5_000)
    assert replacer.act(5_000) == 5_000 + GRACE_US
    assert "most recent call first" in hung.read_until("in where_it_hangs")
    assert replacer.act(5_000 + GRACE_US - 1) == 5_000 + GRACE_US
    assert replacer.act(5_000 + GRACE_US) is None
    assert hung.process.wait(WAIT_S) == -signal.SIGKILL
    assert descriptors() == set()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told[0] == (
        "ERROR",
        f"worker process {hung.pid} must end (no step for 60 s): it is killed in 1 s, its stack is in its log",
    )


def test_a_stopped_process_is_killed(replacer: Replacer, hung: Hung) -> None:
    watched(replacer, hung)
    hung.process.send_signal(signal.SIGSTOP)
    replacer.replace(WORKER, hung.pid, "no step", 0)
    replacer.act(GRACE_US)
    assert hung.process.wait(WAIT_S) == -signal.SIGKILL


def test_a_worker_from_which_nothing_comes_is_killed_too(
    replacer: Replacer, hung: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process (SIGSTOP): heartbeats end its connection, and its supervisor sees it alive."""
    watched(replacer, hung)
    hung.process.send_signal(signal.SIGSTOP)
    replacer.silent(WORKER, "nothing came from it for 10 s", 0)
    replacer.leave(WORKER)
    replacer.act(0)
    replacer.act(GRACE_US)
    assert hung.process.wait(WAIT_S) == -signal.SIGKILL
    assert "nothing came from it for 10 s" in caplog.records[0].getMessage()
    replacer.silent(WORKER, "again", GRACE_US)  # its entry is gone
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_a_process_that_ended_before_or_meanwhile_is_fine(
    replacer: Replacer, hung: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    watched(replacer, hung)
    replacer.watch(WORKER + 1, hung.pid, hung.connection.fileno())
    replacer.replace(WORKER, hung.pid, "no step", 0)
    hung.process.kill()
    hung.process.wait(WAIT_S)
    caplog.clear()
    replacer.act(GRACE_US)
    replacer.replace(WORKER + 1, hung.pid, "no step", GRACE_US)
    assert replacer.act(GRACE_US) is None
    assert descriptors() == set()
    told = [record.getMessage().partition("(")[0] for record in caplog.records]
    assert told == [f"worker process {hung.pid} must end "]


def test_what_is_known_of_a_worker_goes_with_it(replacer: Replacer, hung: Hung) -> None:
    watched(replacer, hung)
    replacer.leave(WORKER)
    replacer.leave(WORKER)
    replacer.act(1)
    assert descriptors() == set()
    replacer.replace(WORKER, hung.pid, "no step", 2)
    assert replacer.act(2) is None
    assert hung.process.poll() is None


def test_at_the_end_what_was_to_be_killed_is_killed_at_once(replacer: Replacer, hung: Hung) -> None:
    watched(replacer, hung)
    replacer.replace(WORKER, hung.pid, "no step", 0)
    replacer.close()
    assert hung.process.wait(WAIT_S) == -signal.SIGKILL
    assert descriptors() == set()


@pytest.mark.parametrize("pid", [-1, 0, 1], ids=str)
def test_ids_that_mean_something_else_are_never_signalled(
    replacer: Replacer, hung: Hung, pid: int, caplog: pytest.LogCaptureFixture
) -> None:
    replacer.watch(WORKER, pid, hung.connection.fileno())
    assert descriptors() == set()
    assert caplog.records == []
    replacer.replace(WORKER, pid, "no step", 0)
    assert replacer.act(2) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"worker process {pid} must end (no step), but cannot be killed from here: kill it manually"
    ]


def test_our_own_process_is_never_signalled(replacer: Replacer) -> None:
    ours, theirs = sockets.socketpair()  # the kernel reports this process at both ends
    with ours, theirs:
        replacer.watch(WORKER, os.getpid(), ours.fileno())
        replacer.replace(WORKER, os.getpid(), "no step", 0)
    assert descriptors() == set()
    assert replacer.act(2) is None


def test_nobody_has_another_process_ended_by_naming_it(replacer: Replacer, hung: Hung) -> None:
    ours, theirs = sockets.socketpair()
    with ours, theirs:
        replacer.watch(WORKER, hung.pid, ours.fileno())
        replacer.replace(WORKER, hung.pid, "no step", 0)
    assert replacer.act(GRACE_US) is None
    assert hung.process.poll() is None


def test_a_connection_that_is_none_is_no_noise(
    replacer: Replacer, hung: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), Path("/dev/null").open() as file:
        replacer.watch(WORKER, hung.pid, file.fileno())
        replacer.watch(WORKER, hung.pid, 1 << 20)
    assert descriptors() == set()
    assert caplog.records == []


def test_a_process_is_watched_beside_a_thousand_connections(
    replacer: Replacer, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor is above 1,023 then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_pidfd = os.pidfd_open

    def high(pid: int) -> int:
        low = open_pidfd(pid)
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD, 1500)
        finally:
            os.close(low)

    monkeypatch.setattr(os, "pidfd_open", high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1600), hard))
    try:
        watched(replacer, hung)
        assert not replacer.ended(WORKER)
        hung.process.kill()
        hung.process.wait(WAIT_S)
        assert replacer.ended(WORKER)
    finally:
        replacer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
