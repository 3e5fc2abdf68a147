"""Token rate of an access entry: tokens that it sends, and tokens generated for it.

A command is refused while the entry has used more than its rate allows; the refusal has the time to wait. A single
command may therefore be of any size and is paid for afterwards. An accepted request is charged its maximum, and what
it did not generate is refunded at its end, so that starting many requests at once gains nothing.
"""

from __future__ import annotations

from typing import Any

from kvforge.protocol.errors import RateExceeded
from kvforge.protocol.messages import Accepted, Append, CreateSequence, Message, Submit

from ..clock import Clock
from ..requests.table import RequestTable
from ..rights import Access

BURST_US = 1_000_000  # unused time that may be saved up
Costly = Submit | CreateSequence | Append


class Spending:
    """Usage of each access entry, in microseconds of its rate."""

    def __init__(self, clock: Clock, requests: RequestTable) -> None:
        self._clock, self._requests = clock, requests
        self._paid_us: dict[str, int] = {}  # by entry: the allowance is used up to this time
        self._reserved: dict[str, dict[int, int]] = {}  # by entry: tokens reserved for each live request

    def check(self, access: Access) -> None:
        """Check that the entry has not used more than its rate allows.

        Raises:
            RateExceeded: It has; the error has the time to wait.
        """
        over_us = self._paid_us.get(access.name, 0) - self._unused_us(access, self._ended(access)) - self._clock.now_us
        if over_us > 0:
            raise RateExceeded(access.tokens_per_s, -(-over_us // 1000), access.owner)

    def done(self, access: Access, message: Costly, reply: Message) -> None:
        """Charge a command that was carried out."""
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
        """Return the entry's requests that ended since its last charged command."""
        return [
            request_id for request_id in self._reserved.get(access.name, ()) if request_id not in self._requests.live
        ]

    def _unused_us(self, access: Access, ended: list[int]) -> int:
        """Return the time to refund for ended requests. A forgotten request is not refunded."""
        unused = 0
        for request_id in ended:
            if (request := self._requests.known(request_id)) is not None:
                unused += self._reserved[access.name][request_id] - request.generated
        return _time_us(access, unused)


def _time_us(access: Access, tokens: int) -> int:
    return round(tokens * 1_000_000 / access.tokens_per_s)


def is_costly(message: Any) -> bool:
    """Return whether the message uses tokens."""
    return isinstance(message, Costly)
