"""The batches that this process works on: claimed from the storage, and given back when the process stops."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from kvforge.gateway.config import Settings
from kvforge.gateway.generate.service import Service
from kvforge.gateway.storage import Claim, Document, Release, Renew, StorageFailed
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.steady_clock import monotonic
from kvforge.protocol.steady_timeout import steady_timeout

from .files import Files
from .records import BATCH, BATCH_RECORD, CANCELLING
from .requests import Requests
from .room import Room
from .run import BatchRun

RUNS_MAX = 4
OVERDUE_S = 60.0  # between two looks for batches of models that are not served
OVERDUE_READ_MAX = 256
LOOK_S = 0.05
LOAD_S = 1.0
log = logging.getLogger(__name__)


class Runner:
    """Claims batches and runs them.

    Args:
        service: The connection to the coordinator.
        files: All files.
        settings: The gateway's settings.

    Attributes:
        room: How many lines run at once.
        runs: By tenant and id.
        count: Called with the outcome of each request: whether it is an answer.
        share: Called with the lines that run in this process; returns those of all processes of the port.
    """

    def __init__(self, service: Service, files: Files, settings: Settings) -> None:
        self._service, self._files = service, files
        self._lease_s = settings.storage.lease_s
        self._owner = f"batches-{secrets.token_hex(8)}"
        self.room = Room(settings.batches.in_flight_max, settings.batches.beside_share)
        self._requests = Requests(service, settings, self.room)
        self.runs: dict[tuple[str, str], BatchRun] = {}
        self._wake = asyncio.Event()
        self._failed = False
        self._look_overdue_at = 0.0
        self.count: Callable[[bool], None] = lambda _: None
        self.share: Callable[[int], int] = lambda used: used

    def wake(self) -> None:
        """Look for batches at once."""
        self._wake.set()

    async def keep(self) -> None:
        """Claim and run batches until cancelled."""
        measuring = asyncio.ensure_future(self._measure())
        try:
            while True:
                self._wake.clear()
                try:
                    await self._look()
                    await self._end_overdue()
                    self._failed = False
                except StorageFailed as error:
                    if not self._failed:
                        log.warning("batches wait for the storage: %s", error.message)
                    self._failed = True
                except KvforgeError as error:
                    log.warning("cannot look for batches: %s", error.message)
                except Exception:
                    log.exception("internal error while looking for batches")
                with suppress(TimeoutError):  # asyncio.wait_for of Python 3.11 may swallow a cancellation
                    async with steady_timeout(self._lease_s / 3):
                        await self._wake.wait()
        finally:
            measuring.cancel()
            await asyncio.wait((measuring,))

    async def stop(self, tenant: str, name: str) -> None:
        """Stop a batch that was cancelled, if it runs here, and claim it again for its end."""
        if (run := self.runs.get((tenant, name))) is not None:
            await run.close(cancel=True)
        self.wake()

    async def close(self) -> None:
        """Give all batches back. Their requests go on, and the next owner joins them."""
        for run in tuple(self.runs.values()):
            await run.close()
        with suppress(KvforgeError):
            if self._files.storage.exists:
                await self._files.storage.apply(Release(owner=self._owner))

    async def _look(self) -> None:
        if not self._files.storage.exists:
            return
        if self.runs:
            await self._files.storage.apply(Renew(owner=self._owner, lease_s=self._lease_s))
        if self._service.reason or (places := RUNS_MAX - len(self.runs)) <= 0:
            return
        group = self._service.known.info.name
        claim = Claim(kind=BATCH, groups=[group], owner=self._owner, lease_s=self._lease_s, limit=places)
        for document in await self._claimed(claim):
            former = self.runs.get((document.tenant, document.id))
            if former is not None and former.version == document.version:
                continue  # its lease had run out, and is ours again
            if former is not None:
                await former.close(cancel=document.state == CANCELLING)
            self._start(document)

    async def _end_overdue(self) -> None:
        """Start the ends of expired and cancelled batches whose model no gateway serves."""
        if not self._files.storage.exists or monotonic() < self._look_overdue_at:
            return
        self._look_overdue_at = monotonic() + OVERDUE_S
        claim = Claim(kind=BATCH, owner=self._owner, lease_s=self._lease_s, limit=OVERDUE_READ_MAX)
        others, started = list[tuple[str, str, str]](), 0
        for document in await self._claimed(claim):
            if (document.tenant, document.id) in self.runs:
                continue  # its lease had run out, and is ours again
            record = BATCH_RECORD.decode(document.body)
            if started < RUNS_MAX and (record.status == CANCELLING or record.expires_at <= time.time()):
                self._start(document)
                started += 1
            else:
                others.append((document.tenant, document.kind, document.id))
        if others:
            await self._files.storage.apply(Release(owner=self._owner, keys=others))
        if started == RUNS_MAX:  # there may be more
            self._look_overdue_at = 0.0

    async def _claimed(self, claim: Claim) -> list[Document]:
        (documents,) = await self._files.storage.apply(claim)
        assert isinstance(documents, list)
        return [document for document in documents if isinstance(document, Document)]

    def _start(self, document: Document) -> None:
        run = BatchRun(
            document, self._files, self._requests, self.room, self.count, owner=self._owner, lease_s=self._lease_s
        )
        self.runs[run.key] = run
        run.task.add_done_callback(lambda _: self._ended(run))

    def _ended(self, run: BatchRun) -> None:
        if self.runs.get(run.key) is run:
            del self.runs[run.key]
        self.wake()

    async def _measure(self) -> None:
        """Adjust the room to the load of the service while batches run."""
        others = 0
        while True:
            began, used_s = monotonic(), time.process_time()
            await asyncio.sleep(LOOK_S)
            busy = (time.process_time() - used_s) / (monotonic() - began)
            if not self.runs:
                self.share(0)
                continue
            used = self.share(self.room.used)
            load = await self._service.load(LOAD_S)
            started = self._service.started - self._requests.started
            if started != others:  # some of them may have ended between two looks
                self.room.meet_others(monotonic())
            others = started
            if load is not None:
                self.room.adjust(load, max(used, self.share(self.room.used)), monotonic(), busy)
                for run in self.runs.values():
                    run.wake()
