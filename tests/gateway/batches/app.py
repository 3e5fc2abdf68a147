"""The application with files and batches over a scripted coordinator and a SQLite file, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import openai
from starlette.applications import Starlette

from kvforge.gateway.access import Access
from kvforge.gateway.batches.file_routes import FileRoutes
from kvforge.gateway.batches.files import Files
from kvforge.gateway.config import Settings
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.storage import List
from kvforge.gateway.storage.inline import InlineStorage
from tests.gateway import scripted

LINE = {"method": "POST", "url": "/v1/chat/completions"}


class App:
    """One gateway process. Several may be opened over one folder."""

    def __init__(self, folder: Path, script: scripted.Script | None = None, **settings: Any) -> None:
        self.script = script or scripted.Script()
        self.settings = Settings(state_dir=str(folder), **settings)
        self.storage = InlineStorage(
            f"sqlite:{folder / 'stored.sqlite'}", tenant_bytes_max=self.settings.storage.tenant_bytes_max
        )
        self.service = cast(Any, scripted.Service(self.script, scripted.tokenizer()))
        self.files = Files(self.storage, self.settings)
        guard = Guard(Access(self.settings))
        self.app = Starlette(routes=FileRoutes(self.files, self.settings).routes(guard))

    def files_held(self) -> int:
        """Return the number of stored files, incomplete ones included."""
        (files,) = self.storage.done(List(tenant="default", kind="file", limit=1000))
        assert isinstance(files, list)
        return len(files)

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        """Return OpenAI's client of the application."""
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app))
        return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=http)

    def run(self, work: Callable[[openai.AsyncOpenAI], Awaitable[None]], key: str = "none") -> None:
        """Run `work` with a client."""

        async def main() -> None:
            try:
                async with self.client(key) as client:
                    await work(client)
            finally:
                await self.storage.close()

        asyncio.run(main())


def jsonl(bodies: list[dict[str, Any]], url: str = "/v1/chat/completions") -> bytes:
    """Return an input file with a line for each body, with the custom ids 0, 1, ..."""
    lines = [{"custom_id": str(at), "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def chats(count: int) -> bytes:
    """Return an input file of so many chats."""
    return jsonl([{"model": scripted.NAME, "messages": [{"role": "user", "content": str(at)}]} for at in range(count)])
