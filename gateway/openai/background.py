"""Background responses: written down before they are submitted, and continued by any gateway after any death.

The coordinator runs a background response as a detached request with an idempotency key, which the stored document
names. Its owner follows the request and writes the outcome. The owner's lease is renewed while it lives; afterwards
another gateway claims the document and submits the same request with the same key: the coordinator returns the one that
runs, or computes it if it never saw it. The outcome is written by the first of two owners alone (`Put.expect`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvforge.client.options import RequestOptions
from kvforge.gateway.access import Caller
from kvforge.gateway.chat.shapes import Shape
from kvforge.gateway.chat.tools import checked
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.answer import CANCELLED, Answer
from kvforge.gateway.generate.generation import Submission, Usage, WakeUp
from kvforge.gateway.generate.prepare import reading_of
from kvforge.gateway.generate.service import Service
from kvforge.gateway.generate.shape_checks import check_shape
from kvforge.gateway.http.errors import openai_error
from kvforge.gateway.http.keys import Key
from kvforge.gateway.storage import (
    Append,
    Claim,
    Delete,
    Document,
    Entry,
    Expire,
    Get,
    Mark,
    Read,
    Release,
    Renew,
    StorageFailed,
)
from kvforge.protocol.errors import (
    CapacityExceeded,
    Conflict,
    InternalError,
    KvforgeError,
    NotFound,
    QueueFull,
    RequestNotFound,
    StateLost,
    Unavailable,
)
from kvforge.protocol.messages import Ended
from kvforge.protocol.steady_clock import monotonic
from kvforge.routing import seed_of

from .call import Call, names_of
from .responses import Responses
from .responses_body import Create
from .stored import RESPONSE, TOKENS, Stored, StoredResponse, Work, decoded_response

QUEUED, IN_PROGRESS = "queued", "in_progress"
ADMISSION_S = 2.0  # how long the answer to a new response waits for the coordinator's
AGAIN_S, AGAIN_MAX_S = 0.1, 5.0
PUBLISH_S = 0.1
EXPIRE_S = 60.0
CLAIMS = 16
# The coordinator, the way to it or its state is lost: the same request is submitted again.
LOST = (Unavailable, StateLost, RequestNotFound, QueueFull)
T = TypeVar("T")
log = logging.getLogger(__name__)
_CREATE = msgspec.json.Decoder(Create)


class _CancelledHere(Exception):
    """A call of this process cancels the response."""


class Tokens:
    """The tokens of a background response so far, in the interface of a `Stream`.

    They stay while their request is submitted again, and until it has computed as many.
    """

    def __init__(self) -> None:
        self.request_id = 0
        self.tokens: Sequence[int] = ()
        self.logprobs: Sequence[float] = ()
        self.top_logprobs: Sequence[tuple[tuple[int, float], ...]] = ()
        self.prompt_logprobs: None = None
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.ended is not None

    def cancel(self) -> None:
        """Do nothing: a reader leaves."""

    def leave(self) -> None:
        """Do nothing: a reader leaves."""

    def finish_at(self, tokens: int) -> None:
        """Do nothing: there are no stop strings."""


class Run:
    """A background response that this process follows.

    Args:
        background: The manager of all runs.
        work: The request, with its submission.
        version: The version of its document.
        fresh: Its sender still waits: a refusal is for the sender, and nothing is kept.

    Attributes:
        tokens: Its tokens so far.
        final: The response at its end.
        status: QUEUED or IN_PROGRESS.
        marked: The status in its document.
        listeners: Called when there is news.
        admitted: Done when the coordinator has accepted the request, or with its refusal.
    """

    def __init__(self, background: Background, work: Responses, version: int, *, fresh: bool) -> None:
        self._background, self.work, self._version, self._fresh = background, work, version, fresh
        self.tokens = Tokens()
        self.final: StoredResponse | None = None
        self.status, self.marked = QUEUED, QUEUED
        self.listeners: set[Callable[[], None]] = set()
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bell, self._cancelled, self._told_coordinator = WakeUp(), False, False
        self._publishing: asyncio.Task[None] | None = None
        self.task = asyncio.ensure_future(self._run())

    @property
    def key(self) -> tuple[str, str]:
        """The tenant and the id."""
        return self.work.call.caller.tenant, self.work.id

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a function when there is news, from now on for each token."""
        self.listeners.add(listener)
        self._bell.ring()

    async def cancel(self) -> None:
        """Cancel it, and return when that is written down."""
        self._cancelled = True
        self._bell.ring()
        await asyncio.shield(self.task)

    def publish(self) -> None:
        """Append the tokens to the document while another process reads them there."""
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.ensure_future(self._publish())

    async def close(self) -> None:
        """Stop following it; the request goes on."""
        for task in (self.task, self._publishing):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))

    # ------------------------------------------------------------------------------------------------------- following

    async def _run(self) -> None:
        try:
            await self._followed()
        except Exception as error:
            log.exception("internal error in the background response %s", self.work.id)
            # Its answer may be the cause, so the outcome has none.
            failure = _failure(InternalError(f"{type(error).__name__}: {error}"))
            body = self.work.body(None, [], status="failed", error=failure)
            with suppress(KvforgeError):
                self.final = await self._written(StoredResponse(response=body, input=self.work.input))
        finally:
            if self._publishing is not None:
                self._publishing.cancel()
            if not self.admitted.done():
                self.admitted.set_result(None)
            self._background.runs.pop(self.key, None)
            self._tell()

    async def _followed(self) -> None:
        wait_s = AGAIN_S
        while True:
            if self._cancelled:
                await self._end("cancelled")
                if not self._told_coordinator:
                    self._background.cancel_request(self.work)
                return
            try:
                usage = await self._generated()
                await self._end("cancelled" if usage is None else "", usage=usage)
                return
            except _CancelledHere:
                continue
            except StorageFailed as error:
                log.warning("the background response %s waits for the storage: %s", self.work.id, error.message)
            except LOST as error:
                if self._fresh and not isinstance(error, Unavailable):
                    await self._refused(error)
                    return
                log.info("the background response %s is submitted again: %s", self.work.id, error.message)
            except Conflict as error:
                if type(error) is not Conflict:
                    await self._refused(error)
                    return
                wait_s = self._background.lease_s  # another gateway follows the request: it may have taken it over
            except KvforgeError as error:
                await self._refused(error)
                return
            await self._rest(wait_s)
            wait_s = min(2 * wait_s, max(AGAIN_MAX_S, self._background.lease_s))
            if await self._over_elsewhere():
                return

    async def _rest(self, wait_s: float) -> None:
        """Wait, unless it is cancelled meanwhile."""
        until = monotonic() + wait_s
        while not self._cancelled and (left := until - monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._bell.rung(), left)

    async def _generated(self) -> Usage | None:
        """Follow the request to its end. Return its token counts, or None if it was cancelled.

        Raises:
            KvforgeError: The request failed or was lost.
            _CancelledHere: This process was asked to cancel it.
        """
        work, tokens = self.work, self.tokens
        async with AsyncExitStack() as stack:
            generation = await stack.enter_async_context(
                self._background.service.start(work.wanted[0], self._bell, work.call.session)
            )
            stream = generation.answers[0].stream
            while True:
                if stream.request_id:
                    self._accepted(stream.request_id)
                ended = stream.ended
                if len(stream.tokens) >= len(tokens.tokens):
                    tokens.tokens = stream.tokens
                if stream.error is not None:
                    raise stream.error
                if ended is not None:
                    if ended.reason == CANCELLED:
                        return None
                    tokens.ended = ended
                    return generation.usage
                if self._cancelled:
                    if stream.request_id:
                        stream.cancel()
                        self._told_coordinator = True
                    raise _CancelledHere
                generation.each_token = bool(self.listeners)
                self._tell()
                await self._bell.rung()

    def _accepted(self, request_id: int) -> None:
        if self.status == QUEUED:
            self.status, self._fresh, self.tokens.request_id = IN_PROGRESS, False, request_id
        if not self.admitted.done():
            self.admitted.set_result(None)

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener()

    # ------------------------------------------------------------------------------------------------------------ ends

    async def _refused(self, error: KvforgeError) -> None:
        if not self._fresh:
            await self._end("failed", error)
            return
        tenant, name = self.key
        with suppress(KvforgeError):  # a document that stays is claimed, and fails with the same error
            await self._background.stored.storage.apply(Delete(tenant=tenant, kind=RESPONSE, id=name))
        if not self.admitted.done():
            self.admitted.set_exception(error)

    async def _end(self, status: str, error: KvforgeError | None = None, usage: Usage | None = None) -> None:
        """Write the outcome. Whatever was written by another gateway stays."""
        work = self.work
        answer = answer_of(work, self.tokens)
        items, reason = work.items(), ""
        for piece in answer.pop_each():
            for event in piece.events:
                items.add(event)
            reason = piece.reason
        items.close(reason or "length")
        if usage is not None:
            usage = replace(usage, reasoning=answer.reasoning_tokens)
        body = work.body(usage, items.done, reason, status=status, error=_failure(error) if error is not None else None)
        final = StoredResponse(
            response=body, input=work.input, pieces=items.pieces, conversation=work.asked.conversation_id
        )
        if usage is not None:
            work.call.caller.used(usage.prompt - usage.cached + usage.completion)
        self.final = await self._written(final)

    async def _written(self, final: StoredResponse) -> StoredResponse | None:
        """Write a final response until the storage accepts it. Return what is stored in the end."""
        stored, group, wait_s = self._background.stored, self.work.call.model.info.name, AGAIN_S
        while True:
            try:
                await stored.storage.apply(*stored.put(self.key[0], final, group=group, expect=self._version))
                return final
            except Conflict:
                return await self._at_rest()
            except NotFound:  # its conversation was deleted
                final = msgspec.structs.replace(final, conversation="")
            except CapacityExceeded as error:
                if not final.response["output"]:
                    raise
                body = {**final.response, "status": "failed", "error": _failure(error), "output": []}
                final = msgspec.structs.replace(final, response=body, pieces=[])
            except StorageFailed as error:
                log.warning("the background response %s cannot be written: %s", self.work.id, error.message)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, AGAIN_MAX_S)

    async def _at_rest(self) -> StoredResponse | None:
        tenant, name = self.key
        (document,) = await self._background.stored.storage.apply(Get(tenant=tenant, kind=RESPONSE, id=name))
        if isinstance(document, Document) and not document.state:
            return decoded_response(document)
        return None

    async def _over_elsewhere(self) -> bool:
        """Return whether another process has ended or deleted it."""
        tenant, name = self.key
        try:
            (document,) = await self._background.stored.storage.apply(Get(tenant=tenant, kind=RESPONSE, id=name))
        except KvforgeError:
            return False
        if isinstance(document, Document) and document.version == self._version:
            return False
        self.final = decoded_response(document) if isinstance(document, Document) and not document.state else None
        return True

    # ------------------------------------------------------------------------------------------------------ publishing

    async def _publish(self) -> None:
        tenant, name = self.key
        document: dict[str, Any] = {"tenant": tenant, "kind": RESPONSE, "id": name, "name": TOKENS}
        storage = self._background.stored.storage
        with suppress(KvforgeError):
            (last,) = await storage.apply(Read(**document, limit=1, descending=True))
            published = 0
            for entry in last if isinstance(last, list) else ():
                assert isinstance(entry, Entry)
                published = int(entry.id) + len(entry.body) // 4
            until = monotonic() + 2 * self._background.lease_s
            while monotonic() < until:
                new = self.tokens.tokens[published:]
                if len(new):
                    body = np.asarray(new, "<i4").tobytes()
                    await storage.apply(Append(**document, entries=[Entry(str(published), body)], skip=True))
                    published += len(new)
                await asyncio.sleep(PUBLISH_S)


class Background:
    """The background responses that this process follows.

    Args:
        service: The connection to the coordinator.
        stored: The stored objects.
        settings: The gateway's settings.

    Attributes:
        runs: By tenant and id.
        claimed: How many were taken over from other processes.
    """

    def __init__(self, service: Service, stored: Stored, settings: Settings) -> None:
        self.service, self.stored, self._settings = service, stored, settings
        self.lease_s = settings.storage.lease_s
        self.owner = secrets.token_hex(8)
        self.runs: dict[tuple[str, str], Run] = {}
        self.claimed = 0
        self._expire_at = 0.0
        self._failed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, work: Responses) -> Run:
        """Write a response down and submit it, also if the caller gives up meanwhile.

        Returns:
            Its run, which has been accepted by the coordinator or waits for it.

        Raises:
            Conflict: A response with its id exists.
            KvforgeError: The coordinator or the storage refused it. Nothing is kept.
        """
        run = await asyncio.shield(self._task(self._started(work)))
        await asyncio.wait((run.admitted,), timeout=ADMISSION_S)
        if run.admitted.done():
            run.admitted.result()
        return run

    async def _started(self, work: Responses) -> Run:
        tenant = work.call.caller.tenant
        fixed(work)
        pending = StoredResponse(
            response=work.body(None, [], status=QUEUED),
            input=work.input,
            conversation=work.asked.conversation_id,
            work=_written_down(work),
        )
        await self.stored.storage.apply(
            *self.stored.put(tenant, pending, group=work.call.model.info.name, state=QUEUED, expect=0, owner=self.owner)
        )
        run = self.runs[tenant, work.id] = Run(self, work, 1, fresh=True)
        await asyncio.wait((run.admitted,), timeout=ADMISSION_S)
        if run.admitted.done():
            run.admitted.result()
        return run

    def find(self, tenant: str, name: str) -> Run | None:
        """Return the run of a response, if this process follows it."""
        return self.runs.get((tenant, name))

    async def cancel(self, tenant: str, document: Document, stored: StoredResponse) -> StoredResponse:
        """Cancel a response that is in progress, wherever it runs.

        Raises:
            Conflict: It changed meanwhile.
        """
        if (run := self.find(tenant, document.id)) is not None:
            await run.cancel()
            return run.final or (await self.stored.response(tenant, document.id))[1]
        body = {**stored.response, "status": "cancelled"}
        final = msgspec.structs.replace(stored, response=body, work=None)
        operations = self.stored.put(tenant, final, group=document.group, expect=document.version)
        await self.stored.storage.apply(*operations)
        with suppress(KvforgeError):  # otherwise it runs to its end, for nothing
            self.cancel_request(await self.restored(document, stored))
        return final

    def cancel_request(self, work: Responses) -> None:
        """Cancel the coordinator's request of a response that ended, as soon as possible."""
        self._task(self._cancelled(work))

    async def restored(self, document: Document, stored: StoredResponse) -> Responses:
        """Return the request of a document in progress, ready to be submitted or read.

        Raises:
            NotReady: No model is served.
            InvalidRequest: It cannot be served by this gateway.
        """
        assert stored.work is not None, "it is in progress"
        kept, model = stored.work, self.service.known
        asked = _CREATE.decode(kept.request)
        caller = Caller(tenant=document.tenant)
        call = Call(caller, self._settings, model, stored.response["model"], Key(), kept.session, names=names_of(asked))
        work = Responses(call, asked, self.stored, document.id)
        work.created, work.ending, work.shape = stored.response["created_at"], kept.ending, Shape(*kept.shape)
        work.input = stored.input
        await check_shape(model.prompts, work.shape)
        offered = checked(work.offered.tools, work.offered.choice(asked))
        text, parser = reading_of(model, offered, kept.ending)
        options = RequestOptions(
            max_tokens=kept.max_tokens,
            sampling=replace(work.sampling(work.shape), seed=kept.seed),
            tenant=document.tenant,
            cache_salt=kept.cache_salt,
            priority=kept.priority,
            detached=True,
            idempotency_key=kept.key,
        )
        prompt = np.frombuffer(kept.prompt, "<i4").astype(np.int32)
        work.wanted = [Submission(prompt=prompt, options=options, text=text, parser=parser)]
        return work

    async def keep(self) -> None:
        """Renew leases, take over abandoned responses and remove expired documents, until cancelled."""
        while True:
            try:
                if self.stored.storage.exists:
                    await self._kept()
                self._failed = False
            except KvforgeError as error:
                if not self._failed:  # once for each outage
                    log.warning("stored responses cannot be kept: %s", error.message)
                self._failed = True
            await asyncio.sleep(self.lease_s / 3)

    async def close(self) -> None:
        """Stop following all responses; another process may take them over at once."""
        for task in tuple(self._tasks):
            task.cancel()
        for run in tuple(self.runs.values()):
            await run.close()
        if self.stored.storage.exists:
            with suppress(KvforgeError):
                await self.stored.storage.apply(Release(owner=self.owner))

    # -------------------------------------------------------------------------------------------------------- inside

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _kept(self) -> None:
        storage = self.stored.storage
        if self.runs:
            (watched,) = await storage.apply(Renew(owner=self.owner, lease_s=self.lease_s))
            for document in watched if isinstance(watched, list) else ():
                if isinstance(document, Document) and (run := self.find(document.tenant, document.id)) is not None:
                    run.publish()
            for (tenant, name), run in tuple(self.runs.items()):
                if run.status != run.marked:
                    run.marked = run.status
                    mark = Mark(tenant=tenant, kind=RESPONSE, id=name, owner=self.owner, state=run.status)
                    await storage.apply(mark)
        try:
            group = self.service.known.info.name
        except KvforgeError:
            group = ""
        while group:
            claim = Claim(kind=RESPONSE, groups=[group], owner=self.owner, lease_s=self.lease_s, limit=CLAIMS)
            (documents,) = await storage.apply(claim)
            assert isinstance(documents, list)
            for document in documents:
                assert isinstance(document, Document)
                await self._continue(document)
            if len(documents) < CLAIMS:
                break
        if monotonic() >= self._expire_at:
            self._expire_at = monotonic() + EXPIRE_S
            while await storage.apply(Expire()) != [0]:
                pass

    async def _continue(self, document: Document) -> None:
        """Follow a response that was claimed."""
        stored = decoded_response(document)
        if (document.tenant, document.id) in self.runs:  # this process was stopped for longer than its lease
            return
        try:
            work = await self.restored(document, stored)
        except KvforgeError as error:
            body = {**stored.response, "status": "failed", "error": _failure(error)}
            final = msgspec.structs.replace(stored, response=body, work=None)
            operations = self.stored.put(document.tenant, final, group=document.group, expect=document.version)
            with suppress(Conflict):
                await self.stored.storage.apply(*operations)
            return
        self.claimed += 1
        self.runs[document.tenant, document.id] = Run(self, work, document.version, fresh=False)

    async def _cancelled(self, work: Responses) -> None:
        """Cancel the request of a response that another process followed."""
        bell = WakeUp()
        with suppress(KvforgeError, TimeoutError):
            async with asyncio.timeout(ADMISSION_S), self.service.start(work.wanted[0], bell) as generation:
                await generation.accepted()
                if not generation.answers[0].stream.done:
                    generation.answers[0].stream.cancel()


def answer_of(work: Responses, tokens: Tokens) -> Answer:
    """Return a reader of a response's tokens, from the first on."""
    wanted = work.wanted[0]
    parser = wanted.parser() if wanted.parser is not None else None
    return Answer(0, tokens, wanted.text(), parser=parser)


def fixed(work: Responses) -> None:
    """Fix the key and the seed of a submission, so that it draws the same tokens whenever it is submitted again."""
    wanted = work.wanted[0]
    options, key = wanted.options, f"response:{work.id}"
    sampling = options.sampling
    assert sampling is not None, "a response names its sampling"
    if sampling.seed is None:
        sampling = replace(sampling, seed=seed_of(options.tenant, key))
    work.wanted = [replace(wanted, options=replace(options, sampling=sampling, detached=True, idempotency_key=key))]


def _written_down(work: Responses) -> Work:
    wanted = work.wanted[0]
    options = wanted.options
    assert options.sampling is not None and options.sampling.seed is not None, "fixed before"
    return Work(
        request=msgspec.json.encode(work.asked),
        prompt=np.ascontiguousarray(wanted.prompt, "<i4").tobytes(),
        ending=work.ending,
        shape=(work.shape.name, work.shape.value),
        max_tokens=options.max_tokens,
        seed=options.sampling.seed,
        cache_salt=options.cache_salt,
        priority=options.priority,
        key=options.idempotency_key,
        session=work.call.session,
    )


def _failure(error: KvforgeError) -> dict[str, Any]:
    """Return an error as a response has it. OpenAI's codes have two that fit."""
    code = "rate_limit_exceeded" if isinstance(error, CapacityExceeded) else "server_error"
    return {"code": code, "message": openai_error(error)["error"]["message"]}
