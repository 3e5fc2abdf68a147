"""A gateway as a process of its own, forked by a fork server, over a running coordinator."""

from __future__ import annotations

import os
import select
import signal
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tools.cluster.fork_server import SERVICES, Child, fork_server

READY_S, END_S = 240.0, 60.0
# For httpx's `verify` where the address is http://: by default a client reads all certificates, which takes 30 ms.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Gateway:
    """A gateway process that ends with its `with` block. settings: text of gateway.toml."""

    def __init__(self, runtime: Path, folder: Path, settings: str = "") -> None:
        self._file, self._log, self._runtime = folder / "gateway.toml", folder / "gateway.log", runtime
        self._file.write_text(settings)
        self._process: Child | None = None
        self._output: IO[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self.start(0)
        except BaseException:
            if self._process is not None:
                self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        process = self.process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
            raise
        finally:
            self._close_output()
            if error is not None:
                print(self._log.read_text())

    @property
    def process(self) -> Child:
        assert self._process is not None, "started before"
        return self._process

    def start(self, port: int) -> None:
        """Wait until the gateway would serve a request."""
        self._close_output()
        options = ["--config", str(self._file), "--runtime-dir", str(self._runtime), "--port", str(port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._file.parent)}
        self._process, self._output = fork_server(SERVICES).start_piped(
            options, self._log, environment, "kvforge.gateway"
        )
        readable, _, _ = select.select([self._output], [], [], READY_S)
        said = self._output.readline().decode() if readable else ""
        assert said.startswith("serving at "), f"{said!r}: {self._log.read_text()}"
        self.url = said.split()[-1]
        deadline = time.monotonic() + READY_S
        while not self.ready():
            assert time.monotonic() < deadline and self._process.poll() is None, self._log.read_text()
            select.select([], [], [], 0.05)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ready(self) -> bool:
        """Return whether /health reports ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:  # noqa: S310 - ours
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """Stop it by SIGTERM."""
        self.process.terminate()
        assert self.process.wait(END_S) == 0
        self._close_output()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(END_S)
        self._close_output()

    def _close_output(self) -> None:
        if self._output is not None:
            self._output.close()
