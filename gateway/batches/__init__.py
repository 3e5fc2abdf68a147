"""OpenAI's files and batches: JSON lines in, JSON lines out, below all interactive work.

Both live in the storage (`kvforge.gateway.storage`): a file as one document with its content in chunks, a batch as one
document that belongs to one gateway process at a time. `records.py` has what is stored. `runner.py` claims batches,
`run.py` works one through, and `ledger.py` writes it down, so that it goes on after any death.
"""

from __future__ import annotations

from starlette.routing import Route

from kvforge.gateway.config import Settings
from kvforge.gateway.generate.service import Service
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.storage import Storage

from .batch_routes import BatchRoutes
from .file_routes import FileRoutes
from .files import Files
from .runner import Runner


class Batches:
    """Files and batches of one gateway process.

    Args:
        service: The connection to the coordinator.
        storage: Where both are.
        settings: The gateway's settings.

    Attributes:
        files: The files.
        runner: Works on batches while its `keep` runs.
    """

    def __init__(self, service: Service, storage: Storage, settings: Settings) -> None:
        self.files = Files(storage, settings)
        self.runner = Runner(service, self.files, settings)
        self._batches = BatchRoutes(service, self.files, self.runner, settings)
        self._files = FileRoutes(self.files, settings)

    def routes(self, guard: Guard) -> list[Route]:
        """Return all routes."""
        return [*self._files.routes(guard), *self._batches.routes(guard)]


__all__ = ["Batches"]
