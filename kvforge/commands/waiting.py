"""Waits for workers that load their model, with progress on standard error."""

from __future__ import annotations

import argparse

from kvforge.client.blocking import Client
from kvforge.protocol.errors import DeadlineExceeded
from kvforge.protocol.messages import Health

from . import parsing
from .progress import Progress

WAIT_S = 600.0


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Declare --wait."""
    parser.add_argument(
        "--wait",
        type=parsing.perhaps_seconds,
        default=WAIT_S,
        metavar="S",
        help=f"seconds to wait while workers load the model; 0: not at all [{WAIT_S:g}]",
    )


def wait_for_model(kv: Client, wait_s: float) -> Health:
    """Wait until a worker serves.

    Args:
        kv: The client.
        wait_s: The limit in seconds; 0: do not wait.

    Returns:
        The coordinator's state, ready unless `wait_s` is 0 or it drains.

    Raises:
        CoordinatorUnavailable: There is no coordinator.
        DeadlineExceeded: No worker serves in time.
    """
    health = kv.health()
    if health.ready or health.draining or not wait_s:
        return health
    progress = Progress()

    def show(health: Health) -> None:
        if health.workers:
            progress.health(health)
        elif not health.ready:
            progress.step("waiting", health.reason, 0.0)

    show(health)
    try:
        return kv.wait_ready(wait_s, progress=show)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{error} (--wait {wait_s:g})") from None
    finally:
        progress.close()
