"""A coordinator and workers as real processes, in a temporary folder, for one test."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from kvforge import Client
from kvforge.process.leash import leashed
from kvforge.protocol.transport import client_endpoint, worker_endpoint

from .fork_server import SERVICES, WORKER, Child, fork_server
from .running import tiny_model

READY_S = 300.0
END_S = 120.0


class Cluster:
    """Processes by name: "coordinator", "w0", "w1", ... The end of the `with` block stops and removes everything.

    Attributes:
        worker_module: The module that runs as a worker.
    """

    worker_module = "kvforge.worker"

    def __init__(
        self,
        *,
        model: Path | None = None,
        blocks: int = 128,
        coordinator: str = "",
        worker: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        ranks: int = 1,
        family: str = "llama",
        host_bytes: int = 0,
        disk_bytes: int = 0,
    ) -> None:
        """Make the folder.

        Args:
            model: A folder; None: a tiny model with random weights.
            blocks: Blocks of each worker's pool.
            coordinator: Additional configuration of the coordinator.
            worker: The same of each worker.
            device: The workers' device.
            dtype: The workers' dtype.
            ranks: This many processes form one worker and each compute a part; "w0" is its rank 0.
            family: Of the tiny model, a name in `running.FAMILIES`.
            host_bytes: Of each worker's host file, which is in the folder; 0: none.
            disk_bytes: Of each worker's disk tier, which is in the folder too; 0: none.
        """
        # Short: a socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))
        self.runtime = self.folder / "r"
        self._model = model
        self._blocks = blocks
        self._coordinator_extra, self._worker_extra = coordinator, worker
        if host_bytes:
            self._worker_extra += f'host_bytes = {host_bytes}\nhost_dir = "{self.folder}"\n'
        if disk_bytes:
            self._worker_extra += f'disk_bytes = {disk_bytes}\ndisk_dir = "{self.folder}"\n'
        self._device, self._dtype, self._ranks = device, dtype, ranks
        self._processes: dict[str, subprocess.Popen[bytes] | Child] = {}
        self._killed: set[int] = set()  # process ids
        self._stack = ExitStack()
        self.model = model if model is not None else tiny_model(self.folder, family)

    @property
    def endpoint(self) -> str:
        """Return the endpoint for clients."""
        return client_endpoint(self.runtime)

    @property
    def worker_endpoint(self) -> str:
        """Return the endpoint for workers."""
        return worker_endpoint(self.runtime)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(END_S)
        if error is not None:
            for name in self._processes:
                print(f"--- {name}\n{self.log(name)}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_coordinator(self) -> None:
        """Starts the coordinator; `client` waits for it."""
        config = self.folder / "coordinator.toml"
        config.write_text(f'runtime_dir = "{self.runtime}"\n{self._coordinator_extra}')
        self._start("coordinator", "coordinator", config)

    def start_worker(self, name: str, extra: str = "", changed: str = "") -> None:
        """Start a worker, which registers once its model is loaded.

        Args:
            name: its name, and that of its files.
            extra: additional configuration.
            changed: a line of configuration that replaces the line of the same key.
        """
        config = self.folder / f"{name}.toml"
        load_format = "auto" if self._model is not None else "dummy"
        called = name
        if self._ranks > 1:
            number = int(name[1:])
            called = f"w{number // self._ranks}"
            extra += f"ranks = {self._ranks}\nrank = {number % self._ranks}\n"
            # Each has its own GPU if there are enough; otherwise they share one.
            several = self._device != "cpu" and self._ranks <= _gpus()
            extra += f"device_index = {number % self._ranks}\n" if several else 'collectives = "gloo"\n'
        lines = (
            f'name = "{called}"\nruntime_dir = "{self.runtime}"\nmodel = "{self.model}"\n'
            f'load_format = "{load_format}"\n'
            f'dtype = "{self._dtype}"\ndevice = "{self._device}"\nthreads = 1\nblocks = {self._blocks}\n'
            f"{self._worker_extra}{extra}"
        )
        if changed:
            key = changed.split(" ")[0]
            lines = "\n".join([*(line for line in lines.splitlines() if not line.startswith(f"{key} ")), changed])
        config.write_text(lines)
        self._start(name, "worker", config)

    def configure_workers(self, lines: str) -> None:
        """Add lines to the configuration of all workers that start from now on."""
        self._worker_extra += lines

    def start(self, *workers: str) -> Client:
        """Start all and wait until the named workers serve; return a client that closes with the cluster."""
        self.start_coordinator()
        for name in workers:
            self.start_worker(name)
        client = self.client()
        if workers:
            client.wait_ready(READY_S)
            self.wait_workers(client, len(workers))
        return client

    def wait_workers(self, client: Client, count: int) -> None:
        """Waits until `count` workers are ready, and until the coordinator has noticed which ones were killed."""
        deadline = monotonic() + READY_S
        while True:
            ready = [worker.pid for worker in client.health().workers if worker.state == "ready"]
            if len(ready) == count and self._killed.isdisjoint(ready):
                return
            assert monotonic() < deadline, f"{count} workers were not ready within {READY_S} s"
            select.select([], [], [], 0.05)

    def client(self, **options: object) -> Client:
        """Return a client of this cluster, closed with it, after waiting for the coordinator."""
        values: dict[str, object] = {"timeout_s": 60.0, "connect_timeout_s": 30.0, **options}
        return self._stack.enter_context(Client(self.endpoint, **values))  # type: ignore[arg-type]

    def _start(self, name: str, module: str, config: Path) -> None:
        arguments, environment = ["--config", str(config)], {**os.environ, "OMP_NUM_THREADS": "1"}
        path, whole = self.folder / f"{name}.log", self.worker_module if module == "worker" else f"kvforge.{module}"
        if self._device == "cpu" or module != "worker":
            server = fork_server(WORKER if module == "worker" else SERVICES)
            self._processes[name] = server.start(arguments, path, environment, whole)
            return
        with path.open("ab") as log:  # fork copies no driver threads or device handles
            self._processes[name] = subprocess.Popen(
                leashed([sys.executable, "-m", whole, *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def pid(self, name: str) -> int:
        """The process id of a member."""
        return self._processes[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a member."""
        self._processes[name].send_signal(number)

    @contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        """Stop members inside the block (SIGSTOP): what is submitted to stopped workers arrives before a step."""
        for name in names:
            self.signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                self.signal(name, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """Kill a member with SIGKILL and wait for its end."""
        self._processes[name].kill()
        self._processes[name].wait(END_S)
        self._killed.add(self._processes[name].pid)

    def end(self, name: str) -> int:
        """Wait for a member to exit by itself; return its exit status."""
        return self._processes[name].wait(END_S)

    def status(self, name: str) -> int | None:
        """A member's exit status, None while it runs."""
        return self._processes[name].poll()

    def log(self, name: str) -> str:
        """Return a member's log so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def resident_bytes(self, name: str) -> int:
        """Resident memory of a member."""
        statm = Path(f"/proc/{self.pid(name)}/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> int:
    """Return the number of GPUs. Importing torch takes seconds, so only GPU tests call this."""
    import torch

    return torch.cuda.device_count()
