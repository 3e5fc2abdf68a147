"""The time limit for the body of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from kvforge.gateway.http.body import read
from kvforge.gateway.http.errors import TooSlow
from tests.standstill import HOUR_S, Standstill, set_forward

BYTES_MAX = 100


def request(arriving: asyncio.Queue[dict[str, Any]]) -> Request:
    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, arriving.get)


def test_a_body_that_does_not_come_is_too_slow() -> None:
    async def check() -> None:
        await read(request(asyncio.Queue()), BYTES_MAX, 0.01)

    with pytest.raises(TooSlow, match=r"not received within 0.01 s"):
        asyncio.run(check())


def test_a_body_that_comes_while_the_gateway_stands_still_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Standstill(monkeypatch)

    async def check() -> bytes:
        loop, arriving = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
        arriving.put_nowait({"type": "http.request", "body": b"a", "more_body": True})
        reading = asyncio.ensure_future(read(request(arriving), BYTES_MAX))
        while not arriving.empty():
            await asyncio.sleep(0)
        clock.stand_still()
        set_forward(monkeypatch, loop, HOUR_S)
        loop.call_later(0.01, arriving.put_nowait, {"type": "http.request", "body": b"b", "more_body": False})
        return await reading

    assert asyncio.run(check()) == b"ab"
