"""The routes of OpenAI's API, and vLLM's extensions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvforge.gateway.access import Caller
from kvforge.gateway.chat.naming import Names
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.generation import Generation, Submission, WakeUp, charge
from kvforge.gateway.generate.service import Model, Service
from kvforge.gateway.http import body
from kvforge.gateway.http.errors import ANTHROPIC, api_of, openai_error
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.http.notes import notes_of
from kvforge.gateway.http.stream import COMMENT, ErrorEventSource, EventSource, EventStream, Pings, wanted
from kvforge.protocol.errors import InvalidRequest, KvforgeError

from . import chat, completions, responses, tokens
from .background import Background
from .bodies import error_event
from .call import Call
from .conversations import Conversations
from .kept import forget
from .request_body import Chat, Completion
from .response_routes import StoredResponses
from .sessions import Sessions

JSON = "application/json"


class Work(Protocol):
    """A decoded and checked request."""

    wanted: list[Submission]

    async def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the complete response."""

    def events(self, generations: list[Generation]) -> EventSource:
        """Return the response as a stream of events."""


A = TypeVar("A", Chat, Completion)


class OpenAI:
    """The routes over one service.

    Args:
        service: The connection to the coordinator.
        settings: The gateway's settings.
        background: The background responses, with the stored objects; None if the gateway stores nothing.
    """

    def __init__(self, service: Service, settings: Settings, background: Background | None = None) -> None:
        self._service, self._settings = service, settings
        self._stored = background.stored if background is not None else None
        self._kept = StoredResponses(background.stored, background, settings) if background is not None else None
        self._sessions = Sessions(background.stored, background, settings) if background is not None else None

    def routes(self, guard: Guard) -> list[Route]:
        """Return all routes."""
        posts = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._responses,
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets = {"/v1/models": self._models, "/v1/models/{name:path}": self._model}
        stored: list[Route] = []
        if self._kept is not None and self._stored is not None:
            stored = [*self._kept.routes(guard), *Conversations(self._stored, self._settings).routes(guard)]
            stored += self._sessions.routes(guard) if self._sessions is not None else []
        return [
            *stored,
            *(Route(path, guard(handler), methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, guard(handler), methods=["GET"]) for path, handler in gets.items()),
        ]

    async def _completions(self, request: Request, caller: Caller) -> Response:
        return await self._run(request, caller, completions.READER, completions.Completions.of, _failed)

    async def _chat(self, request: Request, caller: Caller) -> Response:
        return await self._run(request, caller, chat.READER, chat.ChatCompletion.of, _failed)

    async def _responses(self, request: Request, caller: Caller) -> Response:
        ignored = self._ignored(request)
        asked = body.decoded(responses.READER, await self._read(request), ignored)
        call = Call.of(request.headers, caller, self._settings, self._service.known, asked, ignored)
        try:
            give_up = partial(forget, self._service)
            work = await wanted(request, responses.Responses.of(call, asked, self._stored, give_up))
            if asked.background and self._kept is not None:
                return await self._kept.create(work)
            return await self._answer(request, call, work, bool(asked.stream), responses.response_failed)
        except InvalidRequest as error:
            raise call.names.renamed(error) from None

    async def _embeddings(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        raise InvalidRequest("model", "embeddings are not served: this service generates text")

    async def _run(
        self,
        request: Request,
        caller: Caller,
        reader: Reader[A],
        make: Callable[[Call, A], Awaitable[Work]],
        failed: Callable[[KvforgeError], bytes],
    ) -> Response:
        ignored = self._ignored(request)
        asked = body.decoded(reader, await self._read(request), ignored)
        call = Call.of(request.headers, caller, self._settings, self._service.known, asked, ignored)
        try:
            work = await wanted(request, make(call, asked))
            return await self._answer(request, call, work, bool(asked.stream), failed)
        except InvalidRequest as error:
            raise call.names.renamed(error) from None

    async def _answer(
        self, request: Request, call: Call, work: Work, stream: bool, failed: Callable[[KvforgeError], bytes]
    ) -> Response:
        bell = WakeUp()
        async with AsyncExitStack() as stack:
            generations = [
                await stack.enter_async_context(self._service.start(one, bell, call.session)) for one in work.wanted
            ]
            stack.callback(charge, call.caller, generations)
            if not stream:
                return await wanted(request, self._whole(work, generations))
            # Refusals need an HTTP status, so wait for admission before the response begins.
            for generation in generations:
                await wanted(request, generation.accepted())
            events = ErrorEventSource(work.events(generations), bell.rung, partial(_named, failed, call.names))
            pings = Pings(self._settings.ping_s, COMMENT, bell.ring)
            return EventStream(events, stack.pop_all(), self._headers(generations), pings)
        raise AssertionError("the stack swallows nothing")

    async def _whole(self, work: Work, generations: list[Generation]) -> Response:
        content = await work.whole(generations)
        return Response(content, media_type=JSON, headers=self._headers(generations))

    def _headers(self, generations: list[Generation]) -> dict[str, str]:
        return {"x-request-id": str(generations[0].request_id)}

    async def _models(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        model = self._service.model
        names = list(model.names)
        listed: dict[str, object] = {"object": "list", "data": [described(model, name) for name in names]}
        if api_of(request.url.path, request.headers.raw) is ANTHROPIC:
            listed |= {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse(listed)

    async def _model(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        name = request.path_params["name"]
        self._service.model.check(name)
        return JSONResponse(described(self._service.model, name))

    async def _tokenize(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        ignored = self._ignored(request)
        return JSONResponse(
            await wanted(request, tokens.tokenize(self._service.model, await self._read(request), ignored))
        )

    async def _detokenize(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        ignored = self._ignored(request)
        return JSONResponse(
            await wanted(request, tokens.detokenize(self._service.model, await self._read(request), ignored))
        )

    async def _read(self, request: Request) -> bytes:
        settings = self._settings
        content = await body.read(request, settings.body_bytes_max, settings.body_s)
        return body.counted(content, settings.body_fields_max)

    def _ignored(self, request: Request) -> Ignored:
        return notes_of(request.scope).start(strict=self._settings.strict_fields)


def described(model: Model, name: str) -> dict[str, object]:
    """Describe a model with the fields of OpenAI's, vLLM's and Anthropic's references."""
    context = model.info.context_tokens_max
    return {
        "id": name,
        "object": "model",
        "created": model.since,
        "owned_by": "kvforge",
        "root": model.info.name,
        "max_model_len": context,
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(model.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": context,
        "max_tokens": context,
    }


def _named(failed: Callable[[KvforgeError], bytes], names: Names, error: KvforgeError) -> bytes:
    return failed(names.renamed(error) if isinstance(error, InvalidRequest) else error)


def _failed(error: KvforgeError) -> bytes:
    return error_event(openai_error(error))
