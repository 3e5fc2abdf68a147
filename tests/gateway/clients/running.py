"""A client as a process: in an empty home, without network access, and killed at the end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLIENT_S = 120.0
OFF = {
    "CI": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "NO_UPDATE_NOTIFIER": "1",
    "TERM": "dumb",
}


@dataclass(frozen=True)
class Ended:
    """A client that has ended."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit status {self.code}\n--- stdout\n{self.out[-6000:]}\n--- stderr\n{self.err[-6000:]}"


@dataclass(frozen=True)
class Home:
    """The home and working folder of one client, and its proxy."""

    path: Path
    proxy: str

    @property
    def work(self) -> Path:
        """Return the client's working folder."""
        return self._made("work")

    @property
    def home(self) -> Path:
        """The client's HOME."""
        return self._made("home")

    def write(self, name: str, text: str) -> Path:
        """Write a file in HOME."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def run(self, command: Sequence[str | Path], env: Mapping[str, str], limit_s: float = CLIENT_S) -> Ended:
        """Run a client to its end, without input.

        Args:
            command: The program and its arguments.
            env: Variables beside `OFF`; this process's PATH is appended.
            limit_s: Time limit; then the client is killed and the test fails.

        Returns:
            Its exit status and what it printed.
        """
        path = os.pathsep.join(filter(None, (env.get("PATH"), os.environ["PATH"])))
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), self.proxy)
        proxies["NO_PROXY"] = "127.0.0.1,localhost"
        proxies |= {name.lower(): value for name, value in proxies.items()}
        folders = {"HOME": str(self.home), "TMPDIR": str(self._made("tmp")), "LANG": "C.UTF-8"}
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=self.work,
            env={**OFF, **proxies, **folders, **env, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = process.communicate()
            raise AssertionError(f"not ended after {limit_s:.0f} s: {Ended(-1, out, err)}") from None
        finally:
            _kill(process)
        return Ended(process.returncode, out, err)

    def _made(self, name: str) -> Path:
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill all processes that the client left in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
