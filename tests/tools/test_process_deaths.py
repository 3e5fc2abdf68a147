"""No process of a fork server outlives the test process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tools.cluster.running import wait_gone

ROOT = Path(__file__).parents[2]
START_S = 120.0
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
# A child that ignores signals, as during a model load or a wait for a device.
DEAF = """
import signal
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
while True:
    signal.pause()
"""
# Starts a child and reports the processes. Nothing ends the child: a test process that is killed does not either.
HOLDER = """
import os, signal, socket, subprocess, sys
from pathlib import Path
from tools.cluster.fork_server import ForkServer

SERVE = "from tools.cluster.fork_server import leave, serve; serve(); leave(None)"

def hold(address):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    child = ForkServer(process).start([], Path(os.devnull), {**os.environ}, "deaf")
    with socket.socket(socket.AF_UNIX) as report:
        report.connect("\\0" + address)
        report.sendall(f"{os.getpid()} {process.pid} {child.pid}".encode())
    while True:
        signal.pause()
"""
ALONE = "import os, holder; holder.hold(os.environ['REPORT_TO'])"
TEST = "import os, holder\ndef test_that_hangs() -> None:\n    holder.hold(os.environ['REPORT_TO'])\n"
# pytest-xdist waits 10 s for its processes before it kills them.
IMPATIENT = "from xdist.workermanage import NodeManager\nNodeManager.EXIT_TIMEOUT = 0\n"


@contextmanager
def started(folder: Path, *command: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Yield a process and what it reports: the ids of a test process, its fork server and a child of this server."""
    for name, text in {"deaf": DEAF, "holder": HOLDER, "conftest": IMPATIENT, "test_hanging": TEST}.items():
        (folder / f"{name}.py").write_text(text)
    address = f"kvforge-{os.getpid()}-{folder.name}"  # not a path, which may be too long for a socket
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "REPORT_TO": address}
    for name in [name for name in environment if name.startswith("PYTEST_")]:  # of the run that this test is part of
        del environment[name]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        listener.settimeout(START_S)
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        descriptors: list[int] = []
        try:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as report:
                pids = [int(word) for word in report.read().split()]
            descriptors += map(os.pidfd_open, pids)
            yield process, pids
        finally:
            process.kill()
            process.wait()
            for descriptor in descriptors:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_child_ends_with_its_test_process(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path, "-c", ALONE) as (process, (test_process, *others)):
        assert test_process == process.pid
        process.send_signal(number)
        process.wait(START_S)
        wait_gone(*others)  # or it fails


def test_a_child_ends_with_the_controller_of_xdist(tmp_path: Path) -> None:
    """All signals at once: execnet gives a process whose controller is gone five seconds."""
    with ExitStack() as runs:
        found = []
        for number in SIGNALS:
            folder = tmp_path / number.name
            folder.mkdir()
            options = ("-n", "1", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider")
            found.append(runs.enter_context(started(folder, "-m", "pytest", *options, str(folder))))
        for number, (controller, pids) in zip(SIGNALS, found, strict=True):
            assert controller.pid not in pids
            controller.send_signal(number)
        for _, pids in found:
            wait_gone(*pids)  # or it fails
