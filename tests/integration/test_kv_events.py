"""KV events of a real coordinator and worker, read as a router reads vLLM's, across crashes and missed batches."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import pytest
import zmq

from kvforge import Client, SamplingParams
from tools.cluster.cluster import Cluster
from tools.simulation.mirror import Known, Mirror

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
END = (-1).to_bytes(8, "big", signed=True)
WAIT_S = 60.0
SIZE = 16
RECONNECT_MS = 100
PROMPT = [i % 7 for i in range(2 * SIZE + 1)]


class Router:
    """A subscriber like vLLM's example: on a gap in the sequence numbers it requests a replay."""

    def __init__(self, cluster: Cluster, stack: ExitStack, encoding: str) -> None:
        context = stack.enter_context(zmq.Context())
        self._replay = stack.enter_context(context.socket(zmq.DEALER))
        self._live = stack.enter_context(context.socket(zmq.SUB))
        self._replay.connect(f"ipc://{cluster.folder}/replay")
        self._live.connect(f"ipc://{cluster.folder}/kv")
        self._live.setsockopt(zmq.SUBSCRIBE, b"kv@here")
        for socket in (self._live, self._replay):
            socket.linger = 0
        self._last, self._deadline = -1, 0.0
        self.mirror, self.missed = Mirror(encoding), 0

    def until(self, what: Callable[[], bool], meanwhile: Callable[[], None] | None = None) -> None:
        """Read until the condition holds. meanwhile: called while nothing arrives, because a subscription takes
        time."""
        self._deadline = monotonic() + WAIT_S
        while not what():
            if meanwhile is not None and not self._live.poll(RECONNECT_MS):
                meanwhile()
                continue
            topic, number, payload = self._received(self._live)
            assert topic == b"kv@here"
            self._read(int.from_bytes(number, "big"), payload)

    def replay(self) -> None:
        """Request all batches after the last known one."""
        self._deadline = monotonic() + WAIT_S
        for number, payload in self._missed(self._last + 1):
            if number > self._last:
                self._last = number
                self.mirror.apply(payload)

    def _read(self, number: int, payload: bytes) -> None:
        if number != self._last + 1:
            self.missed += 1
            self.replay()
        if number > self._last:
            self._last = number
            self.mirror.apply(payload)

    def _missed(self, first: int) -> Iterator[tuple[int, bytes]]:
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        empty, number, payload = self._received(self._replay)
        while number != END:
            assert not empty
            yield int.from_bytes(number, "big"), payload
            empty, number, payload = self._received(self._replay)
        assert not payload

    def _received(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        left_ms = int((self._deadline - monotonic()) * 1000)
        assert left_ms > 0 and socket.poll(left_ms), "nothing came"
        return socket.recv_multipart()

    @property
    def held(self) -> list[Known]:
        return [known for own in self.mirror.blocks.values() for known in own.values()]


def generate(client: Client, prompt: list[int], tenant: str = "default") -> None:
    client.submit(prompt, max_tokens=2, sampling=GREEDY, tenant=tenant).result()


@pytest.mark.parametrize("encoding", ["array", "map"])
def test_a_router_knows_what_is_cached_over_every_death(encoding: str) -> None:
    with Cluster(blocks=8) as cluster, ExitStack() as stack:
        cluster._coordinator_extra = (
            f'[kv_events]\npublish = "ipc://{cluster.folder}/kv"\nreplay = "ipc://{cluster.folder}/replay"\n'
            f'topic = "kv@here"\nencoding = "{encoding}"\n'
        )
        client = cluster.start("w0")
        generate(client, PROMPT)
        for name in ("kv", "replay"):
            assert stat.S_IMODE(Path(cluster.folder, name).stat().st_mode) == 0o600
        router = Router(cluster, stack, encoding)
        router.replay()  # a late subscriber
        tokens = [tuple(PROMPT[:SIZE]), tuple(PROMPT[SIZE : 2 * SIZE])]
        assert [known.tokens for known in router.held] == tokens
        assert {known.name for known in router.held} == {None}

        generate(client, PROMPT, tenant="another")
        router.until(lambda: len(router.held) >= 4, lambda: generate(client, [5, *PROMPT]))
        assert [known.tokens for known in router.held][:4] == tokens * 2
        assert len({known.name for known in router.held}) == 2

        for first in range(7, 12):  # more than the 8 blocks
            generate(client, [first, *PROMPT])
        router.until(lambda: any(known.tokens[0] == 11 for known in router.held))
        assert len(router.held) <= 8

        held, missed = sorted(known.tokens for known in router.held), router.missed
        cluster.kill("coordinator")
        cluster.start_coordinator()
        client = cluster.client()
        client.wait_ready(60.0)
        news = iter(range(12, 100))
        router.until(lambda: router.missed > missed, lambda: generate(client, [next(news), *PROMPT]))
        assert router.missed == missed + 1
        assert set(held) & {known.tokens for known in router.held}, "the router must keep what the worker kept"

        cluster.kill("w0")
        router.until(lambda: not router.held)
