"""The coordinator and the workers of this machine, killed at times of a run, and when each served again.

Whoever runs them starts them again (`kvforge up`, systemd, a `Fleet`): nothing is started here.
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
class Strike:
    """One kill. name: of the process; pid: 0 where there was none to kill, and `problem` says why.

    at_s: when, in seconds of the run. ready_s: when all that serve served again; -1: not before it was given up.
    """

    name: str
    at_s: float
    pid: int = 0
    ready_s: float = -1.0
    problem: str = ""

    def json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def sentence(self) -> str:
        """What happened, for people."""
        if not self.pid:
            return f"{self.name} was not killed at {self.at_s:.3g} s: {self.problem}"
        killed = f"{self.name} (process {self.pid}) was killed at {self.at_s:.3g} s"
        if self.ready_s < 0:
            return f"{killed} and did not serve again: {self.problem}"
        return f"{killed}; all served again {self.ready_s - self.at_s:.3g} s later"


@dataclass(frozen=True, slots=True)
class Running:
    """A process of ours. started: when, in the kernel's ticks: its number may be another one's when it has ended."""

    pid: int
    started: int

    @classmethod
    def of(cls, name: str, pid: int) -> Self:
        """Raises InvalidRequest where it is another user's, or not on this machine (or not in this container)."""
        try:
            owner, started = Path(f"/proc/{pid}").stat().st_uid, _started(pid)
        except OSError:
            problem = f"{name} is process {pid}, which is not here: it is on another machine or in another container"
            raise InvalidRequest("kill", problem) from None
        if owner != os.geteuid():
            raise InvalidRequest("kill", f"{name}, process {pid}, is of user {owner}: only one's own are killed")
        return cls(pid, started)

    def kill(self) -> None:
        """Raises OSError where it has ended."""
        process = os.pidfd_open(self.pid)
        try:
            if _started(self.pid) != self.started:
                raise ProcessLookupError(f"process {self.pid} is another one by now")
            signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _started(pid: int) -> int:
    """Raises OSError."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
    return int(after_name.split()[19])


class Killer:
    """`async with Killer(endpoint, kills) as killer:`, in it `measure(spec, began=killer.begin)` and `killer.end()`.

    Entered: it has found all that it is to kill. Raises InvalidRequest naming `kill` where that is not on this machine
    or not ours, or has no such name, and CoordinatorUnavailable where nobody serves.
    """

    def __init__(self, endpoint: str | None, kills: Sequence[Kill]) -> None:
        """endpoint: the coordinator's, as for `kvforge.Client`."""
        self._endpoint, self._kills = endpoint or default_client_endpoint(), tuple(kills)
        self._task: asyncio.Task[None] | None = None
        self._waits: list[asyncio.Task[None]] = []
        self._start, self._turn = 0.0, 0
        self._workers: list[str] = []
        self._known: dict[str, Running] = {}
        self.strikes: list[Strike] = []

    async def __aenter__(self) -> Self:
        if not self._endpoint.startswith(LOCAL):
            problem = f"needs a coordinator of this machine, reached over {LOCAL}PATH, not {self._endpoint}"
            raise InvalidRequest("kill", problem)
        self._client = AsyncClient(self._endpoint, timeout_s=ASK_S, connect_timeout_s=ASK_S, reconnect_s=0)
        try:
            await self._look()
            self._workers = [name for name in self._known if name != COORDINATOR]
            for name in dict.fromkeys(kill.name for kill in self._kills):
                if not (name in self._known or (name == WORKER and self._workers)):
                    raise InvalidRequest("kill", f"there is no {name!r} to kill; there is: {', '.join(self._known)}")
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
        """The run begins, at `start` of time.monotonic: from now on it kills."""
        self._start = start
        self._task = asyncio.get_running_loop().create_task(self._strike_all())

    async def end(self) -> list[Strike]:
        """The run is over: nothing more is killed, and what was is waited for. Returns what was done, and what was not.

        Those that are repeated without an end have nothing left to be told.
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
        missed = [Strike(name=kill.name, at_s=kill.at_s, problem="the run had ended") for kill in late]
        self.strikes += sorted(missed, key=lambda strike: strike.at_s)
        return self.strikes

    async def _look(self) -> set[str]:
        """Notes the processes that serve now, the coordinator first; returns their names. Raises KvforgeError.

        Only of the first look InvalidRequest: one that ended while it was asked about is no mistake of whoever asked.
        """
        first = not self._known
        tables, health = await self._client.tables(), await self._client.health()
        workers = {worker.name: worker.pid for worker in health.workers if worker.state == "ready"}
        serving = {COORDINATOR: tables.pid, **dict(sorted(workers.items()))}
        for name, pid in serving.items():
            with nullcontext() if first else suppress(InvalidRequest):
                self._known[name] = Running.of(name, pid)
        return set(serving)

    async def _strike_all(self) -> None:
        for at_s, name in schedule(self._kills):
            await asyncio.sleep(max(0.0, self._start + at_s - monotonic()))
            await self._strike(name)

    async def _strike(self, name: str) -> None:
        if name == WORKER and name not in self._workers:
            name = self._workers[self._turn % len(self._workers)]
            self._turn += 1
        strike = Strike(name=name, at_s=monotonic() - self._start)
        self.strikes.append(strike)
        if not self._kill(name):  # perhaps another one serves in its place, of which nothing was known
            with suppress(KvforgeError):
                await self._look()
            if not self._kill(name):
                strike.problem = "it was not back since it ended before"
                return
        strike.at_s, strike.pid = monotonic() - self._start, self._known[name].pid
        self._waits.append(asyncio.get_running_loop().create_task(self._wait(strike)))

    def _kill(self, name: str) -> bool:
        try:
            self._known[name].kill()
        except OSError:
            return False
        return True

    async def _wait(self, strike: Strike) -> None:
        """Until another process serves in its place, and all others."""
        until = monotonic() + BACK_S
        while monotonic() < until:
            await asyncio.sleep(LOOK_S)
            with suppress(KvforgeError):
                serving = await self._look()
                if serving >= {COORDINATOR, *self._workers} and self._known[strike.name].pid != strike.pid:
                    strike.ready_s = monotonic() - self._start
                    return
        strike.problem = f"not within {BACK_S:g} s: does anybody start it again, as `kvforge up` does?"
