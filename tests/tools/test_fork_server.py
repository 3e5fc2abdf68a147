"""Fork servers: answers that come late, as on a busy machine, and one for each of several test processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tools.cluster import fork_server
from tools.cluster.fork_server import Connected, ForkServer

SHARES = """
import socket, sys
from tools.cluster.fork_server import leave, serve, share
if share(socket.socket(fileno=int(sys.argv[1]))):
    serve()
leave(None)
"""


class Late:
    """A process that answers when the test writes to `answering`."""

    def __init__(self) -> None:
        self.requests, asking = os.pipe()
        answers, self.answering = os.pipe()
        self.stdin: IO[bytes] | None = os.fdopen(asking, "wb", buffering=0)
        self.stdout: IO[bytes] | None = os.fdopen(answers, "rb", buffering=0)

    def wait(self) -> int:
        for descriptor in (self.requests, self.answering):
            os.close(descriptor)
        return 0


def test_a_child_that_comes_too_late_is_killed_and_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Late()
    server = ForkServer(process)
    null, sleep = Path(os.devnull), [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(sleep) as first, subprocess.Popen(sleep) as second:
        try:
            with monkeypatch.context() as patch:
                patch.setattr(fork_server, "FORK_S", 0.0)
                with pytest.raises(AssertionError, match="no process within"):
                    server.start([], null, {})
            for child in (first, second):
                os.write(process.answering, json.dumps([child.pid, None]).encode() + b"\n")
            assert server.start([], null, {}).pid == second.pid
            assert first.wait(60) == -signal.SIGKILL
            assert second.poll() is None
        finally:
            first.kill()
            second.kill()
            server.close()


def test_a_child_that_ends_before_its_birth_was_read_is_returned() -> None:
    process = Late()
    server = ForkServer(process)
    try:
        os.write(process.answering, b"[17, null]\n[17, 5]\n")
        child = server.start([], Path(os.devnull), {})
        assert (child.pid, child.wait(0)) == (17, 5)
    finally:
        server.close()


def test_a_shared_process_forks_a_fork_server_for_each_that_connects(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "shared"))
        listener.listen()
        command = [sys.executable, "-c", SHARES, str(listener.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    with process:
        servers = [ForkServer(Connected(tmp_path / "shared")) for _ in range(2)]
        logs = [tmp_path / f"{number}.log" for number in range(2)]
        children = [
            server.start([str(2026 + number)], log, {**os.environ}, "calendar")
            for number, (server, log) in enumerate(zip(servers, logs, strict=True))
        ]
        assert [child.wait(60) for child in children] == [0, 0]
        assert [str(2026 + number) in log.read_text() for number, log in enumerate(logs)] == [True, True]
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(60) == 0
        servers[0].close()
        # A server goes on without the shared process and without the other one.
        assert servers[1].start(["wrong"], logs[1], {**os.environ}, "calendar").wait(60) != 0
        assert "wrong" in logs[1].read_text()
        servers[1].close()
