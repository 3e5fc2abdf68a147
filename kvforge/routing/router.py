"""Chooses a replica for each request.

A score is in tokens of prompts that are computed before the request's first token, so the lowest is best:

    its own uncached tokens + prompt tokens queued before it + ROW_TOKENS for each request already there

A replica's answer is as old as its query, so decisions made since the query are added to it: simultaneous requests then
do not all go to the one that looked idle. A later query needs no such sum, because the coordinator receives the request
before the query on the same connection. Decisions are therefore kept only while an older query is open, and none is
counted twice.

A hot prefix does not create a hot spot: the replica that holds it pays for each of its requests, and another one pays
for the prefix only once. The gap between the two is never larger than the prefix; at that point the other one computes
and caches it too.

A session prefers one replica, which follows from its name and the names of the replicas (rendezvous hashing: Thaler and
Ravishankar, 1998). It needs no memory and is the same in every process. The preference is worth SESSION_TOKENS.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from kvforge.protocol.messages import PrefixFound

PREFIX, ROUND_ROBIN = POLICIES = ("prefix", "round-robin")
# The cost of a running request for one that joins it. On an H200 a row makes each decode step of an 8B model about
# 40 us longer, which is 1.7 tokens of a prompt, and an answer has some hundred steps.
ROW_TOKENS = 128
SESSION_TOKENS = 512
QUESTIONS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Offer:
    """A replica's answer to the query with number `question`."""

    question: int
    found: PrefixFound


class Router:
    """Chooses replicas, and keeps decisions that the answers do not include yet. names: the replicas."""

    def __init__(self, names: Iterable[str], policy: str = PREFIX) -> None:
        assert policy in POLICIES, policy
        self.names, self._policy = tuple(names), policy
        self._numbers = count(1)
        self._open: dict[int, None] = {}
        self._last = 0
        # By replica: the number of a decision, and the uncached tokens sent there.
        self._decided: dict[str, deque[tuple[int, int]]] = {name: deque() for name in self.names}
        self._turn = 0

    def use(self, names: Iterable[str]) -> None:
        """Replace the replicas. Decisions about those that stay are kept."""
        self.names = tuple(names)
        self._decided = {name: self._decided.get(name, deque()) for name in self.names}
        self._turn %= len(self.names)

    def ask(self) -> int:
        """Return the number of a query that is sent to the replicas now. The caller must `close` it."""
        number = self._last = next(self._numbers)
        self._open[number] = None
        if len(self._open) > QUESTIONS_MAX:  # its caller has not closed it
            del self._open[next(iter(self._open))]
        return number

    def close(self, question: int) -> None:
        """Close a query: its answers are used no more."""
        self._open.pop(question, None)
        oldest = next(iter(self._open), None)
        for decided in self._decided.values():
            while decided and (oldest is None or decided[0][0] < oldest):
                decided.popleft()

    def choose(
        self, prompt_tokens: int, offers: Mapping[str, Offer], *, session: str = "", without: Iterable[str] = ()
    ) -> str | None:
        """Choose the replica for a request.

        Args:
            prompt_tokens: The length of the prompt.
            offers: The answers by replica. Replicas without an answer are not chosen.
            session: The session of the request, "" for none.
            without: Replicas that were tried already.

        Returns:
            The replica; None if no replica that answered accepts it.
        """
        left_out = {*without}
        ready = [name for name in self.names if name in offers and name not in left_out and offers[name].found.ready]
        if not ready:
            return None
        known = [name for name in ready if offers[name].found.known]
        chosen = known[0] if known else self._best(prompt_tokens, offers, ready, session)
        self._turn = (self.names.index(chosen) + 1) % len(self.names)
        found = offers[chosen].found
        number = next(self._numbers)
        if self._open:
            self._decided[chosen].append((number, 0 if known else max(0, prompt_tokens - found.cached_tokens)))
        return chosen

    def score(self, name: str, prompt_tokens: int, offer: Offer) -> int:
        """Return the work that the request waits for there, in tokens."""
        found, since = offer.found, [tokens for at, tokens in self._decided[name] if at > offer.question]
        uncached = max(0, prompt_tokens - found.cached_tokens)
        rows = found.running + found.pending + len(since)
        # Tokens without room wait until another request ends.
        lacking = max(0, uncached + sum(since) - found.room_tokens)
        full = max(0, found.pending + len(since) + 1 - found.rows_free) if found.rows_free <= len(since) else 0
        return uncached + found.queued_tokens + sum(since) + ROW_TOKENS * (rows + full) + lacking

    def _best(self, prompt_tokens: int, offers: Mapping[str, Offer], ready: list[str], session: str) -> str:
        size = len(self.names)
        turns = {name: (self.names.index(name) - self._turn) % size for name in ready}
        if self._policy == ROUND_ROBIN:
            return min(ready, key=turns.__getitem__)
        preferred = max(ready, key=lambda name: weight(session, name)) if session else ""

        def rank(name: str) -> tuple[int, int, int]:
            found = offers[name].found
            score = self.score(name, prompt_tokens, offers[name]) - SESSION_TOKENS * (name == preferred)
            return score, found.running + found.pending, turns[name]

        return min(ready, key=rank)

    @property
    def remembered(self) -> int:
        """Return the number of decisions that are kept."""
        return sum(map(len, self._decided.values()))


def weight(session: str, name: str) -> int:
    """Return the weight of a replica for a session; the highest is preferred.

    If a replica leaves, only its own sessions move.
    """
    return int.from_bytes(hashlib.blake2b(f"{session}\n{name}".encode(), digest_size=8).digest(), "little")
