"""The driver processes: as many as the load needs, started at the same instant, never left behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import IO, Any

from kvforge.loadtest.load.workload import Workload
from kvforge.protocol.errors import DeadlineExceeded, InternalError, restore

from .child_command import child_command
from .outcome import DriverStats, Outcome
from .progress import Progress, together
from .result import unpack
from .spec import HTTP, KVFORGE, RunSpec

# The capacity of one process with a lag far below the limit, by kind: requests/s, tokens/s, streams. About half of what
# `benchmarks.load_driver` measures.
CARRIED = {KVFORGE: (2_500.0, 15_000.0, 2_000.0), HTTP: (500.0, 2_500.0, 250.0)}
LOOKED_AT = 200
LINE_BYTES_MAX = 1 << 20
READY_S = 180.0
START_AFTER_S = 0.2
# Time to cancel what is in flight and write the result.
STOP_S = 60.0
END_S = 5.0

Watch = Callable[[Progress], None]


def needed(spec: RunSpec, workload: Workload) -> int:
    """Return how many processes the planned load needs; at most one per core."""
    if spec.processes is not None:
        return spec.processes
    requests, tokens, streams = CARRIED[spec.target]
    shares = [1.0]
    if (arrivals := workload.arrivals) is not None and len(arrivals) > 1:
        wall_s = max(float(arrivals[-1] - arrivals[0]), 1.0)
        step = max(1, len(arrivals) // LOOKED_AT)
        turns = [turn for i in range(0, len(arrivals), step) for turn in workload.session(i).turns]
        each = len(arrivals) / len(range(0, len(arrivals), step)) / wall_s
        shares += [len(turns) * each / requests, sum(turn.output_tokens for turn in turns) * each / tokens]
    elif arrivals is None:
        shares.append(min(spec.closed or spec.load.get("closed", 0), spec.concurrency_max) / streams)
    return min(math.ceil(max(shares)), os.cpu_count() or 1)


async def drive(
    spec: RunSpec,
    processes: int,
    stop: asyncio.Event,
    watch: Watch | None = None,
    began: Callable[[float], None] | None = None,
) -> tuple[float, list[Outcome], list[DriverStats]]:
    """Run the load in several processes.

    Args:
        spec: The run.
        processes: The number of processes.
        stop: Once set, what is in flight is cancelled.
        watch: Called with the progress.
        began: Called with the start shortly before it.

    Returns:
        The start (time.monotonic), all outcomes in the order in which they were due, and each driver's statistics.

    Raises:
        KvforgeError: A driver failed.
        DeadlineExceeded: A driver hangs.
        InternalError: A driver ended without a result.
    """
    children = [_Child(index) for index in range(processes)]
    try:
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(child.begin(spec, processes))
        start = monotonic() + START_AFTER_S
        if began is not None:
            began(start)
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(child.run(start, stop, lambda: _show(children, watch)))
        found = [child.found() for child in children]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        for child in children:
            await child.end()
    outcomes = [outcome for part, _ in found for outcome in part]
    # Requests that were never due (turns of sessions that ended early) come last.
    outcomes.sort(key=lambda outcome: (outcome.due_s < 0, outcome.due_s, outcome.session, outcome.turn))
    return start, outcomes, [drove for _, drove in found]


def _show(children: Iterable[_Child], watch: Watch | None) -> None:
    if watch is not None:
        watch(together(child.progress for child in children))


class _Child:
    """One driver process. `progress` is its last report."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._process: asyncio.subprocess.Process | None = None
        self._result: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`; it has no name
        self.progress = Progress()

    async def begin(self, spec: RunSpec, processes: int) -> None:
        """Start it and wait until it is ready."""
        fd = self._result.fileno()
        self._process = await asyncio.create_subprocess_exec(
            *child_command("kvforge.loadtest.drive.child", str(fd)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            pass_fds=(fd,),
        )
        self._send({"spec": spec.json(), "index": self._index, "processes": processes})
        try:
            async with asyncio.timeout(READY_S):
                await self._read_until("ready")
        except TimeoutError:
            raise DeadlineExceeded(f"driver process {self._index} was not ready within {READY_S:g} s") from None

    async def run(self, start: float, stop: asyncio.Event, changed: Callable[[], None]) -> None:
        """Run it from the start to its last line."""
        assert self._process is not None and self._process.stdin is not None, "it has begun"
        self._send({"start": start})
        stopping = asyncio.create_task(stop.wait())
        hearing = asyncio.create_task(self._read_until("done", changed))
        try:
            await asyncio.wait({stopping, hearing}, return_when=asyncio.FIRST_COMPLETED)
            self._process.stdin.close()
            async with asyncio.timeout(STOP_S):
                await hearing
        except TimeoutError:
            raise DeadlineExceeded(f"driver process {self._index} did not stop within {STOP_S:g} s") from None
        finally:
            stopping.cancel()
            hearing.cancel()

    def found(self) -> tuple[list[Outcome], DriverStats]:
        """Return its measurements."""
        self._result.seek(0)
        return unpack(self._result.read())

    async def end(self) -> None:
        """Stop it and wait for its end."""
        self._result.close()
        if (process := self._process) is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _send(self, line: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None, "it has begun"
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read_until(self, word: str, changed: Callable[[], None] | None = None) -> None:
        """Read lines up to this word. Raises the error that the child reports instead."""
        assert self._process is not None and self._process.stdout is not None, "it has begun"
        while line := await self._process.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            if word in message:
                return
            if (error := message.get("error")) is not None:
                raise restore(error["code"], error["message"], error["fields"])
            if "progress" in message:
                self.progress = Progress(**message["progress"])
                if changed is not None:
                    changed()
        code = await self._process.wait()
        raise InternalError(f"driver process {self._index} ended with status {code} during the run")
