"""One supervised child process: started on a leash, its output read line by line, restarted with a growing pause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvforge.process.leash import leashed
from kvforge.protocol.steady_clock import monotonic

BACKOFF_S_MIN = 0.5
BACKOFF_S_MAX = 30.0
# A child that ends this often in a row without having served is given up.
RESTARTS_MAX = 5
LINE_BYTES_MAX = 4096
TAIL_BYTES = 8192


class Child:
    """A child process that may be started several times.

    command: its arguments after the interpreter. once: further arguments for its first start. temporary: its folder for
    temporary files. line: called with each line of its output, unless log_file takes it. descriptors: descriptors of
    this process that it inherits.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        temporary: Path,
        line: Callable[[str], None],
        log_file: Path | None = None,
        *,
        descriptors: tuple[int, ...] = (),
        once: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.log_file = log_file
        self.served = False
        self.given_up = False
        self.restart_at: float | None = None
        self._command = command
        self._once = once
        self._environment = {**os.environ, "TMPDIR": str(temporary)}
        self._line = line
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._output = -1
        self._text = b""
        self._last = ""
        self._ends_in_a_row = 0

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of the process; 0 where none runs."""
        return self._process.pid if self._process is not None else 0

    @property
    def output(self) -> int:
        """Descriptor to poll for output; -1 if there is none."""
        return self._output

    def start(self) -> None:
        """Starts the process in a process group of its own: Ctrl-C in the terminal reaches only the supervisor."""
        assert self._process is None, "started while it runs"
        self.restart_at, self.served = None, False
        # -P: do not import a folder of that name from the working directory.
        command = leashed([sys.executable, "-P", *self._command, *self._once])
        self._once = ()
        if self.log_file is not None:
            with self.log_file.open("ab") as log:
                self._process = self._popen(command, log.fileno())
            return
        self._output, theirs = os.pipe()
        os.set_blocking(self._output, False)
        try:
            self._process = self._popen(command, theirs)
        finally:
            os.close(theirs)

    def read(self) -> None:
        """Takes in the output that is there."""
        while self._output >= 0:
            try:
                chunk = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                os.close(self._output)
                self._output = -1
            self._text += chunk
            *lines, self._text = self._text.split(b"\n")
            if not chunk or len(self._text) > LINE_BYTES_MAX:
                lines, self._text = [*lines, self._text], b""
            for line in lines:
                self._show(line)

    def ended(self) -> int | None:
        """The exit status if the process has ended since the last call (minus the signal's number if killed)."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._process = None
        self.read()
        if self._output >= 0:  # a grandchild holds the other end
            os.close(self._output)
            self._output = -1
        return status

    def plan_restart(self) -> None:
        """Decides when to start it again, or gives it up. A child that had served starts with the shortest pause."""
        self._ends_in_a_row = 1 if self.served else self._ends_in_a_row + 1
        if self._ends_in_a_row > RESTARTS_MAX:
            self.given_up = True
            return
        self.restart_at = monotonic() + min(BACKOFF_S_MIN * 2 ** (self._ends_in_a_row - 1), BACKOFF_S_MAX)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, deadline: float) -> bool:
        """Waits for the end until `deadline` (steady_clock.monotonic); False if it still runs."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - monotonic()))
            self.ended()
        return self._process is None

    def last_words(self) -> str:
        """The last line of its output, without its own name in front."""
        last = self._last
        if self.log_file is not None and self.log_file.exists():
            with self.log_file.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
        kind = self.name.partition("-")[0]
        for prefix in (f"{self.name}: ", f"{kind}: "):
            last = last.removeprefix(prefix)
        return last.strip().rstrip(".")

    def _popen(self, command: list[str], output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=self._descriptors,
            stdout=output,
            stderr=output,
            env=self._environment,
            process_group=0,
        )

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last = text
            self._line(text)
