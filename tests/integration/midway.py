"""Work with workers that stand still within answers, so that what follows cannot come too late."""

from __future__ import annotations

import signal
from collections.abc import Callable

from kvforge import Client, Request
from tools.cluster.cluster import Cluster

TRIES = 20
ON_THE_WAY = 16  # tokens that stopped workers may have sent, and are not counted yet
WAIT_S = 120.0


def stopped_midway(
    cluster: Cluster, kv: Client, submit: Callable[[], list[Request]], tokens: int, *workers: str, begun: int = 1
) -> list[Request]:
    """Return requests that have begun and cannot end, because their workers are stopped (SIGSTOP).

    Where this process had to wait for a core for so long that they ended first, others are submitted.

    Args:
        cluster: Where they run.
        kv: Its client.
        submit: Submits them.
        tokens: The length of each answer.
        workers: The names of the workers, or of their ranks, that are stopped. Those of others may end.
        begun: Tokens of each answer that must have come.
    """
    for _ in range(TRIES):
        requests = submit()
        for request in requests:
            stream = iter(request)
            for _ in range(begun):
                next(stream)
        if stopped_in_time(cluster, kv, requests, tokens, *workers):
            return requests
        for request in requests:
            request.result(WAIT_S)
    raise AssertionError(f"the requests ended {TRIES} times before their workers could be stopped")


def stopped_in_time(cluster: Cluster, kv: Client, requests: list[Request], tokens: int, *workers: str) -> bool:
    """Stop workers (SIGSTOP). Return whether none of their requests can end now; if not, the workers go on.

    Args:
        cluster: Where the requests run.
        kv: Its client.
        requests: What must not end. Those of other workers may.
        tokens: The length of each answer.
        workers: The names of the workers, or of their ranks, that are stopped.
    """
    for name in workers:
        cluster.signal(name, signal.SIGSTOP)
    rows = [kv.status(request.id) for request in requests]
    if all(row.generated_tokens + ON_THE_WAY < tokens for row in rows if row.worker in workers):
        return True
    for name in workers:
        cluster.signal(name, signal.SIGCONT)
    return False
