"""Kills the coordinator and workers of this machine during a run and measures their recovery.

Their supervisor restarts them (`kvforge up`, systemd, a `SimulatedFleet`); nothing is started here.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from kvforge import AsyncClient
from kvforge.protocol.errors import InvalidRequest, KvforgeError
from kvforge.protocol.transport import default_client_endpoint

from .plan import COORDINATOR, WORKER, Kill, schedule

LOCAL = "ipc://"
ASK_S, LOOK_S = 1.0, 0.02
BACK_S = 60.0


@dataclass(slots=True, kw_only=True)
class KillRecord:
    """One kill.

    Attributes:
        name: The process.
        at_s: When it was killed, in seconds of the run.
        pid: The killed process; 0 if there was none, for the reason in `problem`.
        ready_s: When all processes served again; -1 if they did not within the time limit.
        problem: What went wrong, or "".
    """

    name: str
    at_s: float
    pid: int = 0
    ready_s: float = -1.0
    problem: str = ""

    def json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def sentence(self) -> str:
        """Describe the kill for people."""
        if not self.pid:
            return f"{self.name} was not killed at {self.at_s:.3g} s: {self.problem}"
        killed = f"{self.name} (process {self.pid}) was killed at {self.at_s:.3g} s"
        if self.ready_s < 0:
            return f"{killed} and did not recover: {self.problem}"
        return f"{killed}; all processes served again after {self.ready_s - self.at_s:.3g} s"


@dataclass(frozen=True, slots=True)
class ProcessHandle:
    """A process of this user. `started`, in the kernel's ticks, detects a reused process id."""

    pid: int
    started: int

    @classmethod
    def of(cls, name: str, pid: int) -> Self:
        """Identify a process.

        Raises:
            InvalidRequest: It belongs to another user, or is not visible on this machine or in this container.
        """
        try:
            owner, started = Path(f"/proc/{pid}").stat().st_uid, _started(pid)
        except OSError:
            problem = f"{name} (process {pid}) is not visible here: it runs on another machine or in another container"
            raise InvalidRequest("kill", problem) from None
        if owner != os.geteuid():
            raise InvalidRequest(
                "kill", f"{name} (process {pid}) belongs to user {owner}: only this user's processes can be killed"
            )
        return cls(pid, started)

    def kill(self) -> None:
        """Kill the process.

        Raises:
            OSError: It has ended.
        """
        process = os.pidfd_open(self.pid)
        try:
            if _started(self.pid) != self.started:
                raise ProcessLookupError(f"the process id {self.pid} was reused")
            signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _started(pid: int) -> int:
    """Return the start time of a process in ticks. Raises OSError."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
    return int(after_name.split()[19])


class Killer:
    """Kills processes by a schedule.

    Use it as `async with Killer(endpoint, kills) as killer:` around `measure(spec, began=killer.begin)` and
    `killer.end()`. Entering it locates all processes.

    Args:
        endpoint: The coordinator's, as for `kvforge.Client`.
        kills: The schedule.

    Raises:
        InvalidRequest: A process is on another machine, belongs to another user or does not exist; names `kill`.
        CoordinatorUnavailable: No coordinator answers.
    """

    def __init__(self, endpoint: str | None, kills: Sequence[Kill]) -> None:

        self._endpoint, self._kills = endpoint or default_client_endpoint(), tuple(kills)
        self._task: asyncio.Task[None] | None = None
        self._waits: list[asyncio.Task[None]] = []
        self._start, self._turn = 0.0, 0
        self._workers: list[str] = []
        self._known: dict[str, ProcessHandle] = {}
        self.strikes: list[KillRecord] = []

    async def __aenter__(self) -> Self:
        if not self._endpoint.startswith(LOCAL):
            problem = f"needs a coordinator on this machine ({LOCAL}PATH), not {self._endpoint}"
            raise InvalidRequest("kill", problem)
        self._client = AsyncClient(self._endpoint, timeout_s=ASK_S, connect_timeout_s=ASK_S, reconnect_s=0)
        try:
            await self._look()
            self._workers = [name for name in self._known if name != COORDINATOR]
            for name in dict.fromkeys(kill.name for kill in self._kills):
                if not (name in self._known or (name == WORKER and self._workers)):
                    raise InvalidRequest(
                        "kill", f"unknown process {name!r} (expected one of: {', '.join(self._known)})"
                    )
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in (*((self._task,) if self._task is not None else ()), *self._waits):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._client.close()

    def begin(self, start: float) -> None:
        """Start killing; the run began at `start` (time.monotonic)."""
        self._start = start
        self._task = asyncio.get_running_loop().create_task(self._strike_all())

    async def end(self) -> list[KillRecord]:
        """Stop killing and wait for the recoveries.

        Returns:
            All kills, including those that were due after the end of the run. Repeated kills have no such remainder.
        """
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await asyncio.gather(*self._waits)
        self._waits.clear()
        over_s = monotonic() - self._start
        late = [kill for kill in self._kills if kill.at_s >= over_s and not kill.every_s]
        missed = [KillRecord(name=kill.name, at_s=kill.at_s, problem="the run had ended") for kill in late]
        self.strikes += sorted(missed, key=lambda strike: strike.at_s)
        return self.strikes

    async def _look(self) -> set[str]:
        """Record the serving processes, the coordinator first, and return their names. Raises KvforgeError.

        InvalidRequest is raised by the first call only; later a process may simply end while it is inspected.
        """
        first = not self._known
        tables, health = await self._client.tables(), await self._client.health()
        workers = {worker.name: worker.pid for worker in health.workers if worker.state == "ready"}
        serving = {COORDINATOR: tables.pid, **dict(sorted(workers.items()))}
        for name, pid in serving.items():
            with nullcontext() if first else suppress(InvalidRequest):
                self._known[name] = ProcessHandle.of(name, pid)
        return set(serving)

    async def _strike_all(self) -> None:
        for at_s, name in schedule(self._kills):
            await asyncio.sleep(max(0.0, self._start + at_s - monotonic()))
            await self._strike(name)

    async def _strike(self, name: str) -> None:
        if name == WORKER and name not in self._workers:
            name = self._workers[self._turn % len(self._workers)]
            self._turn += 1
        strike = KillRecord(name=name, at_s=monotonic() - self._start)
        self.strikes.append(strike)
        if not self._kill(name):  # perhaps a new process has replaced it
            with suppress(KvforgeError):
                await self._look()
            if not self._kill(name):
                strike.problem = "it was still down from an earlier failure"
                return
        strike.at_s, strike.pid = monotonic() - self._start, self._known[name].pid
        self._waits.append(asyncio.get_running_loop().create_task(self._wait(strike)))

    def _kill(self, name: str) -> bool:
        try:
            self._known[name].kill()
        except OSError:
            return False
        return True

    async def _wait(self, strike: KillRecord) -> None:
        """Wait until a new process has replaced it and all processes serve."""
        until = monotonic() + BACK_S
        while monotonic() < until:
            await asyncio.sleep(LOOK_S)
            with suppress(KvforgeError):
                serving = await self._look()
                if serving >= {COORDINATOR, *self._workers} and self._known[strike.name].pid != strike.pid:
                    strike.ready_s = monotonic() - self._start
                    return
        strike.problem = f"not within {BACK_S:g} s: is there a supervisor that restarts it, as `kvforge up` does?"
