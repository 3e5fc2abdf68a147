"""Requests of mixed shape through real processes, with cancels, killed clients and a killed worker.

A thousand in `make test-all`, the first 250 in `make test`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvforge import AsyncClient, Client, Request
from kvforge.protocol.errors import AlreadyFinished
from tests.amount import examples
from tools.cluster.cluster import Cluster
from tools.cluster.fork_server import SERVICES, Child, fork_server

from .mixed import Shape, shapes
from .shared import wait_empty

REQUESTS = examples(1000)
TOGETHER = 64
KILLED_CLIENTS = 4
MEMORY_SLACK = 8 << 20
COORDINATOR = """
[limits]
finished_max = 128
lease_s = 0.3
[schedule]
step_rows_max = 16
step_tokens_max = 128
[quotas.b]
weight = 2.0
[quotas.c]
floor = 4
ceiling = 30
"""


class Run:
    """The requests of one client, a bounded number at a time. Some are cancelled, some reattached."""

    def __init__(self, cluster: Cluster, kv: AsyncClient, alone: dict[Shape, tuple[int, ...]]) -> None:
        self.cluster, self.kv, self.alone = cluster, kv, alone
        self.draw = random.Random(11)
        self.ends: Counter[str] = Counter()
        self.done = 0
        self.memory: list[int] = []

    async def all(self) -> None:
        """Run every request, with kills in between."""
        await asyncio.gather(*(self._some(REQUESTS // TOGETHER + (i < REQUESTS % TOGETHER)) for i in range(TOGETHER)))

    async def _some(self, count: int) -> None:
        for _ in range(count):
            await self._one(self.draw.choice(list(self.alone)))
            self.done += 1
            if self.done in (REQUESTS // 3, REQUESTS):
                self.memory.append(self.cluster.resident_bytes("coordinator"))
            if self.done == REQUESTS // 2:
                self.cluster.kill("w1")
                self.cluster.start_worker("w1")

    async def _one(self, shape: Shape) -> None:
        """Run one request: read it to its end, cancel it after some tokens, or read it again from the middle."""
        request = await self.kv.submit(
            shape.prompt,
            max_tokens=shape.max_tokens,
            sampling=shape.sampling,
            tenant=shape.tenant,
            priority=shape.priority,
        )
        want = self.alone[shape]
        if self.draw.random() < 0.2:
            await self._cancelled(request.id, shape)
            assert request.tokens == want[: len(request.tokens)]
            return
        done = await request.result()
        assert done.tokens == want, f"{shape} gave {done.tokens}, alone {want}"
        self.ends[done.reason] += 1

    async def _cancelled(self, request_id: int, shape: Shape) -> None:
        for _ in range(self.draw.randrange(4)):
            await asyncio.sleep(0)
        try:
            await self.kv.cancel(request_id)
        except AlreadyFinished:
            self.ends["too late to cancel"] += 1
            return
        status = await self.kv.status(request_id, with_tokens=True)
        assert status.state == "cancelled"
        assert tuple(status.tokens.tolist()) == self.alone[shape][: status.generated_tokens]
        self.ends["cancelled"] += 1


def clients(folder: Path, endpoint: str) -> list[tuple[Child, IO[bytes]]]:
    """Start clients that submit until they are killed, with what they print."""
    server, environment = fork_server(SERVICES), dict(os.environ)
    return [
        server.start_piped([endpoint, str(i)], folder / "clients.log", environment, "tests.integration.mixed")
        for i in range(KILLED_CLIENTS)
    ]


def submitted(kv: Client) -> Iterator[tuple[Shape, Request]]:
    """Submit a request of each shape, each with prefixes of its own."""
    for i, shape in enumerate(shapes()):
        yield (
            shape,
            kv.submit(shape.prompt, max_tokens=shape.max_tokens, sampling=shape.sampling, cache_salt=f"alone {i}"),
        )


def answers_alone(kv: Client) -> dict[Shape, tuple[int, ...]]:
    """Return each shape's answer when it runs alone, without cached prefixes."""
    return {shape: request.result(60).tokens for shape, request in submitted(kv)}


async def run_all(cluster: Cluster, alone: dict[Shape, tuple[int, ...]]) -> Run:
    """Run the requests on a separate connection."""
    async with AsyncClient(cluster.endpoint, timeout_s=60.0) as kv:
        run = Run(cluster, kv, alone)
        await run.all()
        return run


def test_a_thousand_mixed_requests_leave_nothing_and_answer_as_if_alone(tmp_path: Path) -> None:
    """behaviours 28, 29, 31, 33, 35. The pools are so small that requests preempt each other."""
    with Cluster(blocks=48, coordinator=COORDINATOR) as cluster:
        kv = cluster.start("w0", "w1")
        alone = answers_alone(kv)
        victims = clients(tmp_path, cluster.endpoint)
        try:
            for victim, printed in victims[: KILLED_CLIENTS // 2]:
                assert printed.readline() == b"streaming\n"
                victim.kill()
            run = asyncio.run(run_all(cluster, alone))
        finally:
            for victim, printed in victims:
                victim.kill()
                victim.wait(20)
                printed.close()
        assert sum(run.ends.values()) == REQUESTS
        assert run.ends["cancelled"] and run.ends["length"] and run.ends["stop"]
        stats = wait_empty(kv)
        requests = stats.requests
        assert requests.failed_total == requests.expired_total == 0
        assert requests.finished_total + requests.cancelled_total == requests.accepted_total
        assert requests.preemptions_total > 0, "the pools were not small enough for the test to mean much"
        assert requests.recomputed_tokens_total < requests.computed_tokens_total
        assert kv.requests(1000).total <= 128
        early, late = run.memory
        assert late - early < MEMORY_SLACK, f"the coordinator grew from {early >> 20} to {late >> 20} MiB"
