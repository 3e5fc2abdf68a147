"""A Ray cluster of several nodes on this machine, in a separate process: `python -m tests.kvforge.fleet.raylets`.

It reads commands as lines of JSON and answers each with one line, so that the tests need not import Ray with its
threads, warnings and exit handlers. `RayCluster` is the tests' side.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import msgspec

from kvforge.fleet.messages import Status
from tools.cluster.running import wait_gone

ROOT = Path(__file__).parents[3]
ANSWER_S, END_S = 120.0, 60.0
MARK = "KVFORGE_TESTED_IN"  # in the environment of all started processes and their children
STORE_BYTES = 80_000_000
# A lost node is noticed within two seconds instead of a quarter of a minute.
SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """A cluster that ends with its `with` block, including all its processes. cpus: per node; the head has none."""

    def __init__(self, folder: Path, *cpus: int) -> None:
        self._folder = folder
        self.ray = folder / "ray"
        self.ray.mkdir()
        with (folder / "ray.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.ray), *map(str, cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                bufsize=0,  # no data in a buffer that `select` does not see
                # Ray writes everything below the folder, also the address of its newest cluster.
                env={
                    **os.environ,
                    MARK: str(folder),
                    "RAY_TMPDIR": str(folder),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_worker_niceness": "0",
                },
            )
        self.address = ""
        self._read = b""  # received, but not yet parsed

    def __enter__(self) -> Self:
        try:
            self.address = str(self._heard())
        except BaseException as error:  # its processes would outlive the test
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if error is not None:
            self._show_logs()
        shutil.rmtree(self.ray, ignore_errors=True)
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_gone(*left)
        assert error is not None or not left, left

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call a method of `_Cluster`; return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *arguments]).encode() + b"\n")
        return self._heard()

    def status(self, fleet: str) -> Status:
        """Return the status of a fleet."""
        return msgspec.convert(self.ask("status", fleet), Status)

    def processes(self) -> dict[int, str]:
        """Return the running processes of the cluster, by their marks."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if f"{MARK}={self._folder}\0".encode() in (entry / "environ").read_bytes() + b"\0":
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        deadline = monotonic() + ANSWER_S
        while True:
            line, newline, rest = self._read.partition(b"\n")
            if not newline:
                ready = select.select([self._process.stdout], [], [], max(0.0, deadline - monotonic()))[0]
                more = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
                assert more, f"no answer within {ANSWER_S} s: {(self._folder / 'ray.log').read_text()[-4000:]}"
                self._read += more
                continue
            self._read = rest
            if line.startswith(b"@"):  # other lines are Ray's
                said = json.loads(line[1:])
                assert "error" not in said, said["error"]
                return said["answer"]

    def _show_logs(self) -> None:
        print((self._folder / "ray.log").read_text()[-4000:])
        for log in sorted(self.ray.glob("session_*/logs/worker-*.err")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")


class _Cluster:
    """The cluster in its process."""

    def __init__(self, temporary: str, *cpus: str) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "temp_dir": temporary}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": SYSTEM})
        self._nodes: list[Any] = []
        for count in cpus:
            self.add_node(int(count))
        from kvforge.fleet.cluster.joining import joined

        self._joined = joined(self._cluster.address)
        self._joined.__enter__()

    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, cpus: int) -> str:
        """Add a node; return its Ray id."""
        self._nodes.append(self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, wait=True))
        return str(self._nodes[-1].node_id)

    def kill_node(self, node: str) -> None:
        """Kill the node's raylet with SIGKILL."""
        victim = next(each for each in self._nodes if each.node_id == node)
        raylet = victim.all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait(END_S)  # reap it, because its workers poll for it and a zombie still exists

    def raylet_of_head(self) -> int:
        """Return the head's raylet, which handles all calls from here."""
        return int(self._cluster.head_node.all_processes["raylet"][0].process.pid)

    def __getattr__(self, name: str) -> Any:
        """Return a call of a fleet's controller, with the fleet's name as the first argument."""
        from kvforge.fleet.cluster.fleet_client import FleetClient

        def call(fleet: str, *arguments: Any) -> Any:
            return getattr(FleetClient(fleet), name)(*arguments)

        return call

    def up(self, path: str) -> None:
        """Without waiting."""
        from kvforge.fleet.cluster.fleet_client import FleetClient
        from kvforge.fleet.settings import load_fleet

        file, text = load_fleet(Path(path))
        FleetClient(file.name).up(file, text)

    def end(self) -> None:
        self._joined.__exit__(None, None, None)
        self._cluster.shutdown()


def main() -> None:
    """Serve until the input ends."""
    cluster = _Cluster(*sys.argv[1:])
    _say({"answer": cluster.address()})
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = getattr(cluster, what)(*arguments)
            _say({"answer": msgspec.to_builtins(answer)})
        except Exception as error:  # noqa: BLE001 - reported to the test
            traceback.print_exc()
            _say({"error": f"{type(error).__name__}: {error}"})
    cluster.end()


def _say(document: dict[str, Any]) -> None:
    print(f"@{json.dumps(document)}", flush=True)


if __name__ == "__main__":
    main()
