"""Log output that never blocks: bounded in memory, and rate-limited per kind of line.

The reader of standard error may stop reading (a terminal under Ctrl-S, a supervisor under Ctrl-Z). A blocking log
would then stop the process with all that it serves. Lines that cannot be written now are buffered up to a bound; beyond
it they are dropped, and the log reports how many.
"""

from __future__ import annotations

import logging
import os
import re
import socket as sockets
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress

BUFFER_BYTES_MAX = 1 << 20
SAME_MAX, SAME_S, KINDS_MAX = 10, 10.0, 256
NUMBERS = re.compile(r"\d+")


class LogOutput(logging.Handler):
    """Writes to a file descriptor. A buffered line is written with the next one, or by `flush`."""

    def __init__(self, descriptor: int = 2, buffer_bytes_max: int = BUFFER_BYTES_MAX) -> None:
        super().__init__()
        self._write, self._close = _writer(descriptor)
        self._lines: deque[bytes] = deque()
        self.kept_bytes = self.lost = 0
        self._buffer_bytes_max = buffer_bytes_max

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, or buffer it while the descriptor takes nothing."""
        try:
            line = (self.format(record) + "\n").encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 - as in logging: a line that cannot be formatted must not end the program
            self.handleError(record)
            return
        if self.kept_bytes + len(line) > self._buffer_bytes_max:
            self.flush()
        if self.kept_bytes + len(line) > self._buffer_bytes_max:
            self.lost += 1
            return
        if self.lost:
            text = f"{self.lost} log lines dropped: standard error did not take them"
            self.lost = 0
            gap = logging.LogRecord(record.name, logging.WARNING, record.pathname, record.lineno, text, (), None)
            self._keep((self.format(gap) + "\n").encode())
        self._keep(line)
        self.flush()

    def _keep(self, line: bytes) -> None:
        self._lines.append(line)
        self.kept_bytes += len(line)

    def flush(self) -> None:
        """Write buffered lines, as far as the descriptor takes them now."""
        while self._lines:
            try:
                count = self._write(self._lines[0])
            except BlockingIOError:
                return
            except OSError:
                count = len(self._lines[0])  # the reader is gone for good
            self.kept_bytes -= count
            if count == len(self._lines[0]):
                self._lines.popleft()
            else:
                self._lines[0] = self._lines[0][count:]

    def close(self) -> None:
        """Flush, and close the descriptor."""
        self.flush()
        self._close()
        super().close()


class RateLimitFilter(logging.Filter):
    """Limits warnings and errors of one kind to a number per period, and reports how many were left out.

    A kind is the text of a line without its numbers, together with the peer that it concerns (`extra={"peer": ...}`). A
    peer can therefore neither fill the log nor suppress lines about other peers. Info lines report single events and
    always pass.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._kinds: OrderedDict[tuple[object, str], tuple[float, int]] = OrderedDict()  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record."""
        if record.levelno < logging.WARNING:
            return True
        now_s = self._clock_s()
        kind = getattr(record, "peer", None), NUMBERS.sub("0", record.getMessage())[:80]
        since_s, count = self._kinds.pop(kind, (now_s, 0))
        left_out = 0
        if now_s - since_s >= SAME_S:
            left_out, since_s, count = max(0, count - SAME_MAX), now_s, 0
        self._kinds[kind] = since_s, count + 1
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like it were left out)", ()
        return count < SAME_MAX


def _writer(descriptor: int) -> tuple[Callable[[bytes], int], Callable[[], None]]:
    """Return functions that write to a descriptor without blocking and that close it.

    Other processes may share the descriptor, so its own mode must stay blocking: pipes and terminals are opened again,
    and each write to a socket sets a flag.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        socket = sockets.socket(fileno=os.dup(descriptor))
        return lambda data: socket.send(data, sockets.MSG_DONTWAIT), socket.close
    own = os.dup(descriptor)
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with suppress(OSError):  # no permission to open it again: use the shared descriptor
            own_again = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            os.close(own)
            own = own_again
    return lambda data: os.write(own, data), lambda: os.close(own)
