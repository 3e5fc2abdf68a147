"""Which requests of a batch have an outcome, and the outcomes that are not written yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .ledger import Ledger
from .outcomes import ranges
from .records import changed

COMMIT_S = 0.25  # how long an outcome may wait to be written, so that several share a transaction
COMMIT_BYTES = 1 << 20


class Progress:
    """The progress of a batch. Requests are numbered from 0 in the order of the input file.

    Args:
        ledger: Where it is written down.
        written: Called when outcomes were written.

    Attributes:
        next: The first request without a written outcome.
        done: Later requests with one.
        read_to: The offset in the input file up to which requests were begun.
        held_bytes: The bytes of the requests that run, and of outcomes that are not written yet.
    """

    def __init__(self, ledger: Ledger, written: Callable[[], None]) -> None:
        record = ledger.record
        self._ledger, self._written = ledger, written
        self.next, self.read_to = record.next, record.at
        self.done = {number for first, last in record.done for number in range(first, last + 1)}
        self.held_bytes = 0
        self._starts: dict[int, int] = {}  # the offset of each request that was begun
        self._outcomes: list[tuple[int, bytes, bool]] = []
        self._outcome_bytes = 0
        self._last = False

    def begin(self, number: int, at: int, size: int) -> None:
        """Note that a request begins, with the offset and the size of its line."""
        self._starts[number] = at
        self.held_bytes += size

    def add(self, number: int, size: int, outcome: bytes, *, good: bool) -> None:
        """Take the outcome of a request.

        Args:
            number: The request.
            size: The size of its line.
            outcome: A line for an output file.
            good: Whether it is an answer.
        """
        self._outcomes.append((number, outcome, good))
        self._outcome_bytes += len(outcome)
        self.held_bytes += len(outcome) - size

    def finish(self) -> None:
        """Let `commit_each` end when all outcomes are written."""
        self._last = True

    async def commit_each(self) -> None:
        """Write outcomes soon after they came, until `finish`.

        Raises:
            BatchLost: The batch was changed by another process.
            CapacityExceeded: The tenant has no room left.
        """
        now = asyncio.get_running_loop().time
        while True:
            while not self._outcomes:
                if self._last:
                    return
                await asyncio.sleep(COMMIT_S / 8)
            until = now() + COMMIT_S
            while not self._last and self._outcome_bytes < COMMIT_BYTES and now() < until:
                await asyncio.sleep(COMMIT_S / 8)
            await self._commit()

    async def _commit(self) -> None:
        """Append the outcomes to the output, and note in the same transaction that they are there."""
        outcomes, self._outcomes, self._outcome_bytes = self._outcomes, [], 0
        self.done.update(number for number, _, _ in outcomes)
        while self.next in self.done:
            self.done.discard(self.next)
            self._starts.pop(self.next, None)
            self.next += 1
        record = self._ledger.record
        good = sum(is_good for _, _, is_good in outcomes)
        counts = changed(
            record.counts,
            completed=record.counts.completed + good,
            failed=record.counts.failed + len(outcomes) - good,
        )
        await self._ledger.append(
            changed(
                record,
                next=self.next,
                at=self._starts.get(self.next, self.read_to),
                done=ranges(self.done),
                counts=counts,
            ),
            b"".join(line for _, line, is_good in outcomes if is_good),
            b"".join(line for _, line, is_good in outcomes if not is_good),
        )
        self.held_bytes -= sum(len(line) for _, line, _ in outcomes)
        self._written()
