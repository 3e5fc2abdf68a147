"""The cores that a worker computes on: how many are its share, and how its threads wait for each other.

Threads that look for work without sleeping make a decode step up to 1.7 times as fast where the cores are theirs alone,
and 4 times as slow where one other process wants a core all the time. So it is measured which it is: once, before torch
is loaded, because its OpenMP reads its environment then and never again. They look for a moment after each of the many
parts of a step, which is longer than what lies between two of them; the threads of an idle worker sleep.

Workers of one runtime folder share the cores: each has a name that all see while it runs, and counts the others.
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
SPINS = 10_000  # looks of libgomp before it sleeps: 1000 are too few for what lies between two parts of a step
WINDOW_S = 0.1
BUSY_MAX = 0.4  # cores: what others may use of those that are to be ours alone
SAID = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cores:
    """count: those that this process may use. others: more workers of the same folder. waiting: how threads wait for
    each other, for people. wanted: threads that the configuration asks for, 0: none said."""

    count: int
    others: int = 0
    waiting: str = ""
    wanted: int = 0

    @property
    def threads(self) -> int:
        """How many to compute with."""
        return self.wanted or max(1, self.count // (1 + self.others))

    def describe(self) -> str:
        """For the log and for `kvforge health`."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads, {self.waiting}"
        shared = f", shared with {self.others} more workers" if self.others else ""
        return f"{threads}; {self.count} cores{shared}"


def usable(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may keep busy: those it may run on, or fewer where its control group has a quota."""
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


class Place:
    """This worker among those of its runtime folder: a socket with a name and without a file, which ends with it."""

    def __init__(self, runtime: Path, name: str) -> None:
        folder = hashlib.blake2b(bytes(runtime.absolute()), digest_size=16).hexdigest()
        self._folder = f"kvforge-cores-{folder}-"
        self._name = self._folder + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self._socket = socket.socket(socket.AF_UNIX)
        with suppress(OSError):  # another of this name, which the coordinator will refuse
            self._socket.bind("\0" + self._name)

    def others(self) -> int:
        """How many more workers of the folder there are."""
        with suppress(OSError):
            names = [line.rpartition(" @")[2] for line in SOCKETS.read_text(errors="replace").splitlines()]
            return len({name for name in names if name.startswith(self._folder)} - {self._name})
        return 0

    def close(self) -> None:
        """It computes elsewhere, or ends."""
        self._socket.close()


def _busy_ticks(cores: set[int]) -> int:
    """Of these cores since the machine started, in clock ticks; what a hypervisor took counts.

    Errors: OSError, ValueError, where it does not say.
    """
    found = []
    for line in (PROCESSES / "stat").read_text(encoding="ascii").splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, *rest = map(int, ticks)
            found.append(user + nice + system + sum(rest[:3]))
    if len(found) < len(cores):
        raise ValueError("not all of these cores are told of")
    return sum(found)


def _family_ticks() -> int:
    """What this process and those that were started with it have used: a coordinator that starts, other workers.

    Errors: OSError.
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
    """How many of our cores others keep busy, measured now for so long; None where a sandbox does not show it."""
    cores = os.sched_getaffinity(0)
    try:
        family, busy, started = _family_ticks(), _busy_ticks(cores), time.monotonic()
        time.sleep(window_s)
        busy, family = _busy_ticks(cores) - busy, _family_ticks() - family
    except (OSError, ValueError):
        return None
    return max(0.0, (busy - family) / TICKS_PER_S / (time.monotonic() - started))


def choose(place: Place, wanted: int, environment: MutableMapping[str, str]) -> Cores:
    """Chooses how threads wait, and says so in the environment that OpenMP will read, unless it says so already."""
    count, others = usable(), place.others()
    cores = Cores(count, others, wanted=wanted)
    said = [f"{name}={environment[name]}" for name in SAID if name in environment]
    if said or "torch" in sys.modules:
        return Cores(count, others, f"waiting as {' '.join(said)} says" if said else "waiting as OpenMP does", wanted)
    if cores.threads == 1:
        return cores
    used = used_by_others()
    if used is None:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        waiting = "which sleep while they wait: what others use of the cores cannot be told here"
    elif cores.threads + used > count + BUSY_MAX:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        waiting = f"which sleep while they wait: others use {used:.1f} of the cores"
    else:
        environment["GOMP_SPINCOUNT"] = str(SPINS)
        waiting = "which spin while a step is under way: the cores are their own"
    return Cores(count, others, waiting, wanted)
