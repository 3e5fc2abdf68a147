"""A router beside every simulated coordinator: it reads the real KV event stream and must know exactly what can be hit.

The router outlives the coordinator's deaths. The next process repeats what the previous one wrote but did not publish.
"""

from __future__ import annotations

from collections.abc import Callable

from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.kv_events.settings import KvEventsSection
from kvforge.coordinator.kv_events.stream import EventStream, ReplayRequest
from tools.simulation.mirror import Mirror

TENANT = "ant"


class Router:
    """The transport of the event stream, and the mirror built from it."""

    def __init__(self) -> None:
        self._mirror, self._last = Mirror(), -1
        self._compared: list[bytes] = []  # the index at the last comparison; empty after further events

    def publish(self, number: bytes, payload: bytes) -> None:
        """Apply the next batch."""
        value = int.from_bytes(number, "big")
        assert value > self._last, "sequence numbers decrease"
        self._last = value
        self._mirror.apply(payload)
        self._compared = []

    def pop_requests(self) -> list[ReplayRequest]:
        """Return no replay requests: the router misses nothing."""
        return []

    def answer(self, who: bytes, number: bytes, payload: bytes) -> bool | None:
        """Not called: the router requests no replay."""
        raise NotImplementedError

    def check(self, machine: Machine) -> None:
        """Compare the mirror with the machine's index, unless neither has changed since the last comparison."""
        there = _indexed(machine)
        if there != self._compared:
            self._mirror.check(machine, TENANT)
            self._compared = there


def _indexed(machine: Machine) -> list[bytes]:
    """Return a fingerprint of everything that determines prefix hits."""
    cache = machine.cache
    store, pools = cache.store, [(number, group.pool) for number, group in cache.groups.items()]
    heads = [b"%d %d %d" % (number, pool.base, pool.count) for number, pool in pools]
    entries = (cache.blocks.indexed, cache.blocks.generation, store.parent, store.hash, store.tokens)
    return [*heads, *(array.tobytes() for array in entries)]


class Mirrored:
    """The event stream of one process (kvforge.coordinator.turn.EventSubscribers)."""

    def __init__(self, machine: Machine, router: Router, now_us: Callable[[], int]) -> None:
        """Create the stream; one simulated microsecond counts as a millisecond, because everything is faster here."""
        self._machine, self._router = machine, router
        section = KvEventsSection(publish="ipc:///nowhere", tenant=TENANT)
        self._stream = EventStream(machine, router, section, lambda: now_us() / 1000)

    def turned(self) -> bool:
        """Publish after a turn and check the router."""
        waits = self._stream.turned()
        self._router.check(self._machine)
        return waits
