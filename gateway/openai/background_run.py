"""One background response that this process follows, to its end or until another gateway has taken it over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from kvforge.gateway.generate.answer import CANCELLED
from kvforge.gateway.generate.generation import Usage, WakeUp
from kvforge.gateway.generate.service import Service
from kvforge.gateway.http.errors import openai_error
from kvforge.gateway.storage import Append, Delete, Document, Entry, Get, Read, StorageFailed
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
from kvforge.protocol.steady_clock import monotonic

from .background_tokens import Tokens, answer_of
from .kept import kept_of
from .responses import Responses
from .stored import RESPONSE, TOKENS, Stored, StoredResponse, decoded_response

QUEUED, IN_PROGRESS = "queued", "in_progress"
AGAIN_S, AGAIN_MAX_S = 0.1, 5.0
PUBLISH_S = 0.1
# The coordinator, the way to it or its state is lost: the same request is submitted again.
LOST = (Unavailable, StateLost, RequestNotFound, QueueFull)
log = logging.getLogger(__name__)


class Manager(Protocol):
    """The interface of `background.Background` that a run uses."""

    runs: dict[tuple[str, str], Run]
    service: Service
    stored: Stored
    lease_s: float

    def cancel_request(self, work: Responses) -> None:
        """Cancel the coordinator's request of a response."""


class _CancelledHere(Exception):
    """A call of this process cancels the response."""


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

    def __init__(self, background: Manager, work: Responses, version: int, *, fresh: bool) -> None:
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
            failure = failure_of(InternalError(f"{type(error).__name__}: {error}"))
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
                    tokens.ended, tokens.kept = ended, kept_of(stream)
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
        body = work.body(
            usage, items.done, reason, status=status, error=failure_of(error) if error is not None else None
        )
        final = StoredResponse(
            response=body,
            input=work.input,
            pieces=items.pieces,
            conversation=work.asked.conversation_id,
            kept=self.tokens.kept,
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
                body = {**final.response, "status": "failed", "error": failure_of(error), "output": []}
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


def failure_of(error: KvforgeError) -> dict[str, Any]:
    """Return an error as a response has it. OpenAI's codes have two that fit."""
    code = "rate_limit_exceeded" if isinstance(error, CapacityExceeded) else "server_error"
    return {"code": code, "message": openai_error(error)["error"]["message"]}
