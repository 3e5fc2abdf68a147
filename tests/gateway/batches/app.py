"""The application with files and batches over a scripted coordinator and a SQLite file, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import openai
from starlette.applications import Starlette

from kvforge.gateway.access import Access
from kvforge.gateway.batches import Batches
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
        guard = Guard(Access(self.settings))
        self.batches = Batches(self.service, self.storage, self.settings)
        self.app = Starlette(routes=self.batches.routes(guard))

    def files_held(self) -> int:
        """Return the number of stored files, incomplete ones included."""
        (files,) = self.storage.done(List(tenant="default", kind="file", limit=1000))
        assert isinstance(files, list)
        return len(files)

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        """Return OpenAI's client of the application."""
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app))
        return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=http)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Work on batches meanwhile."""
        keeping = asyncio.ensure_future(self.batches.runner.keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))
            await self.batches.runner.close()
            await self.storage.close()

    def run(self, work: Callable[[openai.AsyncOpenAI], Awaitable[None]], key: str = "none") -> None:
        """Run `work` with a client."""

        async def main() -> None:
            async with self.opened(), self.client(key) as client:
                await work(client)

        asyncio.run(main())


def jsonl(bodies: list[dict[str, Any]], url: str = "/v1/chat/completions") -> bytes:
    """Return an input file with a line for each body, with the custom ids 0, 1, ..."""
    lines = [{"custom_id": str(at), "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def chats(count: int) -> bytes:
    """Return an input file of so many chats."""
    return jsonl([{"model": scripted.NAME, "messages": [{"role": "user", "content": str(at)}]} for at in range(count)])


async def ended(client: openai.AsyncOpenAI, name: str) -> Any:
    """Wait for the end of a batch."""
    async with asyncio.timeout(30):
        while True:
            batch = await client.batches.retrieve(name)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


async def output(client: openai.AsyncOpenAI, name: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output file, in the order of their custom ids."""
    text = (await client.files.content(name)).text if name else ""
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda line: int(line["custom_id"]))
