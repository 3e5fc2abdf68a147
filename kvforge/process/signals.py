"""Signals for a process that supervises others: a handler sets a flag and wakes the poll loop, nothing more.

Within `interrupting`, a signal raises `Interrupted` at once, for work without clean-up (a download, a wait). Within
`held_back`, signals are deferred until a critical section ends.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

from .ending import Interrupted

# Windows has no SIGHUP.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def held_back() -> Iterator[None]:
    """Defer signals that ask to end, for work that must not be interrupted.

    An example is starting a process and recording it. Signals interrupt the main thread only; in other threads this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: handler for number in ENDING if (handler := signal.getsignal(number)) is not None}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


class Signals:
    """While entered, counts requests to end. `fileno` becomes readable at each signal, including a child's end."""

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
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._read.close()
        self._write.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable after a signal."""
        return self._read.fileno()

    def clear(self) -> None:
        """Empty the descriptor; the count stays."""
        with suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def check(self) -> None:
        """Raise Interrupted if a signal asked to end."""
        if self.count:
            raise Interrupted(self.last)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise Interrupted at once for a signal within this context, or for one before it."""
        self._raising = True
        try:
            self.check()
            yield
        finally:
            self._raising = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        self.count += 1
        self.last = number
        if self._raising:
            self._raising = False  # a second signal waits for the clean-up of the first
            raise Interrupted(number)
