"""Trials of grammars beside a loop that must not wait for them: a bounded queue in front of a `GrammarHelper`."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import OrderedDict, deque

from .grammar_helper import GrammarHelper

ANSWERS_MAX = 256


class GrammarTrials:
    """Tries grammars one after another in the helper's process. Its methods return at once, but for `wait`."""

    def __init__(self, helper: GrammarHelper) -> None:
        """Start no process yet.

        Args:
            helper: Used by this object alone; `helper.limits.waiting_max` bounds the queue.
        """
        self._helper = helper
        self._queue: deque[tuple[bytes, str]] = deque()
        self._under_way: bytes | None = None
        self._since: dict[bytes, float] = {}
        self._answers: OrderedDict[bytes, str] = OrderedDict()  # by a grammar's hash
        self._failed: set[bytes] = set()  # answers that say nothing about the grammar: given once

    def start(self) -> None:
        """Start the process, if it does not run."""
        with contextlib.suppress(OSError):  # the first trial reports it
            self._helper.start()

    def problem(self, grammar: str) -> str | None:
        """Return why a grammar is refused, "" where it is not, None while no answer is known.

        A grammar that is new is put into the queue. Where the queue is full it is not: ask again.

        Args:
            grammar: As llguidance takes it.
        """
        self._advance(0.0)
        key = _key(grammar)
        if key not in self._answers:
            if key not in self._since and len(self._since) < self._helper.limits.waiting_max:
                self._since[key] = time.monotonic()
                self._queue.append((key, grammar))
                self._advance(0.0)
            return None
        self._answers.move_to_end(key)
        if key in self._failed:
            self._failed.discard(key)
            return self._answers.pop(key)
        return self._answers[key]

    def wait(self, seconds: float) -> None:
        """Return when the queue is empty, or the time is over."""
        until = time.monotonic() + seconds
        while self._since and (left := until - time.monotonic()) > 0:
            self._advance(left)

    def waited_s(self, grammar: str) -> float:
        """Return for how long a grammar has been in the queue; 0 where it is not there."""
        since = self._since.get(_key(grammar))
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """End the process."""
        self._helper.close()

    def _advance(self, seconds: float) -> None:
        """Take the verdicts that are there, or come within the time, and begin the next trial."""
        while self._under_way is not None or self._queue:
            if self._under_way is None:
                self._under_way, grammar = self._queue.popleft()
                self._helper.begin(grammar)
            if (verdict := self._helper.poll(seconds)) is None:
                return
            self._answer(self._under_way, *verdict)
            self._under_way, seconds = None, 0.0

    def _answer(self, key: bytes, problem: str, lasting: bool) -> None:
        del self._since[key]
        self._answers[key] = problem
        if not lasting:
            self._failed.add(key)
        if len(self._answers) > ANSWERS_MAX:
            self._failed.discard(self._answers.popitem(last=False)[0])


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
