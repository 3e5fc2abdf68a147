"""One simulated fleet: gateways with their real routing and moving of requests, replicas, clients, and faults.

These promises are checked for each request:

- delivered tokens never change, and equal those of an undisturbed replica;
- an accepted request ends, whatever dies meanwhile;
- another gateway delivers a request with a key completely, and without a fault in between it is not computed twice;
- nothing is left at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from kvforge import SamplingParams
from kvforge.client.options import RequestOptions
from kvforge.gateway.replicas.replica_set import ReplicaSet
from kvforge.gateway.replicas.stream import MovingStream
from kvforge.protocol.errors import CapacityExceeded, Unavailable
from kvforge.routing import seed_of

from .connection import Connection
from .loop import simulated
from .replica import SimulatedReplica, answer
from .settings import BACK_S, Settings, draw_settings

GATEWAYS = 2
AGAIN_S, CALM_S = 0.5, 60.0
# Maximum time from a request's first try to its end: many times the time for its tokens and all deaths on its way.
END_S = 600.0
GRACE_S = 2.0  # time that a coordinator keeps the requests of a disconnected client


class Violation(AssertionError):
    """A broken promise."""


def promise(kept: bool, words: str) -> None:
    """Raise Violation if a promise is broken."""
    if not kept:
        raise Violation(words)


class SimulatedGateway:
    """One process of a gateway; `dead` is set when it has died."""

    def __init__(self, world: World) -> None:
        settings = world.settings
        self.world, self.dead = world, asyncio.Event()
        self.connections: list[Connection] = []

        def client(place: str, **_: Any) -> Connection:
            connection = Connection(world.replicas[place], settings.lost_s, world.random("ways"))
            connection.connected = connection.replica.up
            self.connections.append(connection)
            return connection

        places = {
            name: cast(Any, SimpleNamespace(coordinator=name, server_key="", key_file="")) for name in world.replicas
        }
        with patch("kvforge.gateway.replicas.replica.AsyncClient", client):
            self.fleet = ReplicaSet(places, answer_s=settings.answer_s, lost_s=settings.lost_s)
        self._watching = asyncio.ensure_future(self.fleet.watch())

    async def die(self) -> None:
        """Kill the gateway: its connections end, and its clients get no more tokens."""
        self.dead.set()
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        for connection in self.connections:
            connection.closed, connection.connected = True, False
        await asyncio.sleep(GRACE_S)
        for connection in self.connections:
            if connection.replica.up:
                connection.replica.forget(connection)


class World:
    """Runs one seed.

    Attributes:
        events: events in order, to compare runs.
        refused: refused requests that are submitted again.
    """

    def __init__(self, seed: int, settings: Settings | None = None) -> None:
        self.settings = settings or draw_settings(Random(f"{seed}/settings"))
        self._seed, self._streams = seed, dict[str, Random]()
        self.replicas = {
            name: SimulatedReplica(name, self.settings) for name in map(chr, range(97, 97 + self.settings.replicas))
        }
        self.gateways: list[SimulatedGateway] = []
        self.troubled: set[str] = set()
        self.events: list[str] = []
        self.refused = 0
        self._over = False

    def random(self, name: str) -> Random:
        """Return the random stream of a purpose."""
        return self._streams.setdefault(name, Random(f"{self._seed}/{name}"))

    def run(self) -> None:
        """Run the world to its end; raise Violation if a promise is broken."""
        replicas = "kvforge.gateway.replicas"
        stand_ins: dict[str, object] = {
            f"{replicas}.replica.AsyncStreams": lambda client: client,
            f"{replicas}.failover.secrets.randbits": self.random("seeds").getrandbits,
        }
        # The real clock moves while a busy machine runs something else: a seed would not replay.
        for part in ("failover", "replica", "replica_set"):
            stand_ins[f"{replicas}.{part}.monotonic"] = lambda: asyncio.get_running_loop().time()
        with ExitStack() as patched:
            for target, stand_in in stand_ins.items():
                patched.enter_context(patch(target, stand_in))
            simulated(self._whole())

    async def _whole(self) -> None:
        loop = asyncio.get_running_loop()
        self.gateways = [SimulatedGateway(self) for _ in range(GATEWAYS)]
        steps = [asyncio.ensure_future(self._steps(replica)) for replica in self.replicas.values()]
        trouble = asyncio.ensure_future(self._inject_faults())
        await asyncio.sleep(1.0)
        random = self.random("requests")
        async with asyncio.TaskGroup() as group:
            for number in range(self.settings.requests):
                group.create_task(
                    self._request(number, random.uniform(0.0, self.settings.over_s), Random(random.random()))
                )
        self._over = True
        await trouble
        await asyncio.sleep(CALM_S)
        self.events.append(f"{loop.time():.6f} over")
        for replica in self.replicas.values():
            promise(not replica.running and not replica.waiting, f"{replica.name} computes a request without a reader")
        for gateway in self.gateways:
            held = {replica.name: len(replica.guests) for replica in gateway.fleet.replicas if replica.guests}
            promise(not held, f"a gateway holds finished requests: {held}")
            promise(gateway.fleet._router.remembered == 0, "the router remembers decisions of finished requests")
            await gateway.die()
        for task in steps:
            task.cancel()
        await asyncio.gather(*steps, return_exceptions=True)

    async def _steps(self, replica: SimulatedReplica) -> None:
        while True:
            await asyncio.sleep(self.settings.step_s)
            if replica.up and not replica.hung:
                replica.step()

    # --------------------------------------------------------------------------------------------------------- requests

    async def _request(self, number: int, at_s: float, random: Random) -> None:
        await asyncio.sleep(at_s)
        start = random.choice((range(0), range(1, 65), range(1000, 1161)))
        prompt = (*start, *(random.randrange(1 << 14) for _ in range(random.randint(1, 80))), 1 << 14 | number)
        key = f"k{number}" if random.random() < 0.5 else ""
        seed = random.getrandbits(40) if random.random() < 0.4 else None
        options = RequestOptions(
            max_tokens=random.choice((1, 5, 40, 200)),
            idempotency_key=key,
            sampling=SamplingParams(temperature=1.0, seed=seed),
        )
        session = f"s{number % 3}" if random.random() < 0.3 else ""
        cancel_at = random.randint(1, options.max_tokens) if random.random() < 0.1 else 0
        given: list[int] = []
        with_seed = seed if seed is not None else seed_of("default", key) if key else None
        try:
            async with asyncio.timeout(END_S):
                while True:
                    gateway = random.choice([each for each in self.gateways if not each.dead.is_set()])
                    done = await self._tried(gateway, prompt, options, session, given, cancel_at, with_seed)
                    if done:
                        break
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            raise Violation(f"request {number} did not end within {END_S:g} s") from None
        self.events.append(f"{asyncio.get_running_loop().time():.6f} {number} {done} {len(given)}")
        if key:
            places = {name for name, replica in self.replicas.items() if ("default", key) in replica.computed}
            calm = not places & self.troubled and 2 * self.settings.delay_s < self.settings.answer_s
            promise(len(places) < 2 or not calm, f"request {number} was computed by {sorted(places)}, without a fault")

    async def _tried(
        self,
        gateway: SimulatedGateway,
        prompt: tuple[int, ...],
        options: RequestOptions,
        session: str,
        given: list[int],
        cancel_at: int,
        seed: int | None,
    ) -> str:
        """Return how the request ended, or "" if it must be submitted again."""
        news = asyncio.Event()
        (stream,) = gateway.fleet.submit_samples(np.array(prompt, np.int32), 1, options, news.set, session)
        behind = len(given)
        dead = asyncio.ensure_future(gateway.dead.wait())
        try:
            while True:
                waiting = asyncio.ensure_future(news.wait())
                await asyncio.wait({waiting, dead}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if gateway.dead.is_set():
                    return "" if options.idempotency_key else "lost with its gateway"
                news.clear()
                behind = self._looked(stream, given, behind)
                if stream.error is not None:
                    door = isinstance(stream.error, CapacityExceeded | Unavailable)
                    promise(door and not stream.accepted, f"an accepted request failed: {stream.error}")
                    self.refused += 1
                    return ""
                if stream.ended is not None:
                    break
                if cancel_at and len(given) >= cancel_at:
                    stream.cancel()
                    return "cancelled"
        finally:
            dead.cancel()
        promise(stream.ended.reason == "length", f"it ended with {stream.ended.reason}")
        if seed is None:
            seed = next(iter(self._seeds(prompt)))
        promise(given == answer(prompt, seed, options.max_tokens), "the tokens differ from an undisturbed replica's")
        return "ended"

    def _looked(self, stream: MovingStream, given: list[int], behind: int) -> int:
        """Take over received tokens; return how many tokens of the earlier gateway are still missing."""
        have = [*stream.tokens]
        common = min(len(have), len(given))
        promise(have[:common] == given[:common], "delivered tokens have changed")
        promise(len(have) >= len(given) or len(have) < behind, "delivered tokens are missing")
        given.extend(have[len(given) :])
        return behind if len(have) < behind else 0

    def _seeds(self, prompt: tuple[int, ...]) -> set[int]:
        found = {seed for replica in self.replicas.values() for asked, seed in replica.seeds if asked == prompt}
        promise(len(found) == 1, "a request was submitted with different seeds")
        return found

    # -------------------------------------------------------------------------------------------------------------
    # faults

    async def _inject_faults(self) -> None:
        """Inject faults until all requests have ended; the first replica has none."""
        random, settings = self.random("trouble"), self.settings
        names = sorted(self.replicas)[1:]
        kinds: list[tuple[str, Any]] = [
            ("kill", self._kill),
            ("lose", self._lose),
            ("hang", self._hang),
            ("drain", self._drain),
        ]
        busy: dict[str, asyncio.Task[None]] = {}
        while not self._over:
            await asyncio.sleep(random.expovariate(1 / settings.gap_s))
            kind, act = random.choice([*kinds, ("gateway", None)])
            if act is None:
                await self._kill_gateway(random.randrange(GATEWAYS))
                continue
            name = random.choice(names)
            back_s = random.choice((0.02, settings.lost_s * 0.7, settings.lost_s + 1.0, BACK_S))
            if name not in busy or busy[name].done():
                self.troubled.add(name)
                self.events.append(f"{asyncio.get_running_loop().time():.6f} {kind} {name} {back_s}")
                busy[name] = asyncio.ensure_future(act(self.replicas[name], back_s))
        for task in busy.values():
            await task

    def _connections(self, replica: SimulatedReplica) -> list[Connection]:
        return [each for gateway in self.gateways for each in gateway.connections if each.replica is replica]

    async def _kill(self, replica: SimulatedReplica, back_s: float, journal_lost: bool = False) -> None:
        replica.die(journal_lost=journal_lost)
        for connection in self._connections(replica):
            connection.died()
        await asyncio.sleep(back_s)
        replica.up = True
        for connection in self._connections(replica):
            connection.rose(journal_lost)

    def _lose(self, replica: SimulatedReplica, back_s: float) -> Coroutine[Any, Any, None]:
        return self._kill(replica, back_s, journal_lost=True)

    async def _hang(self, replica: SimulatedReplica, back_s: float) -> None:
        replica.hung = True
        await asyncio.sleep(back_s)
        replica.hung = False
        for connection in self._connections(replica):
            connection.free()

    async def _drain(self, replica: SimulatedReplica, back_s: float) -> None:
        replica.drain()
        await asyncio.sleep(back_s)
        await self._kill(replica, 0.5)

    async def _kill_gateway(self, place: int) -> None:
        self.events.append(f"{asyncio.get_running_loop().time():.6f} gateway {place}")
        old, self.gateways[place] = self.gateways[place], SimulatedGateway(self)
        await old.die()
