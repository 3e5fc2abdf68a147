"""Continuous requests over several gateways, each compared token by token with an undisturbed run."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import httpx

from tools.cluster.running import DEADLINE_S

CASES, TOKENS = 6, 150


def body(case: int, tokens: int = TOKENS) -> dict[str, Any]:
    prompt = [3 + (7 * case + at * (1 + case % 5)) % 250 for at in range(24 + 8 * case)]
    fixed = {"temperature": 0.8, "ignore_eos": True, "return_token_ids": True, "stream": True}
    return {"prompt": prompt, "seed": case, "max_tokens": tokens, **fixed}


async def streamed(http: httpx.AsyncClient, url: str, asked: dict[str, Any], key: str = "") -> AsyncIterator[list[int]]:
    """Yield the tokens of an answer as they arrive. Raises httpx.TransportError, AssertionError."""
    headers = {"idempotency-key": key} if key else {}
    async with http.stream("POST", f"{url}/v1/completions", json=asked, headers=headers) as stream:
        assert stream.status_code == 200, (await stream.aread()).decode()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                said = json.loads(line[6:])
                assert "error" not in said, said
                for choice in said["choices"]:
                    yield choice.get("token_ids") or []


class Load:
    """counts: completed requests ("done"), their tokens, and requests retried after their gateway was gone ("again"),
    as a client does. faults: violations."""

    def __init__(self, urls: Callable[[], Sequence[str]], clients: int) -> None:
        self._urls, self._clients = urls, clients
        self.expected: list[list[int]] = []
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(timeout=DEADLINE_S)
        for case in range(CASES):  # before any disturbance
            answer: list[int] = []
            async for tokens in streamed(self._http, self._urls()[0], body(case)):
                answer += tokens
            self.expected.append(answer)
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), DEADLINE_S)
        await self._http.aclose()

    async def more(self, requests: int) -> None:
        """Wait until `count` more requests are complete."""
        wanted = self.counts["done"] + requests
        async with asyncio.timeout(DEADLINE_S):
            while self.counts["done"] < wanted:
                assert not self.faults, self.faults
                await asyncio.sleep(0.05)

    async def _client(self, number: int) -> None:
        while not self._over and not self.faults:
            self._number += 1
            name, case = f"load-{self._number}", self._number % CASES
            key = name if number % 2 else ""
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._one(case, key, number)
            except (AssertionError, TimeoutError) as error:
                self.faults.append(f"{name}, key {key!r}: {error!r}")

    async def _one(self, case: int, key: str, number: int) -> None:
        tries = 0
        while True:
            urls = self._urls()
            url = urls[(number // 2 + tries) % len(urls)]
            came: list[int] = []
            try:
                async for tokens in streamed(self._http, url, body(case), key):
                    came += tokens
                    assert came == self.expected[case][: len(came)], "other tokens"
            except httpx.TransportError:
                tries += 1
                self.counts["again"] += 1
                await asyncio.sleep(0.1)
                continue
            assert came == self.expected[case], f"{len(came)} tokens, and no error"
            self.counts["done"] += 1
            self.counts["keyed"] += bool(key)
            self.counts["tokens"] += len(came)
            return
