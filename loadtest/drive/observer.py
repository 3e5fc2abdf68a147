"""Samples a coordinator during a run, over a connection of its own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

from kvforge import AsyncClient, Health, Stats
from kvforge.protocol.errors import KvforgeError

from .outcome import Sample

SAMPLE_S = 0.25
ASK_S = 5.0
READY_S = 30.0
# Beyond this, every other sample is dropped and the interval doubles.
SAMPLES_MAX = 16_384


class Observer:
    """Samples the coordinator's counters. Open and close it.

    Attributes:
        samples: The samples since the start.
        health: The health when it was opened.
    """

    def __init__(
        self, endpoint: str | None = None, *, server_key: str | None = None, key_file: str | None = None
    ) -> None:
        # While the coordinator is away there are no samples; the next query reconnects.
        self._client = AsyncClient(endpoint, reconnect_s=0.0, server_key=server_key, key_file=key_file)
        self._task: asyncio.Task[None] | None = None
        self.health: Health | None = None
        self.samples: list[Sample] = []

    async def open(self) -> None:
        """Wait until the coordinator is ready. Raises what `AsyncClient.wait_ready` raises."""
        self.health = await self._client.wait_ready(READY_S)

    async def close(self) -> None:
        """Stop sampling and disconnect."""
        self.stop()
        await self._client.close()

    async def stats(self) -> Stats | None:
        """Return the current counters; None if the coordinator does not answer."""
        with suppress(KvforgeError):
            return await self._client.stats(timeout_s=ASK_S)
        return None

    def sample_from(self, start: float) -> None:
        """Start sampling, with times since `start` (time.monotonic)."""
        self._task = asyncio.create_task(self._sample(start))

    def stop(self) -> None:
        """Stop sampling."""
        if self._task is not None:
            self._task.cancel()

    async def _sample(self, start: float) -> None:
        pause_s, due = SAMPLE_S, max(start, monotonic())
        while True:
            await asyncio.sleep(max(0.0, due - monotonic()))
            asked = monotonic()
            if (stats := await self.stats()) is not None:
                self.samples.append(sample(stats, (asked + monotonic()) / 2 - start))
            if len(self.samples) >= SAMPLES_MAX:
                del self.samples[1::2]
                pause_s *= 2
            due = max(due + pause_s, monotonic())


def sample(stats: Stats, at_s: float) -> Sample:
    """Return the sample of the counters at one moment."""
    pools = stats.pools
    return Sample(
        at_s=at_s,
        pending=stats.requests.pending,
        running=stats.requests.running,
        free=sum(pool.free for pool in pools),
        cached=sum(pool.cached for pool in pools),
        referenced=sum(pool.referenced for pool in pools),
        quarantined=sum(pool.quarantined for pool in pools),
    )
