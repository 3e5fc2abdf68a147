"""One cluster for all tests of a process that kill nothing: see the fixture `shared`."""

from __future__ import annotations

import select
from dataclasses import dataclass
from time import monotonic

from kvforge import Client
from kvforge.protocol.messages import Stats
from tools.cluster.cluster import Cluster

EMPTY_S = 30.0


def empty(stats: Stats) -> bool:
    """Return whether no block is held."""
    pools = all(p.referenced == 0 and p.quarantined == 0 and p.free + p.cached == p.blocks for p in stats.pools)
    return pools and stats.sequences == 0 and stats.requests.running == stats.requests.pending == 0


def wait_empty(client: Client) -> Stats:
    """Wait for the acknowledgement of the last steps in flight, and for the leases of lost clients."""
    deadline = monotonic() + EMPTY_S
    while not empty(stats := client.stats()):
        assert monotonic() < deadline, f"the pool does not become empty: {stats}"
        select.select([], [], [], 0.02)
    return stats


@dataclass(frozen=True)
class Shared:
    """The shared cluster, with the worker w0, and this test's client."""

    cluster: Cluster
    kv: Client

    def check(self) -> None:
        """Check that the test left nothing: the pool is empty, the processes run, w0 alone is ready."""
        wait_empty(self.kv)
        assert [self.cluster.status(name) for name in ("coordinator", "w0")] == [None, None]
        assert [(worker.name, worker.state) for worker in self.kv.health().workers] == [("w0", "ready")]
