"""The routes of Anthropic's API."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvforge.gateway.access import Caller
from kvforge.gateway.chat.naming import Names
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.generation import Generation, WakeUp, charge
from kvforge.gateway.generate.service import Service
from kvforge.gateway.http import body
from kvforge.gateway.http.errors import anthropic_error
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.http.keys import Key, session_of
from kvforge.gateway.http.notes import RequestNotes, notes_of
from kvforge.gateway.http.stream import ErrorEventSource, EventStream, Pings, wanted
from kvforge.protocol.errors import InvalidRequest, KvforgeError

from . import messages
from .pins import outcomes
from .request_body import Create


class Anthropic:
    """The routes over one service."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service, self._settings = service, settings

    def routes(self, guard: Guard) -> list[Route]:
        """Return all routes."""
        return [
            Route("/v1/messages", guard(self._messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", guard(self._count), methods=["POST"]),
        ]

    async def _messages(self, request: Request, caller: Caller) -> Response:
        ignored = self._ignored(request)
        asked = body.decoded(messages.CREATE, await self._read(request), ignored)
        key = Key.of(request.headers, "events of this API are not numbered")
        model = self._service.known
        model.check(asked.model)
        names = messages.names_of()
        try:
            return await self._answer(request, caller, asked, key, ignored, names)
        except InvalidRequest as error:
            raise names.renamed(error) from None

    async def _answer(
        self, request: Request, caller: Caller, asked: Create, key: Key, ignored: Ignored, names: Names
    ) -> Response:
        what = await wanted(request, messages.wanted_of(asked, self._service.known, caller, key.name, ignored, names))
        what = replace(what, ahead=self._settings.ahead_tokens_max)
        bell = WakeUp()
        async with AsyncExitStack() as stack:
            generation = await stack.enter_async_context(self._service.start(what, bell, session_of(request.headers)))
            stack.callback(charge, caller, [generation])
            stack.callback(_note_pins, notes_of(request.scope), generation)
            if not asked.stream:
                return await wanted(request, self._whole(generation, asked.model))
            await wanted(request, generation.accepted())
            events = messages.MessageEvents(generation, asked.model, len(what.prompt))
            failing = ErrorEventSource(events, bell.rung, partial(_failed, names, notes_of(request.scope).request_id))
            pings = Pings(self._settings.ping_s, messages.event("ping"), bell.ring)
            return EventStream(failing, stack.pop_all(), _headers(generation), pings)
        raise AssertionError("the stack swallows nothing")

    async def _whole(self, generation: Generation, model_name: str) -> Response:
        content = await messages.whole(generation, model_name)
        return Response(content, media_type="application/json", headers=_headers(generation))

    async def _read(self, request: Request) -> bytes:
        settings = self._settings
        content = await body.read(request, settings.body_bytes_max, settings.body_s)
        return body.counted(content, settings.body_fields_max)

    def _ignored(self, request: Request) -> Ignored:
        return notes_of(request.scope).start(strict=self._settings.strict_fields)

    async def _count(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        ignored = self._ignored(request)
        asked = body.decoded(messages.COUNT, await self._read(request), ignored)
        model = self._service.model
        model.check(asked.model)
        conversation = await wanted(request, messages.conversation_of(asked, model, ignored))
        return JSONResponse({"input_tokens": len(conversation.rendered.ids)})


def _note_pins(notes: RequestNotes, generation: Generation) -> None:
    """Let the pins of an answer be counted."""
    notes.pins = outcomes(generation.answers[0].stream.ended)


def _headers(generation: Generation) -> dict[str, str]:
    return {"request-id": str(generation.request_id)}


def _failed(names: Names, request_id: str, error: KvforgeError) -> bytes:
    shown = names.renamed(error) if isinstance(error, InvalidRequest) else error
    body = anthropic_error(shown, request_id)
    return messages.event("error", error=body["error"], request_id=request_id)
