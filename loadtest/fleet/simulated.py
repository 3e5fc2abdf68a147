"""A coordinator with simulated workers in a temporary folder, as an async context manager.

A supervising process runs them as `kvforge up` does and restarts those that die. All processes end with this one,
however it ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from kvforge import AsyncClient
from kvforge.launch.settings import toml
from kvforge.launch.supervisor import ENTRY
from kvforge.process.leash import leashed
from kvforge.protocol.errors import DeadlineExceeded, InvalidRequest, KvforgeError, Unavailable
from kvforge.protocol.transport import client_endpoint

from .settings import Sections, settings

READY_S, END_S = 60.0, 15.0
LOOK_S = 0.02
LINES_SHOWN = 5


class SimulatedFleet:
    """A running fleet: `async with Fleet("h200-8b", workers=2) as fleet:`. It is ready when entered.

    Args:
        table: As for `fleet.settings.settings`, like all other options.
        workers: The number of workers.
        blocks: KV blocks of each worker.
        time_scale: The factor of the step times.
        coordinator_settings: Sections of coordinator.toml.
        log_level: The log level of all processes.

    Raises:
        InvalidRequest: Names the option.
    """

    def __init__(
        self,
        table: str = "h200-8b",
        *,
        workers: int = 1,
        blocks: int = 0,
        time_scale: float = 1.0,
        coordinator_settings: Sections | None = None,
        log_level: str = "warning",
    ) -> None:

        settings(table, Path(), workers=workers, blocks=blocks, time_scale=time_scale, coordinator=coordinator_settings)
        self._options = [table, "--workers", str(workers), "--blocks", str(blocks), "--time-scale", str(time_scale)]
        self._options += ["--log-level", log_level]
        self._sections, self._workers = coordinator_settings or {}, workers
        self._process: subprocess.Popen[bytes] | None = None
        # A short path: those of sockets are limited to 107 bytes.
        self._folder = Path(tempfile.gettempdir())

    @property
    def runtime(self) -> Path:
        """The runtime directory."""
        return self._folder / "r"

    @property
    def endpoint(self) -> str:
        """The endpoint for clients."""
        return client_endpoint(self.runtime)

    @property
    def log(self) -> str:
        """The output of its processes."""
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="kvf-fleet-"))
        try:
            file = self._folder / "fleet.toml"
            file.write_text(toml({}, self._sections), encoding="utf-8")
            command = [sys.executable, "-P", str(ENTRY), "kvforge.loadtest.fleet", *self._options]
            command += ["--runtime-dir", str(self.runtime), "--config", str(file)]
            with (self._folder / "log").open("wb") as log:
                self._process = subprocess.Popen(leashed(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            await self.wait_ready()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._end()

    async def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until all workers serve, for example after a kill. Raises Unavailable or DeadlineExceeded."""
        assert self._process is not None, "not entered"
        deadline = monotonic() + timeout_s
        async with AsyncClient(self.endpoint, connect_timeout_s=1.0, timeout_s=1.0) as kv:
            while not await self._serves(kv):
                if self._process.poll() is not None:
                    raise Unavailable(f"the fleet has exited: {self._last_words()}")
                if monotonic() >= deadline:
                    raise DeadlineExceeded(f"the fleet is not ready after {timeout_s:g} s: {self._last_words()}")
                await asyncio.sleep(LOOK_S)

    def pids(self) -> dict[str, int]:
        """Return the running processes by name: `coordinator`, `worker-0`, `worker-1`, ..."""
        assert self._process is not None, "not entered"
        found: dict[str, int] = {}
        for pid in _children(self._process.pid):
            with suppress(OSError):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found |= {Path(os.fsdecode(a)).stem: pid for a in arguments if a.endswith(b".toml")}
        return dict(sorted(found.items()))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a process, which will be restarted.

        Args:
            name: The process; `worker` is the first worker.
            number: The signal.

        Returns:
            The process id.

        Raises:
            InvalidRequest: There is no such process now.
        """
        running = self.pids()
        pid = running.get("worker-0" if name == "worker" else name)
        if pid is None:
            raise InvalidRequest("--kill", f"unknown process {name!r} (running: {', '.join(running) or 'none'})")
        os.kill(pid, number)
        return pid

    async def _serves(self, kv: AsyncClient) -> bool:
        try:
            health = await kv.health()
        except KvforgeError:
            return False
        return health.ready and sum(worker.state == "ready" for worker in health.workers) == self._workers

    def _last_words(self) -> str:
        return " | ".join(self.log.strip().splitlines()[-LINES_SHOWN:]) or "no output"

    async def _end(self) -> None:
        """Stop all processes."""
        process = self._process
        if process is not None:
            deadline = monotonic() + END_S
            process.send_signal(signal.SIGTERM)
            while process.poll() is None and monotonic() < deadline:
                await asyncio.sleep(LOOK_S)
            if process.poll() is None:
                process.kill()  # its children end with it
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []
