"""A router beside every simulated coordinator: it reads the real stream, and must know exactly what can be hit.

It outlives the coordinator's deaths, as routers do. What a process wrote and did not tell any more is told anew by the
next one.
"""

from __future__ import annotations

from collections.abc import Callable

from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.kv_events.settings import KvEventsSection
from kvforge.coordinator.kv_events.stream import Asked, EventStream
from tools.simulation.mirror import Mirror

TENANT = "ant"


class Router:
    """What carries the stream, and what is known from it."""

    def __init__(self) -> None:
        self._mirror, self._last = Mirror(), -1
        self._compared: list[bytes] = []  # what was there when it was compared last; nothing: it has been told of more

    def publish(self, number: bytes, payload: bytes) -> None:
        """The next batch."""
        value = int.from_bytes(number, "big")
        assert value > self._last, "numbers go back"
        self._last = value
        self._mirror.apply(payload)
        self._compared = []

    def asked(self) -> list[Asked]:
        """It misses nothing."""
        return []

    def answer(self, who: bytes, number: bytes, payload: bytes) -> bool | None:
        """It asks nothing."""
        raise NotImplementedError

    def check(self, machine: Machine) -> None:
        """It knows what can be hit. Where neither side has changed since that was seen last, it is not looked again."""
        there = _indexed(machine)
        if there != self._compared:
            self._mirror.check(machine, TENANT)
            self._compared = there


def _indexed(machine: Machine) -> list[bytes]:
    """All that says what can be hit."""
    cache = machine.cache
    store, pools = cache.store, [(number, group.pool) for number, group in cache.groups.items()]
    told = [b"%d %d %d" % (number, pool.base, pool.count) for number, pool in pools]
    entries = (cache.blocks.indexed, cache.blocks.generation, store.parent, store.hash, store.tokens)
    return [*told, *(array.tobytes() for array in entries)]


class Mirrored:
    """One life of the stream: kvforge.coordinator.turn.Listeners."""

    def __init__(self, machine: Machine, router: Router, now_us: Callable[[], int]) -> None:
        """now_us: of the world. A millisecond of the stream's is one of its microseconds: all happens faster here."""
        self._machine, self._router = machine, router
        section = KvEventsSection(publish="ipc:///nowhere", tenant=TENANT)
        self._stream = EventStream(machine, router, section, lambda: now_us() / 1000)

    def turned(self) -> bool:
        """A turn is over."""
        waits = self._stream.turned()
        self._router.check(self._machine)
        return waits
