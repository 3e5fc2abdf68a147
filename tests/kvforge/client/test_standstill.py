"""A client process that was suspended during a call: the time does not count against the coordinator."""

from __future__ import annotations

import asyncio

import pytest

from kvforge import AsyncClient, Client
from kvforge.client.blocking.waiting import drive
from kvforge.protocol.steady_clock import monotonic
from tests.kvforge.fake_coordinator import Running
from tests.standstill import Standstill

CALLS = 3


class Later:
    """A condition that becomes true a few polls after the suspension."""

    def __init__(self, standstill: Standstill) -> None:
        self._standstill, self.looks = standstill, 0

    def __call__(self) -> bool:
        self.looks += 1
        if self.looks == 1:
            self._standstill.stand_still()
        return self.looks > CALLS


def test_a_blocking_call_has_its_time_though_the_process_stood_still(
    fake: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    standstill = Standstill(monkeypatch)
    with Client(fake.endpoint, timeout_s=30) as kv:
        kv.stats()
        later, calls = Later(standstill), kv._calls
        assert drive(calls._until(later, (calls.link,), monotonic() + 30.0)) is True
        assert later.looks == CALLS + 1


async def _in_time(endpoint: str, standstill: Standstill) -> int:
    async with AsyncClient(endpoint, timeout_s=30) as kv:
        await kv.stats()
        later, calls = Later(standstill), kv._calls
        assert await calls._until(later, (calls.link,), monotonic() + 30.0) is True
        return later.looks


def test_an_asyncio_call_has_its_time_though_the_process_stood_still(
    fake: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asyncio.run(_in_time(fake.endpoint, Standstill(monkeypatch))) > CALLS


def test_a_lost_connection_is_tried_again_for_its_whole_time(fake: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    standstill = Standstill(monkeypatch)
    with Client(fake.endpoint, timeout_s=30, reconnect_s=20.0) as kv:
        kv.stats()
        reconnector = kv._calls.link.reconnector
        kv._calls.session.interrupt()
        with reconnector.waiting():
            standstill.stand_still()
            assert reconnector.left_s > 15.0
