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
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvforge.client.options import RequestOptions
from kvforge.gateway.access import Caller
from kvforge.gateway.chat.shapes import Shape
from kvforge.gateway.chat.tools import checked
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.generation import Submission, WakeUp
from kvforge.gateway.generate.prepare import reading_of
from kvforge.gateway.generate.service import Service
from kvforge.gateway.generate.shape_checks import check_shape
from kvforge.gateway.http.keys import Key
from kvforge.gateway.storage import (
    Claim,
    Document,
    Expire,
    Mark,
    Release,
    Renew,
)
from kvforge.protocol.errors import (
    Conflict,
    KvforgeError,
)
from kvforge.protocol.steady_clock import monotonic
from kvforge.routing import seed_of

from .background_run import QUEUED, Run, failure_of
from .call import Call, names_of
from .responses import Responses
from .responses_body import Create
from .stored import RESPONSE, Stored, StoredResponse, Work, decoded_response

ADMISSION_S = 2.0  # how long the answer to a new response waits for the coordinator's
EXPIRE_S = 60.0
CLAIMS = 16
T = TypeVar("T")
log = logging.getLogger(__name__)
_CREATE = msgspec.json.Decoder(Create)


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
            continues=kept.continues,
            keep_s=work.keep_s,
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
            body = {**stored.response, "status": "failed", "error": failure_of(error)}
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
        continues=options.continues,
    )
