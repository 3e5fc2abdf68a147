"""Checks that the service's user may use its workers' devices."""

from __future__ import annotations

import stat
import sys
from contextlib import suppress
from pathlib import Path

from kvforge.launch.host import shows_gpu

from .accounts import Account
from .findings import Finding, good, wrong
from .places import USER

if sys.platform != "win32":
    import grp

# Device files that each kind of GPU needs, in addition to those that show its presence.
NEEDED = {"cuda": ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm"), "hip": ("kfd", "dri/renderD*")}


def check_devices(instance: str, kind: str, user: Account | None, devices: Path = Path("/dev")) -> list[Finding]:
    """Check the device of one worker.

    Args:
        instance: The worker's instance.
        kind: The device that it opens, by torch's name: cpu, cuda or hip.
        user: The service's user.
        devices: The folder of the device files.
    """
    if kind == "cpu":
        if instance == "cpu" or not shows_gpu(devices):
            return []
        remedy = "install the build of torch for this GPU, or set device = 'cpu' to use the CPU"
        return [wrong(f"worker {instance} computes on the CPU, but this machine has a GPU", remedy)]
    findings = []
    for pattern in NEEDED[kind]:
        found = sorted(devices.glob(pattern))
        if not found:
            remedy = "load the driver's modules at boot (nvidia-persistenced, modprobe nvidia-uvm; modprobe amdgpu)"
            findings.append(wrong(f"worker {instance} needs {devices / pattern}, which is missing", remedy))
        findings += [_refused(path) for path in found if user is not None and not may_use(path.stat(), user)]
    return findings or [good(f"worker {instance} may use its device")]


def may_use(found: object, user: Account) -> bool:
    """Return whether the user may read and write a file with this status."""
    mode: int = found.st_mode  # type: ignore[attr-defined]
    if user.uid in (0, found.st_uid):  # type: ignore[attr-defined]
        return user.uid == 0 or mode & 0o600 == 0o600
    if found.st_gid in (user.gid, *user.groups.values()):  # type: ignore[attr-defined]
        return mode & 0o060 == 0o060
    return mode & 0o006 == 0o006


def _refused(path: Path) -> Finding:
    found = path.stat()
    group = str(found.st_gid)
    with suppress(KeyError):
        group = grp.getgrgid(found.st_gid).gr_name
    fact = f"{USER} may not use {path} (group {group}, mode {stat.filemode(found.st_mode)})"
    return wrong(fact, f"sudo usermod -aG {group} {USER}, and start the workers again")
