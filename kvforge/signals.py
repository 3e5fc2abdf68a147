"""Signals for a process that supervises others: a handler sets a flag and wakes the poll loop, nothing more.

Where nothing has to be put in order (a download, a wait), `interrupting` lets a signal raise `Interrupted` at once.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

from .exits import Interrupted

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While entered, counts requests to end. `fileno` becomes readable at each signal, a child's end included."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        self._raising = False
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._read, self._write = socket.socketpair()
        self._previous_wakeup = -1

    def __enter__(self) -> Self:
        for end in (self._read, self._write):
            end.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGCHLD):
            self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._read.close()
        self._write.close()

    def fileno(self) -> int:
        """A descriptor that is readable when a signal has come."""
        return self._read.fileno()

    def clear(self) -> None:
        """Makes `fileno` quiet again; what was counted stays."""
        with suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def check(self) -> None:
        """Raises Interrupted if a signal asked to end."""
        if self.count:
            raise Interrupted(self.last)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within, a signal raises Interrupted at once (also one that came before)."""
        self._raising = True
        try:
            self.check()
            yield
        finally:
            self._raising = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        self.count += 1
        self.last = number
        if self._raising:
            self._raising = False  # the second one waits until the first has cleaned up
            raise Interrupted(number)
