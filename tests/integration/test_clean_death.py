"""A killed process leaves no other process behind, and no files that the next start does not remove."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from kvforge.protocol.token import TOKEN_FILE
from kvforge.protocol.transport import CLIENT_SOCKET, TABLES_FILE, WORKER_SOCKET
from tools.cluster.cluster import Cluster
from tools.cluster.running import wait_gone

from .test_cluster import GREEDY

SERVING = {CLIENT_SOCKET, WORKER_SOCKET, TABLES_FILE, TOKEN_FILE, "coordinator.lock", "state"}
# Each start first creates these under another name, and may be killed right then.
HALF_MADE = (f"{TABLES_FILE}.half", f"{TOKEN_FILE}.half", "state/state-0000000000000007.part")
# A coordinator's snapshot, written by a child that never ends: it prints its process id and waits.
SNAPSHOT = """
import os, signal, sys
from pathlib import Path
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.state_folder import StateFolder
def write(*_):
    print(os.getpid(), flush=True)
    signal.pause()
snapshot.write = write
state_folder = StateFolder(Path(sys.argv[1]), "process", 1 << 30, 1)
state_folder.begin(None, lambda: False)
state_folder.turned(None, 1_000_000, 1_000_000_000, 1)
signal.pause()
"""


def in_shared_memory(pid: int) -> list[str]:
    """Return the files in /dev/shm that a process has mapped or open."""
    opened = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    mapped = Path(f"/proc/{pid}/maps").read_text(errors="replace").split()
    return [name for name in (*opened, *mapped) if name.startswith("/dev/shm")]


def test_what_the_killed_leave_is_removed_by_the_next_start_and_a_stop_leaves_nothing() -> None:
    with Cluster() as cluster:
        kv = cluster.start("w0")
        running = kv.submit([1, 2, 3], max_tokens=1500, sampling=GREEDY)
        next(iter(running))
        assert {path.name for path in cluster.runtime.iterdir()} == SERVING
        assert [in_shared_memory(cluster.pid(name)) for name in ("coordinator", "w0")] == [[], []]
        for name in ("coordinator", "w0"):
            cluster.kill(name)
        for name in HALF_MADE:
            (cluster.runtime / name).write_text("half")
        assert stat.S_ISSOCK((cluster.runtime / CLIENT_SOCKET).stat().st_mode), "a killed one leaves its sockets"
        cluster.start_coordinator()
        cluster.start_worker("w0")
        assert len(running.result(120).tokens) == 1500
        assert {path.name for path in cluster.runtime.iterdir()} == SERVING
        left = [name for name in HALF_MADE if (cluster.runtime / name).exists()]  # another snapshot may be running
        assert not left
        cluster.signal("coordinator", signal.SIGTERM)
        assert (cluster.end("coordinator"), cluster.end("w0")) == (0, 0)
        assert list(cluster.runtime.iterdir()) == []


def test_a_snapshot_dies_with_the_coordinator_that_made_it() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder,
        subprocess.Popen([sys.executable, "-c", SNAPSHOT, folder], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        process.kill()
        wait_gone(child)
