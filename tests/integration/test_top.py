"""kvforge top as a full screen: on a pseudo-terminal, with a coordinator and a worker."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Self

import pytest

from kvforge import Client, Tables
from tools.cluster.running import Process, tiny_model

DEADLINE_S = 60.0
STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
LEAVE = "\x1b[?1049l"


@pytest.fixture(scope="module")
def served() -> Iterator[Path]:
    """Yield the runtime folder of a served tiny model."""
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as name:
        folder = Path(name)
        options = ("--model", str(tiny_model(folder)), "--load-format", "dummy", "--device", "cpu")
        run = str(folder / "run")
        with Process("--runtime-dir", run, "up", *options, "--blocks", "256", "--threads", "1") as up:
            up.expect("ready")
            with Client(f"ipc://{run}/clients.sock") as kv:
                kv.wait_ready(DEADLINE_S)
            yield folder / "run"


class Screen:
    """The command on a pseudo-terminal. `text`: its whole output; `frame`: the current screen."""

    def __init__(self, folder: Path, columns: int = 80, lines: int = 24, **environment: str) -> None:
        self.master, slave = pty.openpty()
        self.slave = slave
        self.before = termios.tcgetattr(slave)
        self.resize(columns, lines)
        environment = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvforge", "--runtime-dir", str(folder), "top", "--every", "0.1"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        self.text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self.master)
        os.close(self.slave)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def frame(self) -> list[str]:
        """Return the last complete frame: each starts at the first line and ends by clearing the rest of the screen."""
        whole = self.text.rpartition("\x1b[J")[0].rpartition("\x1b[H")[2]
        return [STYLE.sub("", line) for line in whole.split("\r\n")]

    def expect(self, words: str) -> list[str]:
        """Waits for a frame with these words."""
        deadline = monotonic() + DEADLINE_S
        while words not in "\n".join(self.frame()):
            assert monotonic() < deadline, f"no {words!r} in {self.frame()}"
            self._read(1.0)
        return self.frame()

    def end(self) -> int:
        """Wait for the end, and check that the terminal is restored."""
        deadline = monotonic() + DEADLINE_S
        while self.process.poll() is None and monotonic() < deadline:
            self._read(0.1)
        with suppress(BlockingIOError):
            self._read(0.0)
        assert LEAVE in self.text
        assert "\x1b[?25h" in self.text
        assert termios.tcgetattr(self.slave) == self.before
        return self.process.wait(1)

    def _read(self, wait_s: float) -> None:
        if select.select([self.master], [], [], wait_s)[0]:
            self.text += os.read(self.master, 1 << 16).decode(errors="replace")


def test_its_keys_and_sizes(served: Path) -> None:
    with Client(f"ipc://{served}/clients.sock") as kv, Screen(served) as screen:
        frame = screen.expect("256 blocks used")
        assert len(frame) <= 24
        screen.expect("no requests")
        screen.expect("ready")
        sequence = kv.create_sequence(list(range(3, 100)))
        kv.fork(sequence)
        screen.expect("seq 2")
        screen.press("h")
        screen.expect("leave")
        screen.press("hp")
        screen.expect("PAUSED")
        screen.press("p")
        screen.resize(40, 10)
        screen.expect("q quit")
        deadline = monotonic() + DEADLINE_S
        while max(map(len, screen.frame())) > 40 or len(screen.frame()) > 10:
            assert monotonic() < deadline, screen.frame()
            screen._read(1.0)
        screen.press("\x1b[A\x1b[Bq")
        assert screen.end() == 0
        assert "Traceback" not in screen.text


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(served: Path, number: signal.Signals, status: int) -> None:
    with Screen(served, NO_COLOR="1") as screen:
        screen.expect("256 blocks used")
        assert "\x1b[32m" not in screen.text
        screen.process.send_signal(number)
        assert screen.end() == status


def test_a_coordinator_that_is_killed_and_comes_back_is_watched_on(served: Path) -> None:
    with Screen(served) as screen:
        screen.expect("256 blocks used")
        before = Tables(served).pid
        os.kill(before, signal.SIGKILL)
        deadline = monotonic() + DEADLINE_S
        while "gone" not in STYLE.sub("", screen.text):
            assert monotonic() < deadline, screen.frame()
            screen._read(1.0)
        while Tables(served).pid == before or "gone" in (head := screen.frame()[0]) or " ready" not in head:
            assert monotonic() < deadline, screen.frame()
            screen._read(1.0)
        screen.press("q")
        assert screen.end() == 0


def test_a_coordinator_that_stands_still_holds_up_no_key(served: Path) -> None:
    with Screen(served) as screen:
        screen.expect("256 blocks used")
        pid = Tables(served).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            screen.press("h")
            screen.expect("leave")
            screen.press("q")
            assert screen.end() == 0
        finally:
            os.kill(pid, signal.SIGCONT)
