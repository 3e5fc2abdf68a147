"""Joins an existing Ray cluster as a client, with clear errors."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kvforge.process.installation import install_command
from kvforge.protocol.errors import Unavailable

try:
    import ray
except ImportError as error:
    raise Unavailable(f"a fleet needs Ray ({error}): {install_command('ray')}") from None


CONNECT_S = 5.0


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Join the cluster within this context.

    Args:
        address: HOST:PORT of its head; None: RAY_ADDRESS, else the cluster on this machine.

    Raises:
        Unavailable: Ray is not installed, or no cluster can be reached.
    """
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    if where != "auto":
        _check(where)
    try:
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, AssertionError) as error:
        text = " ".join(str(error).split())[:300]
        problem = f"no Ray cluster can be reached at {where}" if where != "auto" else "no Ray cluster runs here"
        raise Unavailable(f"{problem} ({text}): start one with `ray start --head`, or give --address") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check(address: str) -> None:
    """Check that a server listens at an address, because Ray would retry for minutes. Raises Unavailable."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise Unavailable(f"invalid address {address}: expected HOST:PORT of the cluster's head, like 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        problem = getattr(error, "strerror", None) or error
        raise Unavailable(f"no Ray cluster can be reached at {address} ({problem}): see `ray status`") from None
