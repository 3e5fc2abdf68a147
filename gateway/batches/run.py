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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvforge.gateway.access import Caller
from kvforge.gateway.generate.generation import Generation
from kvforge.gateway.http.errors import openai_error, status_of
from kvforge.gateway.storage import Append, Delete, Document, Entry, Get, Operation, Put, StorageFailed
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

from .files import Files
from .lines import LINE, LineTooLong, Validation, lines
from .records import (
    BATCH,
    BATCH_RECORD,
    CANCELLED,
    CANCELLING,
    CHUNKS,
    COMPLETED,
    EXPIRED,
    FAILED,
    FILE,
    FINALIZING,
    IN_PROGRESS,
    OUTPUT_PURPOSE,
    UPLOADING,
    VALIDATING,
    BatchRecord,
    Counts,
    FileRecord,
    NoSuchStored,
    Problem,
    changed,
    encode,
    new_id,
)
from .requests import Requests

if TYPE_CHECKING:
    from .room import Room

COMMIT_S = 0.25  # how long an outcome may wait to be written, so that several share a transaction
COMMIT_BYTES = 1 << 20
WINDOW = 8192
READY = 16  # requests that are prepared while all places are taken
HELD_BYTES = 64 << 20
WATCH_S = 1.0
LOST_BATCH = "lost"
AGAIN_S, AGAIN_MAX_S = 0.1, 5.0
# The coordinator, the way to it, its state, or room in a queue is lost: the same request is submitted again.
LOST = (Unavailable, StateLost, RequestNotFound, QueueFull)
CODES = {
    CANCELLED: ("batch_cancelled", "This request was not executed before the batch was cancelled."),
    EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
}
TIMES = {FAILED: "failed_at", COMPLETED: "completed_at", EXPIRED: "expired_at", CANCELLED: "cancelled_at"}
T = TypeVar("T")
log = logging.getLogger(__name__)


class BatchLost(Exception):
    """Another process owns the batch, or a client changed it."""


class Stopped(Exception):
    """No further request is to be started."""


class BatchRun:
    """A batch that this process owns.

    Args:
        document: Its document, as it was claimed.
        files: All files.
        requests: Runs its requests.
        room: How many may run.
        count: Called with each outcome: whether it is an answer.
        owner: The name of this process.
        lease_s: How long it owns the batch after the last renewal.

    Attributes:
        record: What is written down.
        version: Of its document.
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
        self.tenant, self.id, self._group = document.tenant, document.id, document.group
        self.version = document.version
        self.record: BatchRecord = BATCH_RECORD.decode(document.body)
        self._files, self._requests, self._room = files, requests, room
        self._count, self._owner, self._lease_s = count, owner, lease_s
        self._line_bytes_max = requests.line_bytes_max
        self._caller = Caller(name=self.record.caller, tenant=self.tenant)
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()
        self._stopping = ""  # EXPIRED, CANCELLING or LOST_BATCH
        self._fed = False  # no further outcomes come
        self._helpers: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: set[Generation] = set()
        self._held_bytes = 0
        # Outcomes that are not written yet: the number, the line, whether it is an answer.
        self._outcomes: list[tuple[int, bytes, bool]] = []
        self._outcome_bytes = 0
        self._next, self._read_to = self.record.next, self.record.at
        self._done = {number for first, last in self.record.done for number in range(first, last + 1)}
        self._starts: dict[int, int] = {}
        self.task = asyncio.ensure_future(self._run())

    @property
    def key(self) -> tuple[str, str]:
        """The tenant and the id."""
        return self.tenant, self.id

    async def close(self, *, cancel: bool = False) -> None:
        """Stop, without an end of the batch.

        Args:
            cancel: Cancel the requests that run; otherwise they go on, for the next owner.
        """
        if cancel:
            self._cancel_requests()
        self.task.cancel()
        await asyncio.wait((self.task,))

    # --------------------------------------------------------------------------------------------------------- stages

    async def _run(self) -> None:
        watching = asyncio.ensure_future(self._watch())
        try:
            await self._stages()
        except BatchLost:
            log.info("batch %s goes on in another process", self.id)
        except Exception as error:
            log.exception("internal error in batch %s", self.id)
            with contextlib.suppress(KvforgeError, BatchLost):
                problem = Problem(code="internal_error", message=f"{type(error).__name__}: {error}"[:500])
                await self._end(FAILED, [problem])
        finally:
            every = {watching, *self._helpers, *self._tasks}
            for task in every:
                task.cancel()
            await asyncio.wait(every)

    async def _stages(self) -> None:
        try:
            if self.record.status == VALIDATING and not await self._validate():
                return
            if self.record.status == IN_PROGRESS and not self._expired:
                await self._work()
            if self.record.status == CANCELLING:
                await self._drop_rest(CANCELLED)
            elif self._expired and self.record.counts.total > self._decided:
                await self._drop_rest(EXPIRED)
            else:
                await self._end(COMPLETED)
        except CapacityExceeded as error:
            self._cancel_requests()
            await self._end(FAILED, [Problem(code=error.code, message=error.message)])
        except NoSuchStored:
            self._cancel_requests()
            problem = f"the input file {self.record.input_file_id} was deleted"
            await self._end(FAILED, [Problem(code="input_file_deleted", message=problem)])

    @property
    def _expired(self) -> bool:
        return time.time() >= self.record.expires_at

    @property
    def _decided(self) -> int:
        return self.record.counts.completed + self.record.counts.failed

    async def _validate(self) -> bool:
        """Check the input file. Return whether the batch goes on."""
        validation = Validation(self.record.endpoint, self._files.limits.lines_max)
        try:
            async for several in self._input(0):
                for _, line in several:
                    validation.check(line)
                if validation.over or self._stopping:
                    break
        except LineTooLong:
            validation.too_long(self._line_bytes_max)
        if self._stopping == EXPIRED:
            await self._end(EXPIRED)
            return False
        self._check_stopped()
        validation.end()
        if validation.problems:
            await self._end(FAILED, validation.problems)
            return False
        now = int(time.time())
        record = changed(
            self.record,
            status=IN_PROGRESS,
            in_progress_at=now,
            counts=Counts(total=validation.total),
            output_file_id=new_id("file-"),
            error_file_id=new_id("file-"),
        )
        unseen = FileRecord(filename="", purpose=OUTPUT_PURPOSE, bytes=0, created_at=now, status=UPLOADING)
        outputs = (record.output_file_id, record.error_file_id)
        puts = [Put(tenant=self.tenant, kind=FILE, id=name, body=encode(unseen)) for name in outputs]
        await self._write(record, *puts)
        return True

    async def _work(self) -> None:
        """Run the requests until all have an outcome, or it is time to stop."""
        committing = asyncio.ensure_future(self._commit_each())
        feeding = asyncio.ensure_future(self._feed())
        self._helpers |= {committing, feeding}
        await asyncio.wait((feeding, committing), return_when=asyncio.FIRST_COMPLETED)
        if committing.done():  # it ends first only with an error
            committing.result()
        with contextlib.suppress(Stopped):
            await feeding
        if self._stopping:
            if self._stopping != LOST_BATCH:
                self._cancel_requests()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        self._check_stopped()
        self._fed = True
        await committing

    def _check_stopped(self) -> None:
        if self._stopping in (LOST_BATCH, CANCELLING):
            raise BatchLost

    async def _feed(self) -> None:
        number = self._next
        async for several in self._input(self._read_to):
            for at, line in several:
                if not line:
                    continue
                if number not in self._done:
                    await self._allowed(number, len(line))
                    self._starts[number] = at
                    self._held_bytes += len(line)
                    task = asyncio.ensure_future(self._line(number, line))
                    self._tasks.add(task)
                    task.add_done_callback(self._ended)
                number += 1
                self._read_to = at + len(line)
        while self._tasks:
            await self._wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._news.set()

    def wake(self) -> None:
        """Look again whether a request may be prepared: the room has changed."""
        self._news.set()

    async def _allowed(self, number: int, size: int) -> None:
        """Wait until a request may be prepared."""
        while True:
            if self._stopping:
                raise Stopped
            few = len(self._tasks) < self._room.limit + READY and number - self._next < WINDOW
            if few and (not self._held_bytes or self._held_bytes + size <= HELD_BYTES):
                return
            await self._wait()

    async def _wait(self) -> None:
        if self._stopping:
            raise Stopped
        self._news.clear()
        await self._news.wait()

    def _input(self, at: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        return lines(self._content(at), self._line_bytes_max, at)

    async def _content(self, at: int) -> AsyncIterator[bytes]:
        """Yield the input file from an offset on, also beyond failures of the storage."""
        wait_s = AGAIN_S
        while True:
            try:
                _, record = await self._files.get(self.tenant, self.record.input_file_id)
                async for piece in self._files.content(self.tenant, self.record.input_file_id, at):
                    yield piece
                    at += len(piece)
                    wait_s = AGAIN_S
                if at < record.bytes:
                    raise NoSuchStored(FILE, self.record.input_file_id)
                return
            except (StorageFailed, QueueFull) as error:
                log.warning("batch %s waits for the storage: %s", self.id, error.message)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, AGAIN_MAX_S)

    # ------------------------------------------------------------------------------------------------------- requests

    async def _line(self, number: int, line: bytes) -> None:
        """Run one request to its outcome."""
        request = LINE.decode(line)
        name = f"batch_req_{self.id.removeprefix('batch_')}_{number}"
        try:
            request_id, content = await self._answered(number, bytes(request.body))
            response = {"status_code": 200, "request_id": request_id, "body": msgspec.Raw(content)}
            good = True
        except KvforgeError as error:
            response = {"status_code": status_of(error), "request_id": name, "body": openai_error(error)}
            good = False
        except Exception as error:
            log.exception("internal error in line %d of batch %s", number + 1, self.id)
            failed = InternalError(f"{type(error).__name__}: {error}")
            response = {"status_code": 500, "request_id": name, "body": openai_error(failed)}
            good = False
        self._outcome(number, _outcome(name, request.custom_id, response=response), good=good)
        self._held_bytes -= len(line)

    async def _answered(self, number: int, content: bytes) -> tuple[str, bytes]:
        wait_s = AGAIN_S
        while True:
            try:
                return await self._requests.answer(
                    self.record.endpoint, content, self._caller, f"{self.id}:{number}", self._running
                )
            except LOST as error:
                log.debug("line %d of batch %s is submitted again: %s", number + 1, self.id, error.message)
            except Conflict as error:
                # Another process follows the request if it took the batch over.
                if type(error) is not Conflict or await self._is_owned():
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, AGAIN_MAX_S)

    def _outcome(self, number: int, line: bytes, *, good: bool) -> None:
        self._outcomes.append((number, line, good))
        self._outcome_bytes += len(line)
        self._held_bytes += len(line)
        self._count(good)

    def _cancel_requests(self) -> None:
        for generation in self._running:
            for answer in generation.answers:
                if not answer.stream.done:
                    answer.stream.cancel()

    # -------------------------------------------------------------------------------------------------------- writing

    async def _commit_each(self) -> None:
        """Write outcomes soon after they came, until none come any more."""
        now = asyncio.get_running_loop().time
        while True:
            while not self._outcomes:
                if self._fed:
                    return
                await asyncio.sleep(COMMIT_S / 8)
            until = now() + COMMIT_S
            while not self._fed and self._outcome_bytes < COMMIT_BYTES and now() < until:
                await asyncio.sleep(COMMIT_S / 8)
            await self._commit()

    async def _commit(self) -> None:
        """Append the outcomes to the output, and note in the same transaction that they are there."""
        outcomes, self._outcomes, self._outcome_bytes = self._outcomes, [], 0
        self._done.update(number for number, _, _ in outcomes)
        while self._next in self._done:
            self._done.discard(self._next)
            self._starts.pop(self._next, None)
            self._next += 1
        record = self.record
        good = sum(is_good for _, _, is_good in outcomes)
        record = changed(
            record,
            next=self._next,
            at=self._starts.get(self._next, self._read_to),
            done=ranges(self._done),
            counts=changed(
                record.counts,
                completed=record.counts.completed + good,
                failed=record.counts.failed + len(outcomes) - good,
            ),
        )
        await self._append(
            record,
            b"".join(line for _, line, is_good in outcomes if is_good),
            b"".join(line for _, line, is_good in outcomes if not is_good),
        )
        self._held_bytes -= sum(len(line) for _, line, _ in outcomes)
        self._news.set()

    async def _append(self, record: BatchRecord, output: bytes, errors: bytes) -> None:
        """Append to both output files, and write the record with their new sizes."""
        appends: list[Operation] = []
        for name, text in ((record.output_file_id, output), (record.error_file_id, errors)):
            if text:
                entry = Entry(f"{self.version:012d}", text)
                appends.append(Append(tenant=self.tenant, kind=FILE, id=name, name=CHUNKS, entries=[entry]))
        record = changed(
            record,
            output_bytes=record.output_bytes + len(output),
            error_bytes=record.error_bytes + len(errors),
        )
        await self._write(record, *appends)

    async def _write(self, record: BatchRecord, *operations: Operation) -> None:
        """Write the record together with other operations, as soon as the storage does it.

        Raises:
            BatchLost: The batch was changed by another process.
            CapacityExceeded: The tenant has no room left.
        """
        async with self._writing:
            put = Put(
                tenant=self.tenant,
                kind=BATCH,
                id=self.id,
                body=encode(record),
                group=self._group,
                state="" if record.over else record.status,
                keep_s=self._files.keep_s if record.over else 0.0,
                expect=self.version,
                owner="" if record.over else self._owner,
                lease_s=0.0 if record.over else self._lease_s,
            )
            wait_s = AGAIN_S
            while True:
                try:
                    await self._files.storage.apply(*operations, put)
                    break
                except Conflict:
                    if not await self._is_written(put):
                        raise BatchLost from None
                    break
                except (StorageFailed, QueueFull) as error:
                    log.warning("batch %s waits for the storage: %s", self.id, error.message)
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, AGAIN_MAX_S)
            self.version += 1
            self.record = record

    async def _is_written(self, put: Put) -> bool:
        """Return whether a call that seemed to fail has written the record."""
        document = await self._patient(lambda: self._document())
        return document is not None and document.version == self.version + 1 and document.body == put.body

    async def _drop_rest(self, status: str) -> None:
        """Write an error line for each request without an outcome, then end."""
        code, message = CODES[status]
        error = {"code": code, "message": message}
        if not self.record.output_file_id:  # it was not checked yet
            await self._end(status)
            return
        number, done = self.record.next, set(self._done)
        text, count = bytearray(), 0
        async for several in self._input(self.record.at):
            for at, line in several:
                if not line:
                    continue
                if number not in done:
                    name = f"batch_req_{self.id.removeprefix('batch_')}_{number}"
                    text += _outcome(name, LINE.decode(line).custom_id, error=error)
                    count += 1
                number += 1
                end = at + len(line)
            if len(text) >= COMMIT_BYTES:
                await self._append(self._dropped(number, end, done, count), b"", bytes(text))
                text, count = bytearray(), 0
        if text:
            await self._append(self._dropped(number, end, done, count), b"", bytes(text))
        await self._end(status)

    def _dropped(self, number: int, at: int, done: set[int], count: int) -> BatchRecord:
        record = self.record
        left = ranges({one for one in done if one >= number})
        counts = changed(record.counts, failed=record.counts.failed + count)
        return changed(record, next=number, at=at, done=left, counts=counts)

    async def _end(self, status: str, problems: Sequence[Problem] = ()) -> None:
        """Complete the output files and the batch."""
        now = int(time.time())
        record = self.record
        if status == COMPLETED and record.status != FINALIZING:
            await self._write(changed(record, status=FINALIZING, finalizing_at=now))
            record = self.record
        await self._patient(lambda: self._files.leave(self.tenant, record.input_file_id, self.id))
        operations: list[Operation] = []
        for name, size, kind in (
            (record.output_file_id, record.output_bytes, "output"),
            (record.error_file_id, record.error_bytes, "error"),
        ):
            if name and size:
                operations.append(self._completed(name, size, f"{self.id}_{kind}.jsonl", now))
            elif name:
                operations.append(Delete(tenant=self.tenant, kind=FILE, id=name))
        await self._write(
            changed(record, status=status, errors=list(problems), done=[], **{TIMES[status]: now}), *operations
        )
        log.info("batch %s of tenant %s: %s", self.id, self.tenant, status)

    def _completed(self, name: str, size: int, filename: str, now: int) -> Put:
        keep_s = self.record.keep_output_s
        record = FileRecord(
            filename=filename,
            purpose=OUTPUT_PURPOSE,
            bytes=size,
            created_at=now,
            expires_at=round(now + keep_s) if keep_s else 0,
        )
        return Put(tenant=self.tenant, kind=FILE, id=name, body=encode(record), keep_s=keep_s)

    # ------------------------------------------------------------------------------------------------------- watching

    async def _watch(self) -> None:
        """Notice that the batch expires, or that it was cancelled or taken over."""
        while not self._stopping:
            left_s = self.record.expires_at - time.time()
            await asyncio.sleep(min(WATCH_S, max(0.01, left_s)))
            if self._expired:
                self._stop(EXPIRED)
            else:
                await self._is_owned()

    async def _is_owned(self) -> bool:
        """Return whether the batch is this run's. If not, the run stops."""
        async with self._writing:
            try:
                document = await self._document()
            except KvforgeError:
                return True  # as long as it is not known to be otherwise
            if document is not None and document.version == self.version:
                return True
            cancelled = document is not None and BATCH_RECORD.decode(document.body).status == CANCELLING
            self._stop(CANCELLING if cancelled else LOST_BATCH)
            return False

    def _stop(self, why: str) -> None:
        self._stopping = self._stopping or why
        self._news.set()

    async def _document(self) -> Document | None:
        (document,) = await self._files.storage.apply(Get(tenant=self.tenant, kind=BATCH, id=self.id))
        return document if isinstance(document, Document) else None

    async def _patient(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call, repeated while the storage fails."""
        wait_s = AGAIN_S
        while True:
            try:
                return await call()
            except (StorageFailed, QueueFull) as error:
                log.warning("batch %s waits for the storage: %s", self.id, error.message)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, AGAIN_MAX_S)


def ranges(numbers: set[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges [first, last], in order."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _outcome(
    name: str, custom_id: str, *, response: dict[str, Any] | None = None, error: dict[str, str] | None = None
) -> bytes:
    """Return a line of an output file."""
    return encode({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
