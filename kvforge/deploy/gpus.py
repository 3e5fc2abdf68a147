"""Whether the service's user may use the devices that its workers are for."""

from __future__ import annotations

import grp
import stat
from contextlib import suppress
from pathlib import Path

from kvforge.launch.host import DEVICE_FILES

from .accounts import Account
from .findings import Finding, good, wrong
from .places import USER

# What each kind of GPU is used through, beside the files by which it is known to be there.
NEEDED = {"cuda": ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm"), "hip": ("kfd", "dri/renderD*")}


def check_devices(instance: str, kind: str, user: Account | None, devices: Path = Path("/dev")) -> list[Finding]:
    """kind: of the device that the worker opens, as torch said: cpu, cuda or hip."""
    if kind == "cpu":
        if instance == "cpu" or not _gpus(devices):
            return []
        remedy = "is torch in the environment the build for this GPU? If it shall be the CPU, say device = 'cpu'"
        return [wrong(f"worker {instance} computes on the CPU, and this machine shows a GPU", remedy)]
    findings = []
    for pattern in NEEDED[kind]:
        found = sorted(devices.glob(pattern))
        if not found:
            remedy = "load the driver's modules at boot (nvidia-persistenced, modprobe nvidia-uvm; modprobe amdgpu)"
            findings.append(wrong(f"worker {instance} needs {devices / pattern}, which is not there", remedy))
        findings += [_refused(path) for path in found if user is not None and not may_use(path.stat(), user)]
    return findings or [good(f"worker {instance} may use its device")]


def _gpus(devices: Path) -> bool:
    """Whether the machine shows one; a virtual one of Windows counts."""
    return any(any(devices.glob(pattern)) for patterns in DEVICE_FILES.values() for pattern in patterns)


def may_use(found: object, user: Account) -> bool:
    """Whether the user may read and write a file, by its status."""
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
    told = f"{USER} may not use {path} (group {group}, mode {stat.filemode(found.st_mode)})"
    return wrong(told, f"sudo usermod -aG {group} {USER}, and start the workers again")
