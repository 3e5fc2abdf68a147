"""One run from its beginning to its end: the proof, the load, and what was seen of the server meanwhile."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from contextlib import AsyncExitStack
from time import monotonic

from .observer import Observer
from .outcome import Measured
from .processes import Watch, drive, needed
from .proof import prove
from .spec import KVFORGE, RunSpec


async def measure(
    spec: RunSpec,
    stop: asyncio.Event | None = None,
    watch: Watch | None = None,
    *,
    began: Callable[[float], None] | None = None,
) -> Measured:
    """Drives the null server, then the server, and returns all that was found.

    stop: once it is set, what is under way is cancelled and what was measured so far is returned. watch: called a few
    times a second while the load runs. began: called with the run's start, on time.monotonic, a moment before it (for
    what is to happen to the server at times of the run). Raises InvalidRequest naming an option, CoordinatorUnavailable
    and DeadlineExceeded where the server is not ready, Unavailable without the extra, InternalError where a driver
    broke.
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
        null_late_s = await prove(spec, processes, stop) if spec.proof_s > 0 else array("d")
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
        return Measured(
            outcomes=outcomes,
            samples=observer.samples if observer is not None else [],
            before=before,
            after=await observer.stats() if observer is not None else None,
            drivers=drivers,
            null_late_s=null_late_s,
            wall_s=wall_s,
            interrupted=stop.is_set(),
        )
