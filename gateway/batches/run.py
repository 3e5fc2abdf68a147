"""One batch: checked, worked through and written down, by one process at a time.

Invariants:

- The outcome of a request is appended to an output file in the transaction that notes it as done in the batch. A kill
  at any moment loses no outcome and doubles none: the next owner does what is not noted.
- A request has the idempotency key of its batch and number. One that ran when its gateway died is joined, not repeated.
- Memory is bounded: at most WINDOW requests behind the first one without an outcome, and HELD_BYTES of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from kvforge.gateway.access import Caller
from kvforge.gateway.generate.generation import Generation
from kvforge.gateway.storage import Document
from kvforge.protocol.errors import (
    CapacityExceeded,
    Conflict,
    InternalError,
    KvforgeError,
    QueueFull,
    RequestNotFound,
    StateLost,
    Unavailable,
)

from .dropping import drop_rest
from .files import Files
from .input_file import InputFile
from .ledger import LOST, BatchLost, Ledger
from .lines import LINE, LineTooLong, Validation
from .outcomes import answered, name_of, refused
from .progress import Progress
from .records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    IN_PROGRESS,
    VALIDATING,
    NoSuchStored,
    Problem,
)
from .requests import Requests
from .retries import Backoff
from .room import Room

WINDOW = 8192
READY = 16  # requests that are prepared while all places are taken
HELD_BYTES = 64 << 20
WATCH_S = 1.0
# The coordinator, the way to it, its state, or room in a queue is lost: the same request is submitted again.
AGAIN = (Unavailable, StateLost, RequestNotFound, QueueFull)
log = logging.getLogger(__name__)


class Stopped(Exception):
    """No further request is to be started."""


class BatchRun:
    """A batch that this process works on.

    Args:
        document: Its document, as it was claimed.
        files: All files.
        requests: Runs its requests.
        room: How many may run.
        count: Called with each outcome: whether it is an answer.
        owner: The name of this process.
        lease_s: How long it owns the batch after the last renewal.

    Attributes:
        task: Ends with the batch, or when it is stopped.
    """

    def __init__(
        self,
        document: Document,
        files: Files,
        requests: Requests,
        room: Room,
        count: Callable[[bool], None],
        *,
        owner: str,
        lease_s: float,
    ) -> None:
        self._ledger = Ledger(document, files, owner, lease_s)
        self._news = asyncio.Event()
        self._progress = Progress(self._ledger, self._news.set)
        self._input = InputFile(files, self._ledger, requests.line_bytes_max)
        self._files, self._requests, self._room, self._count = files, requests, room, count
        self._caller = Caller(name=self._ledger.record.caller, tenant=document.tenant)
        self._stopping = ""  # EXPIRED, CANCELLING or LOST
        self._helpers: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: set[Generation] = set()
        self.task = asyncio.ensure_future(self._run())

    @property
    def key(self) -> tuple[str, str]:
        """The tenant and the id."""
        return self._ledger.tenant, self._ledger.id

    @property
    def version(self) -> int:
        """The version of its document."""
        return self._ledger.version

    async def close(self, *, cancel: bool = False) -> None:
        """Stop, without an end of the batch.

        Args:
            cancel: Cancel the requests that run; otherwise they go on, for the next owner.
        """
        if cancel:
            self._cancel_requests()
        self.task.cancel()
        await asyncio.wait((self.task,))

    def wake(self) -> None:
        """Look again whether a request may be prepared: the room has changed."""
        self._news.set()

    # --------------------------------------------------------------------------------------------------------- stages

    async def _run(self) -> None:
        watching, ledger = asyncio.ensure_future(self._watch()), self._ledger
        try:
            await self._stages()
        except BatchLost:
            log.info("batch %s goes on in another process", ledger.id)
        except Exception as error:
            log.exception("internal error in batch %s", ledger.id)
            with contextlib.suppress(KvforgeError, BatchLost):
                problem = Problem(code="internal_error", message=f"{type(error).__name__}: {error}"[:500])
                await ledger.end(FAILED, [problem])
        finally:
            every = {watching, *self._helpers, *self._tasks}
            for task in every:
                task.cancel()
            await asyncio.wait(every)

    async def _stages(self) -> None:
        ledger = self._ledger
        try:
            if ledger.record.status == VALIDATING and not await self._validate():
                return
            if ledger.record.status == IN_PROGRESS and not ledger.expired:
                await self._work()
            if ledger.record.status == CANCELLING:
                await drop_rest(ledger, self._input, CANCELLED)
            elif ledger.expired and ledger.undecided:
                await drop_rest(ledger, self._input, EXPIRED)
            else:
                await ledger.end(COMPLETED)
        except CapacityExceeded as error:
            self._cancel_requests()
            await ledger.end(FAILED, [Problem(code=error.code, message=error.message)])
        except NoSuchStored:
            self._cancel_requests()
            problem = f"the input file {ledger.record.input_file_id} was deleted"
            await ledger.end(FAILED, [Problem(code="input_file_deleted", message=problem)])

    async def _validate(self) -> bool:
        """Check the input file. Return whether the batch goes on."""
        validation = Validation(self._ledger.record.endpoint, self._files.limits.lines_max)
        try:
            async for several in self._input.lines(0):
                for _, line in several:
                    validation.check(line)
                if validation.over or self._stopping:
                    break
        except LineTooLong:
            validation.too_long(self._requests.line_bytes_max)
        if self._stopping == EXPIRED:
            await self._ledger.end(EXPIRED)
            return False
        self._check_stopped()
        validation.end()
        if validation.problems:
            await self._ledger.end(FAILED, validation.problems)
            return False
        await self._ledger.begin(validation.total)
        return True

    async def _work(self) -> None:
        """Run the requests until all have an outcome, or it is time to stop."""
        committing = asyncio.ensure_future(self._progress.commit_each())
        feeding = asyncio.ensure_future(self._feed())
        self._helpers |= {committing, feeding}
        await asyncio.wait((feeding, committing), return_when=asyncio.FIRST_COMPLETED)
        if committing.done():  # it ends first only with an error
            committing.result()
        with contextlib.suppress(Stopped):
            await feeding
        if self._stopping:
            if self._stopping != LOST:
                self._cancel_requests()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        self._check_stopped()
        self._progress.finish()
        await committing

    # ------------------------------------------------------------------------------------------------------- requests

    async def _feed(self) -> None:
        progress, number = self._progress, self._progress.next
        async for several in self._input.lines(progress.read_to):
            for at, line in several:
                if not line:
                    continue
                if number not in progress.done:
                    await self._allowed(number, len(line))
                    progress.begin(number, at, len(line))
                    task = asyncio.ensure_future(self._line(number, line))
                    self._tasks.add(task)
                    task.add_done_callback(self._ended)
                number += 1
                progress.read_to = at + len(line)
        while self._tasks:
            await self._wait()

    async def _allowed(self, number: int, size: int) -> None:
        """Wait until a request may be prepared."""
        progress = self._progress
        while True:
            if self._stopping:
                raise Stopped
            few = len(self._tasks) < self._room.limit + READY and number - progress.next < WINDOW
            if few and (not progress.held_bytes or progress.held_bytes + size <= HELD_BYTES):
                return
            await self._wait()

    async def _wait(self) -> None:
        if self._stopping:
            raise Stopped
        self._news.clear()
        await self._news.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._news.set()

    async def _line(self, number: int, line: bytes) -> None:
        """Run one request to its outcome."""
        batch = self._ledger.id
        request, name = LINE.decode(line), name_of(batch, number)
        good = False
        try:
            request_id, content = await self._answered(number, bytes(request.body))
            outcome = answered(name, request.custom_id, request_id, content)
            good = True
        except KvforgeError as error:
            outcome = refused(name, request.custom_id, error)
        except Exception as error:
            log.exception("internal error in line %d of batch %s", number + 1, batch)
            outcome = refused(name, request.custom_id, InternalError(f"{type(error).__name__}: {error}"))
        self._progress.add(number, len(line), outcome, good=good)
        self._count(good)

    async def _answered(self, number: int, content: bytes) -> tuple[str, bytes]:
        ledger, backoff = self._ledger, Backoff(self._ledger.id)
        while True:
            try:
                return await self._requests.answer(
                    ledger.record.endpoint, content, self._caller, f"{ledger.id}:{number}", self._running
                )
            except AGAIN as error:
                log.debug("line %d of batch %s is submitted again: %s", number + 1, ledger.id, error.message)
            except Conflict as error:
                # Another process follows the request if it took the batch over.
                if type(error) is not Conflict or not await self._is_lost():
                    raise
            await backoff.rest()

    def _cancel_requests(self) -> None:
        for generation in self._running:
            for answer in generation.answers:
                if not answer.stream.done:
                    answer.stream.cancel()

    # ------------------------------------------------------------------------------------------------------- watching

    async def _watch(self) -> None:
        """Notice that the batch expires, or that it was cancelled or taken over."""
        while not self._stopping:
            left_s = self._ledger.record.expires_at - time.time()
            await asyncio.sleep(min(WATCH_S, max(0.01, left_s)))
            if self._ledger.expired:
                self._stop(EXPIRED)
            else:
                await self._is_lost()

    async def _is_lost(self) -> bool:
        """Return whether the batch is another process's. Then this run stops."""
        why = await self._ledger.why_lost()
        if why:
            self._stop(why)
        return bool(why)

    def _stop(self, why: str) -> None:
        self._stopping = self._stopping or why
        self._news.set()

    def _check_stopped(self) -> None:
        if self._stopping in (LOST, CANCELLING):
            raise BatchLost
