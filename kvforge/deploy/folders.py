"""The service's folders: whose they are, who may look into them, and what kind of file system they are on."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from .accounts import Account
from .findings import Finding, good, warning, wrong
from .places import CACHE_DIR, RUNTIME_DIR, STATE_DIR, USER, Places

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
# Locks, mapped files or fsync are not what they are on a disk.
OF_THE_NETWORK = re.compile(r"nfs\d?|cifs|smb\w*|9p|ceph|glusterfs|lustre|beegfs|fuse\..*|afs")
OCTAL = re.compile(r"\\(\d{3})")


def check_folders(places: Places, user: Account | None) -> list[Finding]:
    """Whose they are, and that nobody else can change what is in them."""
    findings = []
    for path, private in ((places.configuration, True), (places.of(STATE_DIR), True), (places.of(CACHE_DIR), False)):
        findings += _check_folder(path, path != places.configuration, private, user)
    if places.of(RUNTIME_DIR).exists():
        findings += _check_folder(places.of(RUNTIME_DIR), True, True, user)
    return findings


def _check_folder(path: Path, services: bool, private: bool, user: Account | None) -> list[Finding]:
    """services: it belongs to the service's user, and not to root. private: others may not read it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return [wrong(f"{path} is missing", "sudo kvforge deploy install")]
    except PermissionError:
        return [warning(f"{path} cannot be looked at", "check again as root")]
    if not stat.S_ISDIR(found.st_mode):
        return [wrong(f"{path} is not a folder", "move it away, then sudo kvforge deploy install")]
    mode = f"{found.st_mode & 0o7777:04o}"
    if services and user is not None and found.st_uid != user.uid:
        return [wrong(f"{path} belongs to uid {found.st_uid}", f"sudo chown -R {USER}:{USER} {path}")]
    if not services and found.st_uid != 0:
        return [wrong(f"{path} belongs to uid {found.st_uid}", f"sudo chown root:{USER} {path}")]
    if found.st_mode & (stat.S_IWOTH | (stat.S_IROTH if private else 0)):
        open_to = "written" if found.st_mode & stat.S_IWOTH else "read"
        return [wrong(f"{path} has mode {mode}: it can be {open_to} by everyone", f"sudo chmod o-rwx {path}")]
    return [good(f"{path}, mode {mode}")]


def check_file_system(name: str, path: Path, bytes_min: int, *, lasting: bool) -> list[Finding]:
    """What the setting `name` points at. lasting: it has to be there after the machine's next start."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    kind = file_system(folder)
    told = f"{name} {path} is on {kind}"
    if OF_THE_NETWORK.fullmatch(kind):
        return [wrong(f"{told}, a file system of the network", "use a disk of this machine")]
    if lasting and kind in IN_MEMORY:
        return [warning(f"{told}, which is gone with the machine's next start", "use a folder on a disk")]
    free = shutil.disk_usage(folder).free
    if free < bytes_min:
        return [wrong(f"{told} with {free >> 20} MiB free, and {bytes_min >> 20} MiB are needed", "make room there")]
    return [good(f"{told}, {free >> 20} MiB free")]


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """What the kernel calls the kind of file system that a path is on."""
    real, best, kind = path.resolve(), "", "?"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        point = OCTAL.sub(lambda found: chr(int(found[1], 8)), fields.split()[4])
        if len(point) >= len(best) and real.is_relative_to(os.fspath(point)):
            best, kind = point, rest.split()[0]  # of two at one place the later one is on top
    return kind
