"""Histories of recent requests, for the requests that may be drafted from them.

Requests share histories only under the same number (`RowStart.shared_drafts`), one of a tenant and a salt: how fast an
answer comes would otherwise tell one tenant what another has read.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice

from .history import History

SEARCHED_MAX = 8  # histories of other requests that a lookup searches
RECENT_BYTES_MAX = 64 << 20  # of the histories of requests that have ended


class RecentHistories:
    """The histories of each number, the newest first. Those that no slot has any more are bounded in bytes."""

    def __init__(self) -> None:
        self._of: dict[int, deque[History]] = {}
        self._newest: dict[int, tuple[History, ...]] = {}
        # By id(), the oldest first: the number, the history, and its bytes.
        self._ended: OrderedDict[int, tuple[int, History, int]] = OrderedDict()
        self._ended_bytes = 0

    @property
    def bytes(self) -> int:
        """Host memory of the histories that no slot has."""
        return self._ended_bytes

    def add(self, number: int, history: History) -> None:
        """Add the history of a request that takes a slot; number 0 shares none."""
        if number:
            own = self._of.setdefault(number, deque())
            own.appendleft(history)
            self._newest[number] = tuple(islice(own, SEARCHED_MAX + 1))

    def end(self, number: int, history: History) -> None:
        """Record that no slot has this history any more. It stays until newer ones need its memory."""
        if not number:
            return
        size = history.bytes
        self._ended[id(history)] = number, history, size
        self._ended_bytes += size
        while self._ended_bytes > RECENT_BYTES_MAX:
            _, (number, oldest, size) = self._ended.popitem(last=False)
            self._ended_bytes -= size
            own = self._of[number]
            own.remove(oldest)
            self._newest[number] = tuple(islice(own, SEARCHED_MAX + 1))
            if not own:
                del self._of[number], self._newest[number]

    def newest(self, number: int) -> tuple[History, ...]:
        """Return the newest histories under a number, SEARCHED_MAX and the one that looks for others."""
        return self._newest.get(number, ())

    def forget(self) -> None:
        """Forget all."""
        self._of.clear()
        self._newest.clear()
        self._ended.clear()
        self._ended_bytes = 0
