"""CPU cores of a worker: how many are its share, and how its threads wait for each other.

Spinning threads make a decode step up to 1.7 times as fast when the cores are the worker's alone, and 4 times as slow
when another process keeps one core busy. The worker measures this once, before it loads torch, because OpenMP reads its
environment only then. Threads spin briefly after each of the many parallel sections of a step, longer than the gap
between two sections; the threads of an idle worker sleep.

Workers of one runtime folder share the cores: each binds a socket name that all can see, and counts the other names.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import sys
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SOCKETS = Path("/proc/net/unix")
PROCESSES = Path("/proc")
SPINS = 10_000  # iterations of libgomp before it sleeps: 1000 are too few for the gap between two sections
WINDOW_S = 0.1
BUSY_MAX = 0.4  # cores that other processes may use while ours still count as exclusive
OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cores:
    """The cores and threads of this worker.

    Attributes:
        count: Cores that this process may use.
        others: Other workers of the same runtime folder.
        waiting: How threads wait for each other, in words.
        wanted: Threads that the configuration sets; 0: not set.
    """

    count: int
    others: int = 0
    waiting: str = ""
    wanted: int = 0

    @property
    def threads(self) -> int:
        """Threads to compute with."""
        return self.wanted or max(1, self.count // (1 + self.others))

    def describe(self) -> str:
        """Return a description for the log and for `kvforge health`."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads, {self.waiting}"
        shared = f", shared with {self.others} more workers" if self.others else ""
        return f"{threads}; {self.count} cores{shared}"


def usable_cores(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may keep busy: its CPU affinity, or less if its cgroup has a quota."""
    count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        path = groups.read_text(encoding="ascii").strip().rpartition("::")[2].strip("/")
        for folder in (root / path, *(root / path).parents):
            with suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
                count = min(count, max(1, math.ceil(int(quota) / int(period))))
            if folder == root:
                break
    return count


class CoreShare:
    """A worker's registration in its runtime folder: an abstract socket, released when the worker exits."""

    def __init__(self, runtime: Path, name: str) -> None:
        folder = hashlib.blake2b(bytes(runtime.absolute()), digest_size=16).hexdigest()
        self._folder = f"kvforge-cores-{folder}-"
        self._name = self._folder + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self._socket = socket.socket(socket.AF_UNIX)
        with suppress(OSError):  # the name is taken: the coordinator will reject this worker
            self._socket.bind("\0" + self._name)

    def others(self) -> int:
        """Return the number of other workers in the folder."""
        with suppress(OSError):
            names = [line.rpartition(" @")[2] for line in SOCKETS.read_text(errors="replace").splitlines()]
            return len({name for name in names if name.startswith(self._folder)} - {self._name})
        return 0

    def close(self) -> None:
        """Withdraw the registration: the worker computes on a GPU, or exits."""
        self._socket.close()


def _busy_ticks(cores: set[int]) -> int:
    """Return the busy time of these cores since boot, in clock ticks, including time stolen by a hypervisor.

    Raises:
        OSError: The statistics cannot be read.
        ValueError: A core is missing from the statistics.
    """
    found = []
    for line in (PROCESSES / "stat").read_text(encoding="ascii").splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, *rest = map(int, ticks)
            found.append(user + nice + system + sum(rest[:3]))
    if len(found) < len(cores):
        raise ValueError("/proc/stat does not list all of this process's cores")
    return sum(found)


def _family_ticks() -> int:
    """Return the clock ticks used by this process and its siblings: a starting coordinator, other workers.

    Raises:
        OSError: The process list cannot be read.
    """
    parent, total = os.getppid(), 0
    for entry in PROCESSES.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ours = entry.name == str(os.getpid()) or (parent > 1 and str(parent) in (entry.name, fields[1]))
            total += int(fields[11]) + int(fields[12]) if ours else 0
    return total


def used_by_others(window_s: float = WINDOW_S) -> float | None:
    """Measure how many of our cores other processes keep busy.

    Args:
        window_s: Length of the measurement in seconds.

    Returns:
        Busy cores, or None where a sandbox hides the statistics.
    """
    cores = os.sched_getaffinity(0)
    try:
        family, busy, started = _family_ticks(), _busy_ticks(cores), time.monotonic()
        time.sleep(window_s)
        busy, family = _busy_ticks(cores) - busy, _family_ticks() - family
    except (OSError, ValueError):
        return None
    return max(0.0, (busy - family) / TICKS_PER_S / (time.monotonic() - started))


def choose(place: CoreShare, wanted: int, environment: MutableMapping[str, str]) -> Cores:
    """Choose how threads wait, and set it in OpenMP's environment variables unless the user has set them.

    Args:
        place: This worker's registration, which counts the other workers.
        wanted: Threads that the configuration sets; 0: not set.
        environment: The variables that OpenMP reads when torch is imported.

    Returns:
        The worker's cores and threads.
    """
    count, others = usable_cores(), place.others()
    cores = Cores(count, others, wanted=wanted)
    env = [f"{name}={environment[name]}" for name in OPENMP_VARIABLES if name in environment]
    if env or "torch" in sys.modules:
        return Cores(count, others, f"waiting as set by {' '.join(env)}" if env else "waiting as OpenMP does", wanted)
    if cores.threads == 1:
        return cores
    used = used_by_others()
    if used is None:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        waiting = "which sleep while they wait: the load of other processes is unknown"
    elif cores.threads + used > count + BUSY_MAX:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        waiting = f"which sleep while they wait: others use {used:.1f} of the cores"
    else:
        environment["GOMP_SPINCOUNT"] = str(SPINS)
        waiting = "which spin while a step is under way: the cores are their own"
    return Cores(count, others, waiting, wanted)
