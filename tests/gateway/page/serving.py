"""The page on a real server, beside a chat with fixed answers: for tests, measurements and pictures.

python -m tests.gateway.page.serving RUNTIME_DIR [PORT]
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvforge import AsyncClient
from kvforge.gateway.access.errors import Unauthenticated
from kvforge.gateway.page.routes import routes
from kvforge.protocol.errors import NotAllowed
from kvforge.protocol.transport import client_endpoint

Allowed = Callable[[Request, str], object]
ANSWER = "A block table says where each token's keys and values lie — <b>in blocks</b> ✓."


def everything(_request: Request, _right: str) -> None:
    """Grant all rights to everyone."""


def seeing(_request: Request, right: str) -> None:
    """Grant everyone the right to see only."""
    if right != "see":
        raise NotAllowed(right, "this gateway is read-only")


def keyed(request: Request, _right: str) -> None:
    """Grant all rights to callers with the key."""
    if request.headers.get("authorization") != "Bearer sesame":
        raise Unauthenticated("name a key of this gateway")


async def chat(request: Request) -> Response:
    """Answer like `POST /v1/chat/completions` with stream, cut at arbitrary bytes."""
    asked = await request.json()
    assert asked["stream"] and asked["messages"][-1]["role"] == "user"
    if asked["messages"][-1]["content"] == "fail":
        return JSONResponse({"error": {"message": "the model is <tired>", "code": "not_ready"}}, 503)

    async def pieces() -> AsyncIterator[bytes]:
        deltas = [{"reasoning_content": "hm "}, *({"content": letter} for letter in ANSWER)]
        events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
        usage = {"prompt_tokens": 9, "completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": 4}}
        events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
        told = ": a comment\n\n" + "".join(f"data: {json.dumps(one, ensure_ascii=False)}\r\n\r\n" for one in events)
        sent = told.encode() + b"data: [DONE]\n\n"
        for at in range(0, len(sent), 7):
            yield sent[at : at + 7]
            await asyncio.sleep(0)

    return StreamingResponse(pieces(), media_type="text/event-stream")


@asynccontextmanager
async def serving(
    runtime: Path, *, allowed: Allowed = everything, port: int = 0, timeout_s: float = 5.0
) -> AsyncIterator[str]:
    """Serve the page of the coordinator in a runtime folder; yield the address."""
    async with AsyncClient(client_endpoint(runtime), connect_timeout_s=timeout_s, timeout_s=timeout_s) as client:
        app = Starlette(
            routes=[*routes(lambda: client, allowed=allowed), Route("/v1/chat/completions", chat, methods=["POST"])]
        )
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            work = asyncio.create_task(server.serve([listener]))
            try:
                yield address
            finally:
                server.should_exit = True
                await work


async def _serve(runtime: Path, port: int) -> None:
    async with serving(runtime, port=port) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8000))
