"""Leftovers that a finished chaos run must not have: blocks, processes, files, and complaints in logs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from kvforge.protocol.messages import Stats
from tools.cluster.running import processes_of

LEFT_FILES = frozenset({"coordinator.lock"})
COMPLAINTS = ("Traceback", "no handshake")
GONE_S = 10.0  # time for the child of a finished process to end
LOOK_S = 0.05


def not_given_back(stats: Stats) -> Iterator[str]:
    """Yield a problem per leak of requests, sequences or blocks in an idle coordinator."""
    requests = stats.requests
    if (requests.pending, requests.running, stats.sequences) != (0, 0, 0):
        yield f"left: {requests.pending} pending, {requests.running} running, {stats.sequences} sequences"
    for pool in stats.pools:
        if pool.free + pool.cached != pool.blocks or pool.referenced or pool.quarantined:
            yield f"blocks leaked: {pool}"
        if pool.host_free + pool.host_cached != pool.host_blocks:
            yield f"blocks of the host tier leaked: {pool}"
        disk = pool.disk
        if disk is not None and not disk.off and disk.free + disk.cached + disk.quarantined != disk.blocks:
            yield f"blocks of the disk tier leaked: {pool}"


def orphans(folder: Path, wait_s: float = GONE_S) -> Iterator[str]:
    """Yield a problem per process that names the folder or has its files open and does not end; kill it."""
    deadline = time.monotonic() + wait_s
    while (found := {**processes_of(folder), **_holders(folder)}) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    for pid, what in found.items():
        yield f"process {pid} is still running: {what}"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _holders(folder: Path) -> dict[int, str]:
    """Return processes with open files of a folder: a worker of the fork server does not name it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                names = [str(link.readlink()) for link in (entry / "fd").iterdir()]
                if held := [name for name in names if name.startswith(f"{folder}/")]:
                    found[int(entry.name)] = f"has {held[0]} open"
    return found


def files(runtime: Path) -> Iterator[str]:
    """Yield a problem if the runtime folder has files that a clean end removes."""
    if left := {str(path.relative_to(runtime)) for path in runtime.rglob("*")} - LEFT_FILES:
        yield f"leftover files: {sorted(left)}"


def complaints(member: str, log: str) -> Iterator[str]:
    """Yield log lines that no process fault justifies; a traceback with its last lines."""
    lines = log.splitlines()
    for at, line in enumerate(lines):
        if any(words in line for words in COMPLAINTS):
            indented = list(takewhile(lambda one: one.startswith(" "), lines[at + 1 :]))
            last = [*indented[-2:], *lines[at + 1 + len(indented) :][:1]] if "Traceback" in line else []
            yield f"{member} wrote: {' | '.join((line, *map(str.strip, last)))}"
