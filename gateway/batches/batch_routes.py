"""`/v1/batches`."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvforge.gateway.access import Caller
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.service import Service
from kvforge.gateway.http import body
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.http.notes import notes_of
from kvforge.gateway.openai.paging import Page, listed
from kvforge.gateway.storage import Document, Get, List, Put
from kvforge.protocol.errors import Conflict, InvalidRequest, QueueFull

from .file_routes import KEEP_S_MAX, KEEP_S_MIN
from .files import TRIES, Files
from .records import (
    BATCH,
    BATCH_RECORD,
    CANCELLING,
    FINALIZING,
    BatchRecord,
    NoSuchStored,
    changed,
    encode,
    known_id,
    new_id,
)
from .runner import Runner

BODY_BYTES_MAX = 64 << 10
WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
WINDOW_S_MAX = 14 * 86_400
METADATA_MAX, NAME_LENGTH_MAX, VALUE_LENGTH_MAX = 16, 64, 512
BATCHES_MAX = 10_000
RETRY_MS = 60_000
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the output files expire, in seconds after they were created."""

    seconds: Annotated[int, msgspec.Meta(ge=KEEP_S_MIN, le=KEEP_S_MAX)]
    anchor: Literal["created_at"] = "created_at"


class Create(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


CREATE = Reader(Create)


class TooManyBatches(QueueFull):
    """The tenant has its limit of batches in progress."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, RETRY_MS)
        self.message = f"the tenant has its limit of {limit} batches in progress (batches.tenant_batches_max)"
        self.args = (self.message,)


class BatchRoutes:
    """The routes over the batches.

    Args:
        service: The connection to the coordinator.
        files: The files.
        runner: Works on batches.
        settings: The gateway's settings.
    """

    def __init__(self, service: Service, files: Files, runner: Runner, settings: Settings) -> None:
        self._service, self._files, self._runner, self._settings = service, files, runner, settings

    def routes(self, guard: Guard) -> list[Route]:
        """Return all routes."""
        one = "/v1/batches/{batch_id}"
        return [
            Route("/v1/batches", guard(self._create), methods=["POST"]),
            Route("/v1/batches", guard(self._list), methods=["GET"]),
            Route(one, guard(self._get), methods=["GET"]),
            Route(f"{one}/cancel", guard(self._cancel), methods=["POST"]),
        ]

    async def _create(self, request: Request, caller: Caller) -> Response:
        ignored = notes_of(request.scope).start(strict=self._settings.strict_fields)
        content = await body.read(request, BODY_BYTES_MAX, self._settings.body_s)
        asked = body.decoded(CREATE, content, ignored)
        model = self._service.known
        now = int(time.time())
        record = BatchRecord(
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + window_s(asked.completion_window),
            caller=caller.name,
            model=model.names[0],
            keep_output_s=float(asked.output_expires_after.seconds)
            if asked.output_expires_after is not None
            else self._files.keep_s,
            metadata=checked(asked.metadata),
        )
        await self._check_quota(caller.tenant)
        name = new_id("batch_")
        for left in reversed(range(TRIES)):
            use = await self._files.use(caller.tenant, asked.input_file_id, name)
            put = Put(
                tenant=caller.tenant,
                kind=BATCH,
                id=name,
                body=encode(record),
                group=model.info.name,
                state=record.status,
                expect=0,
            )
            try:
                await self._files.storage.apply(use, put)
                break
            except Conflict:  # another batch has begun or ended to use the file
                if not left:
                    raise
        self._runner.wake()
        return JSONResponse(record.shown(name))

    async def _check_quota(self, tenant: str) -> None:
        every = List(tenant=tenant, kind=BATCH, limit=BATCHES_MAX, descending=True, bodies=False)
        (documents,) = await self._files.storage.apply(every)
        assert isinstance(documents, list)
        running = sum(bool(document.state) for document in documents if isinstance(document, Document))
        if running >= (limit := self._settings.batches.tenant_batches_max):
            raise TooManyBatches(limit)

    async def _list(self, request: Request, caller: Caller) -> Response:
        page = Page.of(request.query_params)
        if page.after:
            known_id(BATCH, page.after, "after")
        asked = List(
            tenant=caller.tenant, kind=BATCH, after=page.after, limit=page.limit + 1, descending=page.descending
        )
        (documents,) = await self._files.storage.apply(asked)
        assert isinstance(documents, list)
        found = [_shown(document) for document in documents if isinstance(document, Document)]
        return JSONResponse(listed(found[: page.limit], more=len(found) > page.limit))

    async def _get(self, request: Request, caller: Caller) -> Response:
        return JSONResponse(_shown(await self._document(caller.tenant, request.path_params["batch_id"])))

    async def _cancel(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["batch_id"]
        for left in reversed(range(TRIES)):
            document = await self._document(caller.tenant, name)
            record = BATCH_RECORD.decode(document.body)
            if record.over or record.status in (CANCELLING, FINALIZING):
                break
            record = changed(record, status=CANCELLING, cancelling_at=int(time.time()))
            put = Put(
                tenant=caller.tenant,
                kind=BATCH,
                id=name,
                body=encode(record),
                group=document.group,
                state=record.status,
                expect=document.version,
            )
            try:
                await self._files.storage.apply(put)
                await self._runner.stop(caller.tenant, name)
                break
            except Conflict:  # its progress was written at this moment
                if not left:
                    raise
        if record.over:
            raise Conflict(f"batch {name} has already ended: its status is {record.status!r}")
        return JSONResponse(record.shown(name))

    async def _document(self, tenant: str, name: str) -> Document:
        (document,) = await self._files.storage.apply(Get(tenant=tenant, kind=BATCH, id=known_id(BATCH, name)))
        if not isinstance(document, Document):
            raise NoSuchStored(BATCH, name)
        return document


def window_s(text: str) -> int:
    """Return a completion window in seconds.

    Raises:
        InvalidRequest: Names `completion_window`.
    """
    found = WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= WINDOW_S_MAX:
        problem = f'is {text[:40]!r}; it must be "24h", or another time up to "14d" in s, m, h or d'
        raise InvalidRequest("completion_window", problem)
    return seconds


def checked(metadata: dict[str, str] | None) -> dict[str, str] | None:
    """Return metadata that are within OpenAI's limits.

    Raises:
        InvalidRequest: Names `metadata`.
    """
    if metadata is None:
        return None
    if len(metadata) > METADATA_MAX:
        raise InvalidRequest("metadata", f"has {len(metadata)} entries; the limit is {METADATA_MAX}")
    for name, value in metadata.items():
        if len(name) > NAME_LENGTH_MAX or len(value) > VALUE_LENGTH_MAX:
            problem = f"may have names of {NAME_LENGTH_MAX} and values of {VALUE_LENGTH_MAX} characters"
            raise InvalidRequest("metadata", problem)
    return metadata


def _shown(document: Document) -> dict[str, Any]:
    return BATCH_RECORD.decode(document.body).shown(document.id)
