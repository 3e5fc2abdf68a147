"""A newly started gateway routes no request before it knows its replicas."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvforge.client.options import RequestOptions
from kvforge.gateway.config import Replica as Place
from kvforge.gateway.replicas import replica_set as replicas
from kvforge.gateway.replicas.replica import Replica
from kvforge.protocol.steady_clock import monotonic

ANSWER_S, LOST_S = 0.1, 0.5


@pytest.mark.parametrize(
    ("slow_s", "failures", "asked"), [(0.2, 0, ["a", "b"]), (0.0, 2, ["a", "b"]), (5.0, 0, ["b"]), (0.0, 1000, ["b"])]
)
def test_the_first_request_waits_until_all_have_answered(
    slow_s: float, failures: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's key may be known to a replica not yet queried. Unresponsive or unreachable replicas are not
    awaited; one failed attempt does not count as unreachable."""
    left = failures
    seen: list[tuple[list[str], float]] = []

    async def look(self: Replica) -> None:
        nonlocal left
        self._silent_since = None
        if self.name == "a":
            await asyncio.sleep(slow_s)
            if left:
                left, self._silent_since = left - 1, 1.0
                return
        self.health: Any = SimpleNamespace(model=SimpleNamespace(fingerprint="one"))
        self.reason = ""

    async def choose(_router: Any, clients: dict[str, Any], *_: Any, answer_s: float, **__: Any) -> Any:
        seen.append((sorted(clients), answer_s))
        return SimpleNamespace(silent=(), name=None)

    monkeypatch.setattr(Replica, "_look", look)
    monkeypatch.setattr("kvforge.gateway.replicas.replica.LOOK_S", 0.05)
    monkeypatch.setattr(Replica, "ready", property(lambda self: not self.reason))
    monkeypatch.setattr(replicas, "choose_replica", choose)

    async def test() -> None:
        places = {name: Place(endpoint=f"ipc:///nowhere-{name}") for name in "ab"}
        fleet = replicas.ReplicaSet(places, answer_s=ANSWER_S, lost_s=LOST_S)
        watching = asyncio.create_task(fleet.watch())
        await asyncio.sleep(0.05)
        for key in ("", "k"):
            options = RequestOptions(max_tokens=1, idempotency_key=key)
            await fleet.choose(np.arange(3, dtype=np.int32), options, "", frozenset())
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(test())
    assert seen == [(asked, ANSWER_S), (asked, LOST_S)], "a slow replica may already run a request with a key"


def test_it_is_patient_as_long_as_nobody_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the last moment with a serving replica, with or without requests."""
    there = False

    async def look(self: Replica) -> None:
        self.health: Any = SimpleNamespace(model=SimpleNamespace(fingerprint="one"))

    monkeypatch.setattr(Replica, "_look", look)
    monkeypatch.setattr(Replica, "ready", property(lambda _: there))
    monkeypatch.setattr("kvforge.gateway.replicas.replica.LOOK_S", 0.02)

    async def test() -> None:
        nonlocal there
        fleet = replicas.ReplicaSet({"a": Place(endpoint="ipc:///nowhere")}, answer_s=ANSWER_S, lost_s=LOST_S)
        watching = asyncio.create_task(fleet.watch())

        async def looked() -> None:
            fleet.news.clear()
            await fleet.news.wait()

        await looked()
        assert fleet.patient_until < monotonic(), "no replica has ever served"
        there, came = True, monotonic()
        await looked()
        there, gone = False, monotonic()
        for _ in range(3):
            await looked()
        assert came + LOST_S <= fleet.patient_until <= gone + LOST_S
        there, back = True, monotonic()
        assert fleet.patient_until >= back + LOST_S, "it serves now"
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(test())


def test_a_refusal_outweighs_an_older_answer_and_yields_to_a_later_one() -> None:
    """A replica that drains refuses at once; the poll of its health comes up to half a second later."""

    async def test() -> None:
        replica = Replica("a", Place(endpoint="ipc:///nowhere"), LOST_S)
        ready: Any = SimpleNamespace(ready=True, reason="")

        async def answered_before_the_refusal() -> Any:
            replica.refused("it drains")
            return ready

        async def answered() -> Any:
            return ready

        client: Any = SimpleNamespace(health=answered_before_the_refusal, close=replica.client.close)
        real, replica.client = replica.client, client
        replica._streams = cast(Any, SimpleNamespace(connected=True))
        replica.reason = ""
        assert replica.ready
        await replica._look()
        assert not replica.ready and replica.reason == "it drains"
        client.health = answered
        await replica._look()
        assert replica.ready
        await real.close()

    asyncio.run(test())
