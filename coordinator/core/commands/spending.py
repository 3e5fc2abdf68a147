"""So many tokens a second for an entry of [access]: those that it sends, and those that are generated for it.

A command is refused while more was used than its time allows, with the time after which it is not; so one command may
be of any size, and is paid for afterwards. What a request may generate is counted when it is accepted, and what it did
not generate is given back when it has ended: an entry that starts many at once does not get them for nothing.
"""

from __future__ import annotations

from typing import Any

from kvforge.protocol.errors import RateExceeded
from kvforge.protocol.messages import Accepted, Append, CreateSequence, Message, Submit

from ..clock import Clock
from ..requests.lifecycle import RequestTable
from ..rights import Access

BURST_US = 1_000_000  # what was not used in so long may be used at once
Costly = Submit | CreateSequence | Append


class Spending:
    """What each entry has used. Times in microseconds."""

    def __init__(self, clock: Clock, requests: RequestTable) -> None:
        self._clock, self._requests = clock, requests
        self._paid_us: dict[str, int] = {}  # by entry: up to then what it was allowed is used
        self._reserved: dict[str, dict[int, int]] = {}  # by entry: tokens that each request may still generate

    def check(self, access: Access) -> None:
        """Raises RateExceeded while the entry has used more than its time allows."""
        over_us = self._paid_us.get(access.name, 0) - self._unused_us(access, self._ended(access)) - self._clock.now_us
        if over_us > 0:
            raise RateExceeded(access.tokens_per_s, -(-over_us // 1000), access.owner)

    def done(self, access: Access, message: Costly, reply: Message) -> None:
        """A command was carried out."""
        tokens = message.prompt.size if isinstance(message, Submit) else message.tokens.size
        reserved = self._reserved.setdefault(access.name, {})
        paid_us = self._paid_us.get(access.name, 0) - self._unused_us(access, ended := self._ended(access))
        for request_id in ended:
            del reserved[request_id]
        if isinstance(message, Submit) and isinstance(reply, Accepted):
            if reply.repeated:
                tokens = 0
            else:
                tokens += reply.count * message.max_tokens
                made = range(reply.request_id, reply.request_id + reply.count)
                reserved.update(dict.fromkeys(made, message.max_tokens))
        since_us = max(paid_us, self._clock.now_us - BURST_US)
        self._paid_us[access.name] = since_us + _time_us(access, tokens)

    def _ended(self, access: Access) -> list[int]:
        """Its requests that have ended since the last command that was carried out."""
        return [
            request_id for request_id in self._reserved.get(access.name, ()) if request_id not in self._requests.live
        ]

    def _unused_us(self, access: Access, ended: list[int]) -> int:
        """What they did not generate, in time. One that is forgotten already has taken longer than it could spare."""
        unused = 0
        for request_id in ended:
            if (request := self._requests.known(request_id)) is not None:
                unused += self._reserved[access.name][request_id] - request.generated
        return _time_us(access, unused)


def _time_us(access: Access, tokens: int) -> int:
    return round(tokens * 1_000_000 / access.tokens_per_s)


def is_costly(message: Any) -> bool:
    """Whether tokens are counted for it."""
    return isinstance(message, Costly)
