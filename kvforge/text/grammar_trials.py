"""A bounded queue of grammar trials in front of a `GrammarHelper`, for a loop that must not wait."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import OrderedDict, deque

from .grammar_helper import GrammarHelper

ANSWERS_MAX = 256


class GrammarTrials:
    """Tries grammars one after another in the helper's process. Only `wait` waits."""

    def __init__(self, helper: GrammarHelper) -> None:
        """Prepare the queue without starting the process.

        Args:
            helper: Used by this object alone; `helper.limits.waiting_max` bounds the queue.
        """
        self._helper = helper
        self._queue: deque[tuple[bytes, str]] = deque()
        self._under_way: bytes | None = None
        self._since: dict[bytes, float] = {}
        self._answers: OrderedDict[bytes, str] = OrderedDict()  # by a grammar's hash
        self._failed: set[bytes] = set()  # failures of the process, returned once

    def start(self) -> None:
        """Start the process, if it does not run."""
        with contextlib.suppress(OSError):  # the first trial reports it
            self._helper.start()

    def problem(self, grammar: str) -> str | None:
        """Return why a grammar is refused, "" if it is accepted, None while the answer is unknown.

        A new grammar is queued. If the queue is full, the caller must ask again.

        Args:
            grammar: The grammar in llguidance's form.
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
        """Wait until the queue is empty, for at most `seconds`."""
        until = time.monotonic() + seconds
        while self._since and (left := until - time.monotonic()) > 0:
            self._advance(left)

    def waited_s(self, grammar: str) -> float:
        """Return how long a grammar has been in the queue, 0 if it is not in it."""
        since = self._since.get(_key(grammar))
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """End the process."""
        self._helper.close()

    def _advance(self, seconds: float) -> None:
        """Collect verdicts that arrive within the time, and begin the next trial."""
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
