"""Trials of grammars beside a thread that must not wait for them: a bounded queue in front of a `GrammarHelper`."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import weakref
from collections import OrderedDict, deque

from .grammar_helper import GrammarHelper

ANSWERS_MAX = 256


class GrammarTrials:
    """Tries grammars one after another. Its methods return at once, but for `wait`."""

    def __init__(self, helper: GrammarHelper) -> None:
        """Start no thread and no process yet.

        Args:
            helper: Used by the thread of this object alone; `helper.limits.waiting_max` bounds the queue.
        """
        self._state = _State(helper.limits.waiting_max)
        self._helper = helper
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread and the process, if they do not run."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=_run, args=(self._state, self._helper), daemon=True, name="grammars")
        weakref.finalize(self, self._state.end)
        self._thread.start()

    def problem(self, grammar: str) -> str | None:
        """Return why a grammar is refused, "" where it is not, None while no answer is known.

        A grammar that is new is put into the queue. Where the queue is full it is not: ask again.

        Args:
            grammar: As llguidance takes it.
        """
        self.start()
        return self._state.ask(grammar)

    def wait(self, seconds: float) -> None:
        """Return when the queue is empty, or the time is over."""
        self._state.wait_idle(seconds)

    def waited_s(self, grammar: str) -> float:
        """Return for how long a grammar has been in the queue; 0 where it is not there."""
        return self._state.waited_s(grammar)

    def close(self) -> None:
        """End the thread and the process."""
        self._state.end()
        if self._thread is not None:
            self._thread.join()


class _State:
    """The state that the threads share. Answers are kept by a grammar's hash."""

    def __init__(self, waiting_max: int) -> None:
        self._changed = threading.Condition()
        self._waiting_max = waiting_max
        self._queue: deque[str] = deque()
        self._since: dict[bytes, float] = {}
        self._answers: OrderedDict[bytes, str] = OrderedDict()
        self._failed: set[bytes] = set()  # answers that say nothing about the grammar: given once
        self._ended = False

    def ask(self, grammar: str) -> str | None:
        key = _key(grammar)
        with self._changed:
            if key in self._answers:
                self._answers.move_to_end(key)
                if key in self._failed:
                    self._failed.discard(key)
                    return self._answers.pop(key)
                return self._answers[key]
            if key not in self._since and len(self._since) < self._waiting_max:
                self._since[key] = time.monotonic()
                self._queue.append(grammar)
                self._changed.notify_all()
            return None

    def wait_idle(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._since, seconds)

    def waited_s(self, grammar: str) -> float:
        with self._changed:
            since = self._since.get(_key(grammar))
        return 0.0 if since is None else time.monotonic() - since

    def take(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ended)
            return None if self._ended else self._queue.popleft()

    def answer(self, grammar: str, problem: str, *, lasting: bool) -> None:
        key = _key(grammar)
        with self._changed:
            del self._since[key]
            self._answers[key] = problem
            if not lasting:
                self._failed.add(key)
            if len(self._answers) > ANSWERS_MAX:
                self._failed.discard(self._answers.popitem(last=False)[0])
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _run(state: _State, helper: GrammarHelper) -> None:
    """The thread. The helper's process ends with the thread that started it, so it is started here."""
    try:
        with contextlib.suppress(OSError):  # the first trial reports it
            helper.start()
        while (grammar := state.take()) is not None:
            problem, lasting = helper.tried(grammar)
            state.answer(grammar, problem, lasting=lasting)
    finally:
        helper.close()


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
