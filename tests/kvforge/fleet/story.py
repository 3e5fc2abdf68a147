"""A fleet under test: its file, its status, and its load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from kvforge.fleet.messages import READY, Seen, Status
from tools.chaos import tokenizer
from tools.cluster.running import Process, tiny_model

from .load import Load
from .raylets import RayCluster

DEADLINE_S = 90.0
FLEET = "tested"


class Story:
    """A fleet on a cluster of two nodes with 5 cores each, and its load."""

    def __init__(self, folder: Path, cluster: RayCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.model = tiny_model(folder)
        tokenizer.write(self.model)
        self.file = folder / "fleet.toml"
        self.status = Status(fleet=FLEET)
        self._last: list[str] = []
        self._began = monotonic()

    def note(self, load: Load, what: str) -> None:
        """Print progress for `pytest -s`."""
        print(f"{monotonic() - self._began:6.1f} s  {what}; {dict(load.counts)}", flush=True)

    def write(
        self,
        *,
        count: int = 3,
        scale: str = "",
        replicas: str = "",
        worker: str = "",
        limits: str = "",
        names: str = '["tiny"]',
    ) -> str:
        """Write the fleet's file; return its name. scale: [autoscale] in place of `count`."""
        size = "" if scale else f"count = {count}"
        self.file.write_text(
            f'name = "{FLEET}"\n[replicas]\n{size}\nfolder = "{self.folder}/nodes"\n{replicas}\n'
            f"{scale}\n[gateways]\ncount = 2\nport = 0\n[gateway]\nnames = {names}\n"
            f'[up]\nmodel = "{self.model}"\nthreads = 1\nstop_s = 5.0\n[up.limits]\n{limits}\n'
            f'[up.worker]\nload_format = "dummy"\ndevice = "cpu"\ndtype = "float32"\nblocks = 512\n{worker}\n'
        )
        return str(self.file)

    def urls(self) -> list[str]:
        """Return the URLs of the gateways known to serve."""
        return self._last

    async def command(self, *arguments: str) -> str:
        """Run `kvforge fleet` to its end."""
        with Process("fleet", *arguments, RAY_ADDRESS=self.cluster.address) as process:
            status = await asyncio.to_thread(process.end)
            assert status == 0, process.text
            return process.text

    async def until(self, wanted: Callable[[Status], bool]) -> Status:
        """Poll until the condition holds."""
        deadline = monotonic() + DEADLINE_S
        while True:
            self.status = await asyncio.to_thread(self.cluster.status, FLEET)
            self._last = [one.status.url for one in self.status.gateways if one.status.url] or self._last
            if wanted(self.status):
                return self.status
            assert monotonic() < deadline, self.status
            await asyncio.sleep(0.1)

    def ready(self) -> list[Seen]:
        """Return the number of serving replicas."""
        return [one for one in self.status.replicas if one.status.phase == READY]


def kill(*pids: int) -> None:
    """kill -9."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
