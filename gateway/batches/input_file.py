"""The input file of a batch, read also beyond failures of the storage."""

from __future__ import annotations

from collections.abc import AsyncIterator

from .files import Files
from .ledger import Ledger
from .lines import lines
from .records import FILE, NoSuchStored
from .retries import AWAY, Backoff


class InputFile:
    """The input file of a batch.

    Args:
        files: All files.
        ledger: The batch.
        line_bytes_max: The longest line.
    """

    def __init__(self, files: Files, ledger: Ledger, line_bytes_max: int) -> None:
        self._files, self._ledger, self._line_bytes_max = files, ledger, line_bytes_max

    def lines(self, at: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Yield the lines from an offset on, several at a time, each with its offset.

        Raises:
            NoSuchStored: The file was deleted.
            LineTooLong: A line is too long.
        """
        return lines(self._content(at), self._line_bytes_max, at)

    async def _content(self, at: int) -> AsyncIterator[bytes]:
        tenant, name, backoff = self._ledger.tenant, self._ledger.record.input_file_id, Backoff(self._ledger.id)
        while True:
            try:
                _, record = await self._files.get(tenant, name)
                async for piece in self._files.content(tenant, name, at):
                    yield piece
                    at += len(piece)
                    backoff.reset()
                if at < record.bytes:
                    raise NoSuchStored(FILE, name)
                return
            except AWAY as error:
                await backoff.storage(error)
