"""`/v1/files`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvforge.gateway.access import Caller
from kvforge.gateway.config import Settings
from kvforge.gateway.http.errors import TooSlow, WrongEncoding
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.openai.paging import Page, listed
from kvforge.protocol.errors import InvalidRequest, KvforgeError
from kvforge.protocol.steady_timeout import steady_timeout

from .files import CHUNK_BYTES, FILES_MAX, Files, Upload
from .multipart import Content, MultipartReader, Part, boundary_of
from .records import BATCH_PURPOSE, FILE

PURPOSES = ("assistants", "evals", "fine-tune", "user_data", "vision")  # of OpenAI's API, not served
FIELD_BYTES_MAX = 1024
FILENAME_LENGTH_MAX = 255
KEEP_S_MIN, KEEP_S_MAX = 3600, 2_592_000
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
OCTETS = "application/octet-stream"
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Form:
    """What an upload has brought so far."""

    fields: dict[str, bytes] = field(default_factory=dict)
    filename: str = ""
    upload: Upload | None = None


class FileRoutes:
    """The routes over the files.

    Args:
        files: The files.
        settings: The gateway's settings.
    """

    def __init__(self, files: Files, settings: Settings) -> None:
        self._files, self._settings = files, settings

    def routes(self, guard: Guard) -> list[Route]:
        """Return all routes."""
        one = "/v1/files/{file_id}"
        return [
            Route("/v1/files", guard(self._create), methods=["POST"]),
            Route("/v1/files", guard(self._list), methods=["GET"]),
            Route(one, guard(self._get), methods=["GET"]),
            Route(one, guard(self._delete), methods=["DELETE"]),
            Route(f"{one}/content", guard(self._content), methods=["GET"]),
        ]

    async def _create(self, request: Request, caller: Caller) -> Response:
        if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise WrongEncoding("content-encoding", "is not supported: send the body uncompressed")
        form = _Form()
        complete = False
        try:
            await self._received(request, caller, form)
            purpose = purpose_of(form.fields)
            keep_s = keep_of(form.fields, self._files.keep_s)
            if form.upload is None:
                raise InvalidRequest("file", "is missing")
            record = await form.upload.end(form.filename, purpose, keep_s)
            complete = True
            return JSONResponse(record.shown(form.upload.id))
        finally:
            if form.upload is not None and not complete:
                await form.upload.cancel()

    async def _received(self, request: Request, caller: Caller, form: _Form) -> None:
        """Read a body. The content of the file goes into the storage as it arrives."""
        reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
        announced = int(request.headers.get("content-length", "0"))  # the HTTP parser checked that it is a number
        part: Part | None = None
        pieces = _pieces(request, self._settings.body_s)
        async for data in pieces:
            for found in reader.feed(data):
                if isinstance(found, Part):
                    part = found
                    if part.name == FILE and part.filename is not None:
                        if form.upload is not None:
                            raise InvalidRequest(FILE, "is given more than once")
                        form.filename = part.filename[:FILENAME_LENGTH_MAX]
                        form.upload = await self._files.begin(caller.tenant, max(0, announced - len(data)))
                    elif part.name in FIELDS:
                        form.fields[part.name] = b""
                    else:
                        self._unknown(part)
                elif part is not None:
                    await self._keep(part, found, form)
        if not reader.ended:
            raise InvalidRequest("body", "is not valid multipart/form-data: it ends before its last boundary")

    def _unknown(self, part: Part) -> None:
        if part.name == FILE:
            raise InvalidRequest(FILE, "is not a file: send it with a filename")
        if self._settings.strict_fields:
            raise InvalidRequest(part.name[:80], "unknown field: remove it, or see the API's documentation")

    async def _keep(self, part: Part, content: Content, form: _Form) -> None:
        if part.name == FILE and form.upload is not None:
            await form.upload.write(content.data)
        elif part.name in FIELDS:
            form.fields[part.name] += content.data
            if len(form.fields[part.name]) > FIELD_BYTES_MAX:
                raise InvalidRequest(part.name, f"is longer than {FIELD_BYTES_MAX} bytes")

    async def _list(self, request: Request, caller: Caller) -> Response:
        page = Page.of(request.query_params, default=FILES_MAX, most=FILES_MAX)
        found, more = await self._files.listed(
            caller.tenant,
            after=page.after,
            limit=page.limit,
            descending=page.descending,
            purpose=request.query_params.get("purpose", ""),
        )
        return JSONResponse(listed([record.shown(name) for name, record in found], more=more))

    async def _get(self, request: Request, caller: Caller) -> Response:
        document, record = await self._files.get(caller.tenant, request.path_params["file_id"])
        return JSONResponse(record.shown(document.id))

    async def _delete(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["file_id"]
        await self._files.delete(caller.tenant, name)
        return JSONResponse({"id": name, "object": FILE, "deleted": True})

    async def _content(self, request: Request, caller: Caller) -> Response:
        document, record = await self._files.get(caller.tenant, request.path_params["file_id"])
        content = _until_failure(self._files.content(caller.tenant, document.id), document.id)
        return StreamingResponse(content, media_type=OCTETS, headers={"content-length": str(record.bytes)})


def purpose_of(fields: dict[str, bytes]) -> str:
    """Return the purpose of an upload.

    Raises:
        InvalidRequest: Names `purpose`.
    """
    if "purpose" not in fields:
        raise InvalidRequest("purpose", "is missing")
    purpose = fields["purpose"].decode("utf-8", "replace")
    if purpose == BATCH_PURPOSE:
        return purpose
    why = "is not served: nothing here would read the file" if purpose in PURPOSES else "is unknown"
    raise InvalidRequest("purpose", f"{purpose[:40]!r} {why} (accepted: `{BATCH_PURPOSE}`)")


def keep_of(fields: dict[str, bytes], default_s: float) -> float:
    """Return how long an upload is kept, in seconds.

    Raises:
        InvalidRequest: Names the field of `expires_after`.
    """
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return default_s
    if anchor != b"created_at":
        raise InvalidRequest("expires_after[anchor]", "must be `created_at`")
    text = (seconds or b"").decode("utf-8", "replace")
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and KEEP_S_MIN <= int(text) <= KEEP_S_MAX):
        problem = f"is {text[:40]!r}; it must be a whole number from {KEEP_S_MIN} to {KEEP_S_MAX}"
        raise InvalidRequest("expires_after[seconds]", problem)
    return float(text)


async def _until_failure(content: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    """Yield the content of a file. If the storage fails, it ends early, and with it the connection."""
    try:
        async for piece in content:
            yield piece
    except KvforgeError as error:
        log.warning("the content of %s was cut off: %s", name, error.message)


async def _pieces(request: Request, within_s: float) -> AsyncIterator[bytes]:
    """Yield a body as it arrives.

    Args:
        request: The request.
        within_s: How long a client may take for each chunk of a file.

    Raises:
        TooSlow: The client takes longer.
        ClientDisconnect: It hung up.
    """
    more = True
    while more:
        held: list[bytes] = []
        size = 0
        try:
            async with steady_timeout(within_s):
                while more and size < CHUNK_BYTES:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    held.append(message.get("body", b""))
                    size += len(held[-1])
                    more = message.get("more_body", False)
        except TimeoutError:
            raise TooSlow("body", f"{CHUNK_BYTES} bytes of it were not received within {within_s:g} s") from None
        yield b"".join(held)
