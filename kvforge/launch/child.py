"""A supervised child process: leashed, its output read line by line, restarted with exponential backoff."""

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

from .watchdog import ChildWatchdog

BACKOFF_S_MIN = 0.5
BACKOFF_S_MAX = 30.0
ABORT_S = 5.0  # for a hanging child to write its stack to its log
# A child that ends this often in a row without serving is given up.
RESTARTS_MAX = 5
LINE_BYTES_MAX = 4096
TAIL_BYTES = 8192


class Child:
    """A child process that may be started several times.

    Args:
        name: Its name in messages.
        command: Its arguments after the interpreter.
        temporary: Its folder for temporary files.
        line: Called with each line of its output, unless log_file is given.
        log_file: The file for its output.
        descriptors: Descriptors of this process that it inherits.
        once: Further arguments for its first start.
        watchdog: Notices when the process hangs; None: nothing does.
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
        watchdog: ChildWatchdog | None = None,
    ) -> None:
        self.name = name
        self.log_file = log_file
        self.served = False
        self.given_up = False
        self.restart_at: float | None = None
        self._command = command
        self._once = once
        self._environment = {**os.environ, "TMPDIR": str(temporary)}
        self._watchdog, self._aborted_at = watchdog, 0.0
        self._line = line
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._output = -1
        self._text = b""
        self._last = ""
        self._ends_in_a_row = 0

    @property
    def running(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Return the process id, 0 if no process runs."""
        return self._process.pid if self._process is not None else 0

    @property
    def output(self) -> int:
        """Return the descriptor to poll for output, -1 if there is none."""
        return self._output

    def start(self) -> None:
        """Start the process in its own process group, so that Ctrl-C in the terminal reaches only the supervisor."""
        assert self._process is None, "started while it runs"
        self.restart_at, self.served, self._aborted_at = None, False, 0.0
        if self._watchdog is not None:
            self._environment |= self._watchdog.begin()
        # -P: do not import a folder of the same name from the working directory.
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
        """Read the available output."""
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
        """Return the exit status if the process has ended since the last call, negative for a signal."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._process = None
        if self._watchdog is not None:
            self._watchdog.close()
        self.read()
        if self._output >= 0:  # a grandchild holds the other end
            os.close(self._output)
            self._output = -1
        return status

    def end_if_it_hangs(self) -> float:
        """End the process if its watchdog has waited too long for a report: it writes its stack, then is killed.

        Call it at least every `steady_clock.WAIT_S_MAX`.

        Returns:
            Seconds that the watchdog waited, once for each hanging process; else 0.
        """
        if self._watchdog is None or self._process is None or not self._watchdog.hangs():
            return 0.0
        if self._aborted_at:
            if monotonic() > self._aborted_at + ABORT_S:
                self.send(signal.SIGKILL)
            return 0.0
        self._aborted_at = monotonic()
        self.send(signal.SIGABRT)
        return self._watchdog.period_s

    def plan_restart(self) -> None:
        """Schedule the next start, or give the child up. A child that had served restarts after the shortest pause."""
        self._ends_in_a_row = 1 if self.served else self._ends_in_a_row + 1
        if self._ends_in_a_row > RESTARTS_MAX:
            self.given_up = True
            return
        self.restart_at = monotonic() + min(BACKOFF_S_MIN * 2 ** (self._ends_in_a_row - 1), BACKOFF_S_MAX)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, deadline: float) -> bool:
        """Wait for the end until `deadline` (steady_clock.monotonic); return False if the process still runs."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - monotonic()))
            self.ended()
        return self._process is None

    def last_words(self) -> str:
        """Return the last line of its output, without its own name as prefix."""
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
