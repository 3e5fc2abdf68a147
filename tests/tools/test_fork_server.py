"""A fork server of which the answers come late, as on a busy machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tools.cluster import fork_server
from tools.cluster.fork_server import ForkServer


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
