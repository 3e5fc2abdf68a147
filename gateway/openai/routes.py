"""The paths of OpenAI's API, and what vLLM has beside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.access import Caller
from gateway.config import Settings
from gateway.generate.generation import Bell, Generation, Wanted, charge
from gateway.generate.service import Service
from gateway.http import body
from gateway.http.errors import openai_error
from gateway.http.fields import Reader
from gateway.http.guard import Guard
from gateway.http.ignored import Ignored
from gateway.http.notes import notes_of
from gateway.http.stream import EventStream, Failing, Taken, wanted
from kvforge.protocol.errors import InvalidRequest, KvforgeError

from . import chat, completions, responses, tokens
from .asked import Chat, Completion
from .call import Call
from .responses_asked import Create
from .said import error_event

JSON = "application/json"


class Work(Protocol):
    """One request that is understood."""

    wanted: list[Wanted]

    async def whole(self, generations: list[Generation]) -> bytes: ...
    def events(self, generations: list[Generation]) -> Taken: ...


A = TypeVar("A", Chat, Completion, Create)


class OpenAI:
    """Its paths, over one service."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service, self._settings = service, settings
        self._created = 0

    def routes(self, guard: Guard) -> list[Route]:
        """All of them."""
        posts = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._responses,
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets = {"/v1/models": self._models, "/v1/models/{name:path}": self._model}
        return [
            *(Route(path, guard(handler, openai_error), methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, guard(handler, openai_error), methods=["GET"]) for path, handler in gets.items()),
        ]

    async def _completions(self, request: Request, caller: Caller) -> Response:
        return await self._run(request, caller, completions.READER, completions.Completions)

    async def _chat(self, request: Request, caller: Caller) -> Response:
        return await self._run(request, caller, chat.READER, chat.ChatCompletion)

    async def _responses(self, request: Request, caller: Caller) -> Response:
        return await self._run(request, caller, responses.READER, responses.Responses, _response_failed)

    async def _embeddings(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        raise InvalidRequest("model", "embeddings are not served: this service generates text")

    async def _run(
        self,
        request: Request,
        caller: Caller,
        reader: Reader[A],
        make: Callable[[Call, A], Work],
        failed: Callable[[KvforgeError], bytes] | None = None,
    ) -> Response:
        ignored = self._ignored(request)
        asked = body.decoded(reader, await self._read(request), ignored)
        call = Call.of(request.headers, caller, self._settings, self._service.known, asked, ignored)
        work = make(call, asked)
        bell = Bell()
        async with AsyncExitStack() as stack:
            generations = [
                await stack.enter_async_context(self._service.start(one, bell, call.session)) for one in work.wanted
            ]
            stack.callback(charge, caller, generations)
            if not asked.stream:
                return await wanted(request, self._whole(work, generations))
            # What is refused is said with a status, before the response begins.
            for generation in generations:
                await wanted(request, generation.accepted())
            events = Failing(work.events(generations), bell.rung, failed or _failed)
            return EventStream(events, stack.pop_all(), self._headers(generations))
        raise AssertionError("the stack swallows nothing")

    async def _whole(self, work: Work, generations: list[Generation]) -> Response:
        content = await work.whole(generations)
        return Response(content, media_type=JSON, headers=self._headers(generations))

    def _headers(self, generations: list[Generation]) -> dict[str, str]:
        return {"x-request-id": str(generations[0].request_id)}

    async def _models(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        model = self._service.model
        return JSONResponse({"object": "list", "data": [self._described(name) for name in model.names]})

    async def _model(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        name = request.path_params["name"]
        self._service.model.check(name)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, object]:
        model = self._service.model
        return {
            "id": name,
            "object": "model",
            "created": model.since,
            "owned_by": "kvforge",
            "root": model.info.name,
            "max_model_len": model.info.context_tokens_max,
        }

    async def _tokenize(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        ignored = self._ignored(request)
        return JSONResponse(tokens.tokenize(self._service.model, await self._read(request), ignored))

    async def _detokenize(self, request: Request, caller: Caller) -> Response:  # noqa: ARG002
        ignored = self._ignored(request)
        return JSONResponse(tokens.detokenize(self._service.model, await self._read(request), ignored))

    async def _read(self, request: Request) -> bytes:
        return await body.read(request, self._settings.body_bytes_max, self._settings.body_s)

    def _ignored(self, request: Request) -> Ignored:
        return notes_of(request.scope).start(strict=self._settings.strict_fields)


def _failed(error: KvforgeError) -> bytes:
    return error_event(openai_error(error))


def _response_failed(error: KvforgeError) -> bytes:
    said = openai_error(error)["error"]
    return responses.event("error", code=said["code"], message=said["message"], param=said["param"], sequence_number=0)
