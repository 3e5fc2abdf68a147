"""Decides whether a path or a local peer belongs to a user who may see prompts and answers.

Anyone can create `/tmp/kvforge-UID` before its user does. A client that connects to any socket there gives its prompts
away. Before a socket or a table file is used, each component of its path is checked:

- Trusted users are root, the user of this process, the service's account `kvforge` (`kvforge deploy install` creates
  it), and those that `KVFORGE_TRUSTED_USERS` names.
- A directory that others can write to vouches for nothing: its entries must belong to trusted users, and it must
  be sticky (as /tmp is), or others could replace what lies there.
- A directory that only trusted users can write to vouches for what it contains: a trusted user created it there. The
owner of `/run/kvforge`, which systemd created for the service's user, is therefore trusted below that folder.

After a local connection is made, the kernel names the user at its other end (SO_PEERCRED; on macOS LOCAL_PEERCRED). It
must be one of the same.

Windows has no user ids. `platforms` refuses `ipc://` and shared tables there, so that no path is checked.
"""

from __future__ import annotations

import os
import socket as sockets
import stat
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from .errors import InvalidConfiguration
from .platforms import IPC

if sys.platform != "win32":
    import grp
    import pwd

TRUSTED_USERS = "KVFORGE_TRUSTED_USERS"
SERVICE_USER = "kvforge"
LINKS_MAX = 40  # as the kernel's own limit
UCRED = struct.Struct("iII")  # pid, uid, gid
# macOS: struct xucred of sys/ucred.h (version, uid, number of groups, groups), for which Python has no names.
SOL_LOCAL, LOCAL_PEERCRED, XUCRED = 0, 1, struct.Struct("IIh16I")
WHOLE_NAMESPACE = ["0", "0", str((1 << 32) - 1)]


def trusted_users() -> frozenset[int]:
    """Return the user ids that are trusted everywhere.

    Raises:
        InvalidConfiguration: `KVFORGE_TRUSTED_USERS` names a user that does not exist.
    """
    return frozenset((0, os.geteuid(), *_service(), *_named(os.environ.get(TRUSTED_USERS, ""))))


def _service() -> tuple[int, ...]:
    """Return the account that services run as, if an administrator has created it."""
    try:
        return (pwd.getpwnam(SERVICE_USER).pw_uid,)
    except KeyError:
        return ()


@lru_cache(maxsize=8)
def _named(names: str) -> frozenset[int]:
    users = set()
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            users.add(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            problem = f"no user {name!r} on this machine (expected names or numbers, separated by commas)"
            raise InvalidConfiguration(TRUSTED_USERS, problem) from None
    return frozenset(users)


def check_path(path: Path, field: str) -> frozenset[int]:
    """Check each component of a path that exists; missing components are not checked.

    Args:
        path: A folder, socket or file; relative paths start at the working folder.
        field: The setting or argument that names it.

    Returns:
        The user ids that may be at the other end of a socket of this path.

    Raises:
        InvalidConfiguration: A component belongs to a user who is not trusted, or such a user could replace it.
    """
    users = trusted_users()
    names = [*reversed(path.absolute().parts[1:])]
    at, parent, links = "/", _stat("/", path, field), 0
    while names:
        if (name := names.pop()) == "..":
            at = os.path.dirname(at)  # noqa: PTH120 - a resolved path: the parent in the file system
            parent = _stat(at, path, field)
            continue
        here = os.path.join(at, name)  # noqa: PTH118
        try:
            status = os.lstat(here)
        except (FileNotFoundError, NotADirectoryError):
            return users
        except PermissionError:
            return users  # nothing below can be reached: to connect or to open fails with the reason
        users = _check_entry(here, status, parent, users, field)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > LINKS_MAX:
                raise InvalidConfiguration(field, f"{path} has more than {LINKS_MAX} symbolic links")
            target = os.readlink(here)  # noqa: PTH115
            if target.startswith("/"):
                at, parent = "/", _stat("/", path, field)
            names += [part for part in reversed(target.split("/")) if part not in ("", ".")]
            continue
        at, parent = here, status
    return users


def check_endpoint(endpoint: str, field: str = "endpoint") -> frozenset[int] | None:
    """Check the path of an `ipc://` endpoint as `check_path` does.

    Returns:
        The user ids that may be at the other end, or None for other endpoints.
    """
    if not endpoint.startswith(IPC):
        return None
    return check_path(Path(endpoint.removeprefix(IPC)), field)


def check_peer(descriptor: int, users: Iterable[int], endpoint: str, field: str = "endpoint") -> None:
    """Check who is at the other end of a local connection.

    Args:
        descriptor: The descriptor of the connection. A connection that has ended, or is not local, is not checked.
        users: The users that may be there, as `check_endpoint` returned.
        endpoint: The address of the connection.
        field: The setting or argument that names it.

    Raises:
        InvalidConfiguration: The socket belongs to a process of another user.
    """
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family != sockets.AF_UNIX:
                return
            user = _peer_user(connection)
    except OSError:
        return
    if user not in users:
        problem = (
            f"the process that listens at {endpoint} is of user {_name(user)}, who is not trusted: {_remedy(user)}"
        )
        raise InvalidConfiguration(field, problem)


def _peer_user(connection: sockets.socket) -> int:
    """Return the user id at the other end of a local connection. Raises OSError if the connection has ended."""
    if sys.platform == "darwin":
        found = connection.getsockopt(SOL_LOCAL, LOCAL_PEERCRED, XUCRED.size)
        return int(XUCRED.unpack(found)[1])
    found = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, UCRED.size)
    return int(UCRED.unpack(found)[1])


def check_private(folder: Path, field: str, below: Path) -> Path:
    """Check a folder with files that are run as code: only this user and root may have put them there.

    Args:
        folder: A folder that exists.
        field: The setting that names it.
        below: A parent of the folder. No component behind it may be a symbolic link, nor anything within the folder.

    Returns:
        The folder's path without symbolic links.

    Raises:
        InvalidConfiguration: Another user owns a part of the path or a file within, or can write there.
        OSError: A part cannot be looked at.
    """
    users = frozenset((0, os.geteuid()))
    for part in (folder, *folder.parents):
        if part == below:
            break
        _check_private_entry(part, part.lstat(), users, field)
    real = folder.resolve(strict=True)
    child = real.lstat()
    if _is_shared(child, users):
        raise InvalidConfiguration(field, f"{real} is writable by others: chmod go-w it")
    for parent in real.parents:
        status = parent.lstat()
        if status.st_uid not in users and not _stands_for_many(status.st_uid):
            raise _wrong_owner(parent, status, field)
        sticky = status.st_mode & stat.S_ISVTX and child.st_uid in users
        if not sticky and _is_shared(status, users):
            problem = f"{parent} is writable by others, who could replace what it contains: chmod go-w it"
            raise InvalidConfiguration(field, problem)
        child = status
    for at, folders, files in os.walk(real):
        for name in (*folders, *files):
            entry = Path(at, name)
            with suppress(FileNotFoundError):  # another process of this user renamed it
                _check_private_entry(entry, entry.lstat(), users, field)
    return real


def _check_private_entry(path: Path, status: os.stat_result, users: frozenset[int], field: str) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise InvalidConfiguration(field, f"{path} is a symbolic link: remove it")
    if status.st_uid not in users:
        raise _wrong_owner(path, status, field)


def _wrong_owner(path: Path, status: os.stat_result, field: str) -> InvalidConfiguration:
    owner = status.st_uid
    problem = f"{path} belongs to another user (uid {owner}, {_name(owner)}); files of other users are not run as code"
    return InvalidConfiguration(field, f"{problem}: remove it, or choose another folder")


def _check_entry(
    path: str, status: os.stat_result, parent: os.stat_result, users: frozenset[int], field: str
) -> frozenset[int]:
    """Check one component in its folder; return the users who are trusted below it."""
    owner, mode = status.st_uid, status.st_mode
    vouched = not _is_shared(parent, users)
    if vouched and not _stands_for_many(owner):
        users |= {owner}  # a trusted user put it there
    elif not vouched and not parent.st_mode & stat.S_ISVTX:
        folder = os.path.dirname(path)  # noqa: PTH120
        writers = "everyone" if parent.st_mode & stat.S_IWOTH else f"group {_group(parent.st_gid)}"
        problem = f"{folder} is writable by {writers}, who could replace {path}: chmod go-w it, or use another folder"
        raise InvalidConfiguration(field, problem)
    if owner not in users and not vouched:
        kind = "symbolic link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "file"
        what = f"{path} belongs to another user (uid {owner}, {_name(owner)}), who is not trusted"
        raise InvalidConfiguration(field, f"{what}: {_remedy(owner)}, or use another {kind}")
    if not stat.S_ISLNK(mode) and not stat.S_ISDIR(mode) and not stat.S_ISSOCK(mode) and _is_shared(status, users):
        raise InvalidConfiguration(field, f"{path} is writable by others: chmod go-w it")
    return users


def _is_shared(status: os.stat_result, users: frozenset[int]) -> bool:
    """Return whether users who are not trusted can write there."""
    if status.st_uid not in users and not _stands_for_many(status.st_uid):
        return True
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _private_group(status.st_gid, users)


def _private_group(group: int, users: frozenset[int]) -> bool:
    """Return whether all members of a group are trusted, as with the group that many systems create for each user."""
    if group == 0:
        return True
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:
        return False
    return members | {entry.pw_uid for entry in pwd.getpwall() if entry.pw_gid == group} <= users


def _stands_for_many(user: int) -> bool:
    """Return whether an id stands for all users that this user namespace does not map, root of the host among them."""
    return user == _overflow_user() and not _sees_all_users()


@lru_cache(maxsize=1)
def _overflow_user() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65_534


@lru_cache(maxsize=1)
def _sees_all_users() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text().split() == WHOLE_NAMESPACE
    except OSError:
        return True


def _stat(folder: str, path: Path, field: str) -> os.stat_result:
    try:
        return os.stat(folder)  # noqa: PTH116
    except OSError as error:
        raise InvalidConfiguration(field, f"{path} cannot be used: {folder}: {error.strerror}") from None


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _group(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def _remedy(user: int) -> str:
    return f"if you trust this user, set {TRUSTED_USERS}={_name(user)}"
