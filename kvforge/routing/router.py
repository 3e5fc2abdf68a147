"""Chooses a replica for each request.

A score is in tokens of prompts that are computed before the request's first token, so the lowest is best:

    uncached tokens of its own + tokens of prompts before it + ROW_TOKENS for each request that is there already

What a replica says is as old as its answer, so what was decided since the question is added: requests that come
together do not all go to the one that looked idle. A question that was asked after a decision needs no such sum: over
one connection the coordinator has that request before the question. So nothing is kept for longer than the oldest
question that is still open, and nothing that a replica says is believed twice.

Why a hot prefix does not make a hot spot: whoever holds it pays for each request that it has, and whoever does not hold
it pays the prefix once. The gap between the two is never larger than the prefix, and then the other holds it too.

A session prefers one replica, which follows from its name and from who is there (rendezvous hashing: Thaler and
Ravishankar, 1998): so it needs no memory, and is the same in every process. The preference is worth SESSION_TOKENS and
no more.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from kvforge.protocol.messages import PrefixFound

PREFIX, ROUND_ROBIN = POLICIES = ("prefix", "round-robin")
# What a request that runs costs one that joins it. On an H200 a row makes each decode step of an 8B model about 40 us
# longer, which is 1.7 tokens of a prompt, and an answer has some hundred steps.
ROW_TOKENS = 128
SESSION_TOKENS = 512
QUESTIONS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Offer:
    """What a replica answered to the question with this number."""

    question: int
    found: PrefixFound


class Router:
    """Remembers what was decided and is not in the answers yet. names: the replicas."""

    def __init__(self, names: Iterable[str], policy: str = PREFIX) -> None:
        assert policy in POLICIES, policy
        self.names, self._policy = tuple(names), policy
        self._numbers = count(1)
        self._open: dict[int, None] = {}
        self._last = 0
        # By replica: the number of a decision, and the uncached tokens of what was sent there.
        self._decided: dict[str, deque[tuple[int, int]]] = {name: deque() for name in self.names}
        self._turn = 0

    def use(self, names: Iterable[str]) -> None:
        """Others are there from now on; of those that stay, it remembers what was decided."""
        self.names = tuple(names)
        self._decided = {name: self._decided.get(name, deque()) for name in self.names}
        self._turn %= len(self.names)

    def ask(self) -> int:
        """The number of a question that is put to the replicas now. `close` it, whatever becomes of it."""
        number = self._last = next(self._numbers)
        self._open[number] = None
        if len(self._open) > QUESTIONS_MAX:  # whoever asked has forgotten it
            del self._open[next(iter(self._open))]
        return number

    def close(self, question: int) -> None:
        """Nothing is decided by the answers to this question any more."""
        self._open.pop(question, None)
        oldest = next(iter(self._open), None)
        for decided in self._decided.values():
            while decided and (oldest is None or decided[0][0] < oldest):
                decided.popleft()

    def choose(
        self, prompt_tokens: int, offers: Mapping[str, Offer], *, session: str = "", without: Iterable[str] = ()
    ) -> str | None:
        """The replica that gets the request, or None: none of those that answered takes it.

        offers: the answers, by replica; who has not answered is not chosen. session: what belongs together; "":
        nothing does. without: replicas that were tried already.
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
        """What the request waits for there, in tokens."""
        found, since = offer.found, [tokens for at, tokens in self._decided[name] if at > offer.question]
        uncached = max(0, prompt_tokens - found.cached_tokens)
        rows = found.running + found.pending + len(since)
        # What there is no room for waits until something ends.
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
        """How many decisions are kept."""
        return sum(map(len, self._decided.values()))


def weight(session: str, name: str) -> int:
    """Of a replica for a session: the highest is preferred. Where one goes, only its own sessions go elsewhere."""
    return int.from_bytes(hashlib.blake2b(f"{session}\n{name}".encode(), digest_size=8).digest(), "little")
