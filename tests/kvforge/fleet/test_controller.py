"""The controller of a fleet, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvforge.fleet.cluster import controller
from kvforge.fleet.deciding import Replica, View
from kvforge.fleet.messages import READY, NodeStatus, Status

TEXT = """
name = "played"
[replicas]
count = 1
[up]
model = "/model"
"""


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Create the fleet's controller. look: replaces the query of the cluster."""
    monkeypatch.setattr(controller, "FIRST_S", 0.2)
    monkeypatch.setattr(controller.store, "get", lambda _: controller.Spec(text=TEXT, public="p", secret="s"))

    async def made(look: Callable[[], Any]) -> Any:
        async def looked(_: Any) -> View:
            return await look()

        there = SimpleNamespace(look=looked, places={}, members={}, died=lambda _: False)
        monkeypatch.setattr(controller, "FleetWatcher", lambda _: there)

        async def nothing(*_: Any) -> None:
            pass

        monkeypatch.setattr(
            controller, "ActionExecutor", lambda *_: SimpleNamespace(update_gateways=nothing, do=nothing)
        )
        made: Any = controller.Controller.__new__(controller.Controller)
        await made.__init__("played")
        return made

    return made


@pytest.mark.parametrize("answers", [True, False])
def test_who_asks_a_controller_that_has_just_begun_hears_what_it_finds(answers: bool, fleet: Any) -> None:
    """It does not report 0 of 0 replicas, its initial state. An unresponsive cluster is not awaited."""

    async def look() -> View:
        await asyncio.sleep(0.05 if answers else 60.0)
        return View((Replica("r", "one", NodeStatus(phase=READY), 0.0),), ())

    async def test() -> Status:
        made = await fleet(look)
        try:
            return msgspec.json.decode(await made.status(), type=Status)
        finally:
            made._running.cancel()
            await asyncio.gather(made._running, return_exceptions=True)

    status = asyncio.run(test())
    if answers:
        assert [one.name for one in status.replicas] == ["r"] and status.count == 1
    else:
        assert status.sentences == ("the controller is starting",)
