"""Is the driver fit for this load? Before a run it drives a null server in the same way, for a moment."""

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

from .own import own
from .processes import drive
from .spec import HTTP, RunSpec

READY_S = 30.0
# Each session that was planned and not begun is told of by its driver: of a larger load only the beginning is planned.
SESSIONS_MAX = 10_000
MORE_S = 10.0
END_S = 5.0
# A closed loop asks again as soon as it has its answer: from a server that answers at once that would be no load that
# anybody has. So its streams come at the pace of a fast one.
CLOSED_TOKENS_PER_S = 50.0


async def prove(spec: RunSpec, processes: int, stop: asyncio.Event) -> array[float]:
    """How late the drivers were at the null server, in seconds: of each request and of each tick (`Drove.late_s`).

    Raises what `drive` does.
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
    """As much of the load as is begun in `proof_s`, and more: a driver without anything to come would end before."""
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
    """Starts one that speaks as a target of this kind does, and says where. pace: tokens a second; 0: all at once.

    Raises InternalError where it does not begin, or ends before it is told to: what was measured is then no proof.
    """
    with tempfile.TemporaryDirectory(prefix="kvforge-null-") as folder:
        where = f"ipc://{Path(folder) / 'clients.sock'}"
        if kind == HTTP:
            command = ["kvforge.loadtest.drive.http_null_server"]
        else:
            command = ["kvforge.loadtest.drive.null_server", "--endpoint", where]
        command = own(*command, "--pace", f"{pace:g}", *options)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None, "a pipe"
        told: tuple[int, ...] = (0, -SIGTERM)
        try:
            async with asyncio.timeout(READY_S):
                said = (await process.stdout.readline()).decode().split()
            if not said:
                raise InternalError(f"the null server of {kind} did not begin: see what it said above")
            yield said[0] if kind == HTTP else where
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                told = (await process.wait(),)
        if process.returncode not in told:
            raise InternalError(f"the null server of {kind} ended with status {process.returncode} before its time")
