"""The end of a batch before all of its requests have run."""

from __future__ import annotations

from .input_file import InputFile
from .ledger import Ledger
from .lines import LINE
from .outcomes import dropped, name_of, ranges
from .progress import COMMIT_BYTES
from .records import BatchRecord, changed


async def drop_rest(ledger: Ledger, source: InputFile, status: str) -> None:
    """Write an error line for each request without an outcome, then end the batch.

    Args:
        ledger: The batch.
        source: Its input file.
        status: CANCELLED or EXPIRED.

    Raises:
        BatchLost: The batch was changed by another process.
        CapacityExceeded: The tenant has no room left.
    """
    record = ledger.record
    if not record.output_file_id:  # its input was not checked yet
        await ledger.end(status)
        return
    done = {number for first, last in record.done for number in range(first, last + 1)}
    number, end, text, count = record.next, record.at, bytearray(), 0
    async for several in source.lines(record.at):
        for at, line in several:
            if not line:
                continue
            if number not in done:
                text += dropped(name_of(ledger.id, number), LINE.decode(line).custom_id, status)
                count += 1
            number += 1
            end = at + len(line)
        if len(text) >= COMMIT_BYTES:
            await ledger.append(_without(ledger.record, number, end, done, count), b"", bytes(text))
            text, count = bytearray(), 0
    if text:
        await ledger.append(_without(ledger.record, number, end, done, count), b"", bytes(text))
    await ledger.end(status)


def _without(record: BatchRecord, number: int, at: int, done: set[int], count: int) -> BatchRecord:
    """Return the record once the requests before `number` were dropped, `count` of them since the last one."""
    counts = changed(record.counts, failed=record.counts.failed + count)
    return changed(record, next=number, at=at, done=ranges(one for one in done if one >= number), counts=counts)
