"""Checks of shapes beside the event loop: a schema of a few hundred bytes may take seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from gateway.chat.shapes import Shape
from kvforge import Sampling
from kvforge.protocol.errors import InvalidRequest, QueueFull

CHECKS_MAX, WAITING_MAX, RETRY_MS = 2, 64, 1000
T = TypeVar("T")
_threads = ThreadPoolExecutor(CHECKS_MAX, thread_name_prefix="shapes")
_waiting: set[asyncio.Future[Any]] = set()


async def checking(work: Callable[[], T]) -> T:
    """Do work that checks shapes in a thread; llguidance lets the loop run meanwhile.

    Args:
        work: Reads and writes nothing that the loop changes.

    Raises:
        QueueFull: Too many wait already.
    """
    if len(_waiting) >= WAITING_MAX:
        raise QueueFull(WAITING_MAX, RETRY_MS, "the gateway's queue of shapes to check")
    task = asyncio.get_running_loop().run_in_executor(_threads, work)
    _waiting.add(task)
    task.add_done_callback(_waiting.discard)
    return await task


async def check_shape(shape: Shape) -> None:
    """Have a shape checked, so that `Sampling.message` finds the answer at once, and raises where it is refused."""
    if shape.name:
        await checking(lambda: _check(shape))


def _check(shape: Shape) -> None:
    with suppress(InvalidRequest):
        Sampling(**shape.named).message()
