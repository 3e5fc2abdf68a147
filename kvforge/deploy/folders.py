"""Checks the service's folders: owner, permissions and file system."""

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
# Locks, mapped files or fsync may not work on these as on a disk.
OF_THE_NETWORK = re.compile(r"nfs\d?|cifs|smb\w*|9p|ceph|glusterfs|lustre|beegfs|fuse\..*|afs")
OCTAL = re.compile(r"\\(\d{3})")


def check_folders(places: Places, user: Account | None) -> list[Finding]:
    """Check the folders' owners, and that other users cannot change their content."""
    findings = []
    for path, private in ((places.configuration, True), (places.of(STATE_DIR), True), (places.of(CACHE_DIR), False)):
        findings += _check_folder(path, path != places.configuration, private, user)
    if places.of(RUNTIME_DIR).exists():
        findings += _check_folder(places.of(RUNTIME_DIR), True, True, user)
    return findings


def _check_folder(path: Path, services: bool, private: bool, user: Account | None) -> list[Finding]:
    """Check one folder.

    Args:
        path: The folder.
        services: It belongs to the service's user, not to root.
        private: Others may not read it.
        user: The service's user.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return [wrong(f"{path} is missing", "sudo kvforge deploy install")]
    except PermissionError:
        return [warning(f"{path} cannot be read", "check again as root")]
    if not stat.S_ISDIR(found.st_mode):
        return [wrong(f"{path} is not a folder", "move it away, then sudo kvforge deploy install")]
    mode = f"{found.st_mode & 0o7777:04o}"
    if services and user is not None and found.st_uid != user.uid:
        return [wrong(f"{path} belongs to uid {found.st_uid}", f"sudo chown -R {USER}:{USER} {path}")]
    if not services and found.st_uid != 0:
        return [wrong(f"{path} belongs to uid {found.st_uid}", f"sudo chown root:{USER} {path}")]
    if found.st_mode & (stat.S_IWOTH | (stat.S_IROTH if private else 0)):
        open_to = "write" if found.st_mode & stat.S_IWOTH else "read"
        return [wrong(f"{path} has mode {mode}: everyone can {open_to} it", f"sudo chmod o-rwx {path}")]
    return [good(f"{path}, mode {mode}")]


def check_file_system(name: str, path: Path, bytes_min: int, *, lasting: bool) -> list[Finding]:
    """Check the file system of a folder.

    Args:
        name: The setting that names the folder.
        path: The folder.
        bytes_min: The free space that it needs.
        lasting: Its content must survive a reboot.
    """
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    kind = file_system(folder)
    fact = f"{name} {path} is on {kind}"
    if OF_THE_NETWORK.fullmatch(kind):
        return [wrong(f"{fact}, a network file system", "use a local disk")]
    if lasting and kind in IN_MEMORY:
        return [warning(f"{fact}, which a reboot empties", "use a folder on a disk")]
    free = shutil.disk_usage(folder).free
    if free < bytes_min:
        return [
            wrong(f"{fact} with {free >> 20} MiB free, but {bytes_min >> 20} MiB are needed", "free some space there")
        ]
    return [good(f"{fact}, {free >> 20} MiB free")]


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the kernel's name of the file system that holds a path."""
    real, best, kind = path.resolve(), "", "?"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        point = OCTAL.sub(lambda found: chr(int(found[1], 8)), fields.split()[4])
        if len(point) >= len(best) and real.is_relative_to(os.fspath(point)):
            best, kind = point, rest.split()[0]  # the later of two mounts at one point is on top
    return kind
