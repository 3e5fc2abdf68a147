"""Checks that the driver can keep up: before the run it drives a null server with the same load for a moment."""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from time import monotonic
from typing import Any

from kvforge.loadtest.load.build import LoadOptions, build
from kvforge.protocol.errors import InternalError

from .child_command import child_command
from .processes import drive
from .spec import HTTP, RunSpec

READY_S = 30.0
# The driver reports each session that did not begin, so a larger load is truncated.
SESSIONS_MAX = 10_000
MORE_S = 10.0
END_S = 5.0
# A closed loop sends the next request at once. Against an instant server that is an unrealistic load, so the null
# server paces its streams like a fast real one.
CLOSED_TOKENS_PER_S = 50.0


async def check_driver(spec: RunSpec, processes: int, stop: asyncio.Event) -> array[float]:
    """Return the drivers' lateness against the null server: `DriverStats.late_s`, in seconds.

    Raises what `drive` raises.
    """
    closed = bool(spec.load.get("closed"))
    async with null_server(spec.target, CLOSED_TOKENS_PER_S if closed else 0.0) as where:
        null = replace(
            spec,
            load=_beginning(spec),
            endpoint=where,
            server_key=None,
            key_file=None,
            http={**spec.http, "url": where} if spec.target == HTTP else {},
        )
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        stopping = asyncio.create_task(_either(stop, over))

        def began(start: float) -> None:
            loop.call_later(start + spec.proof_s - monotonic(), over.set)

        try:
            _, outcomes, drivers = await drive(null, processes, over, began=began)
        finally:
            stopping.cancel()
    late_s = array("d", (outcome.awake_s - outcome.due_s for outcome in outcomes if outcome.awake_s >= 0))
    for drove in drivers:
        late_s += drove.late_s
    return late_s


def _beginning(spec: RunSpec) -> dict[str, Any]:
    """Truncate the load to what begins within `proof_s`, and some more, so that the driver does not run dry."""
    sessions = len(build(LoadOptions(**spec.load)))
    if sessions <= SESSIONS_MAX:
        return spec.load
    enough_s = spec.proof_s + MORE_S
    return {**spec.load, "duration_s": min(spec.load.get("duration_s") or enough_s, enough_s)}


async def _either(stop: asyncio.Event, over: asyncio.Event) -> None:
    await stop.wait()
    over.set()


@asynccontextmanager
async def null_server(kind: str, pace: float = 0.0, *options: str) -> AsyncIterator[str]:
    """Run a null server for a kind of target and yield its address.

    Args:
        kind: One of `spec.KINDS`.
        pace: Tokens per second of each stream; 0 sends all at once.
        options: Further options of its command line.

    Raises:
        InternalError: It does not start, or ends early: the measurement is then no proof.
    """
    with tempfile.TemporaryDirectory(prefix="kvforge-null-") as folder:
        where = f"ipc://{Path(folder) / 'clients.sock'}"
        if kind == HTTP:
            command = ["kvforge.loadtest.drive.http_null_server"]
        else:
            command = ["kvforge.loadtest.drive.null_server", "--endpoint", where]
        command = child_command(*command, "--pace", f"{pace:g}", *options)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None, "a pipe"
        statuses: tuple[int, ...] = (0, -SIGTERM)
        try:
            async with asyncio.timeout(READY_S):
                words = (await process.stdout.readline()).decode().split()
            if not words:
                raise InternalError(f"the null server for {kind} did not start: see its output above")
            yield words[0] if kind == HTTP else where
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                statuses = (await process.wait(),)
        if process.returncode not in statuses:
            raise InternalError(f"the null server for {kind} ended early with status {process.returncode}")
