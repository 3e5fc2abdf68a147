"""One run: the proof of the driver, the load, and samples of the server."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from contextlib import AsyncExitStack
from time import monotonic

from .driver_check import check_driver
from .observer import Observer
from .outcome import RunResult
from .processes import Watch, drive, needed
from .spec import KVFORGE, RunSpec


async def measure(
    spec: RunSpec,
    stop: asyncio.Event | None = None,
    watch: Watch | None = None,
    *,
    began: Callable[[float], None] | None = None,
) -> RunResult:
    """Drive the null server, then the server, and return the results.

    Args:
        spec: The run.
        stop: Once set, what is in flight is cancelled and the results so far are returned.
        watch: Called with the progress a few times a second.
        began: Called with the start (time.monotonic) shortly before it, to schedule faults.

    Raises:
        InvalidRequest: Names an option.
        CoordinatorUnavailable: The coordinator does not answer.
        DeadlineExceeded: The server is not ready in time.
        Unavailable: The extra `loadtest` is not installed.
        InternalError: A driver failed.
    """
    stop = stop or asyncio.Event()
    workload = spec.workload()
    processes = needed(spec, workload)
    async with AsyncExitStack() as stack:
        observer = None
        if spec.target == KVFORGE and not spec.endpoints:
            observer = Observer(spec.endpoint, server_key=spec.server_key, key_file=spec.key_file)
            stack.push_async_callback(observer.close)
            await observer.open()
        null_late_s = await check_driver(spec, processes, stop) if spec.proof_s > 0 else array("d")
        before = await observer.stats() if observer is not None else None

        def beginning(start: float) -> None:
            if observer is not None:
                observer.sample_from(start)
            if began is not None:
                began(start)

        start, outcomes, drivers = await drive(spec, processes, stop, watch, beginning)
        wall_s = max(0.0, monotonic() - start)
        if observer is not None:
            observer.stop()
        return RunResult(
            outcomes=outcomes,
            samples=observer.samples if observer is not None else [],
            before=before,
            after=await observer.stats() if observer is not None else None,
            drivers=drivers,
            null_late_s=null_late_s,
            wall_s=wall_s,
            interrupted=stop.is_set(),
        )
