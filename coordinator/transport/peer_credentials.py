"""Local users that may connect, verified by the kernel's peer credentials.

The permissions of the folder and the socket usually express the same. They can be changed, and do not apply to root;
peer credentials cannot be forged.
"""

from __future__ import annotations

import os
import socket as sockets
import stat
import struct
from pathlib import Path

UCRED = struct.Struct("iII")  # pid, uid, gid
SO_PEERGROUPS = 59  # of Linux; Python has no name for it
GROUPS_BYTES_MAX = 1024  # Python's limit: 256 groups; for a user with more, only the first group counts
OWNER_ONLY, WITH_GROUP = 0o600, 0o660


class LocalUsers:
    """The users that may connect to one socket: the coordinator's own and root, and possibly a group.

    The group is that of the runtime folder, if the folder is open to it.

    Attributes:
        group: Its gid; None for no group.
    """

    def __init__(self, runtime: Path, with_group: bool) -> None:
        status = runtime.stat()
        open_to_group = with_group and status.st_mode & stat.S_IXGRP
        self.group = status.st_gid if open_to_group else None
        self._own = (os.geteuid(), 0)

    def own_socket(self, path: str) -> None:
        """Set the permissions of a socket file accordingly.

        Raises:
            OSError: They cannot be changed.
        """
        if self.group is None:
            os.chmod(path, OWNER_ONLY)  # noqa: PTH101 - a path is text here
            return
        if os.stat(path).st_gid != self.group:  # noqa: PTH116
            os.chown(path, -1, self.group)
        os.chmod(path, WITH_GROUP)  # noqa: PTH101

    def problem(self, socket: sockets.socket) -> str:
        """Return why the peer's user may not connect; "" if it may.

        Raises:
            OSError: The connection has no credentials.
        """
        _, user, first = credentials(socket)
        if user in self._own or (self.group is not None and self.group in (first, *_groups(socket))):
            return ""
        allowed = f"user {self._own[0]} and root"
        if self.group is not None:
            allowed += f" and members of group {self.group}"
        return f"user {user} is not permitted (permitted: {allowed})"


def credentials(socket: sockets.socket) -> tuple[int, int, int]:
    """Return process, user and first group of a local connection's peer, as they were when it connected.

    The process is 0 if it is not visible from here.

    Raises:
        OSError: The connection has no credentials.
    """
    found = UCRED.unpack(socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, UCRED.size))
    return found[0], found[1], found[2]


def _groups(socket: sockets.socket) -> list[int]:
    """Return the peer's supplementary groups."""
    try:
        data = socket.getsockopt(sockets.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES_MAX)
    except OSError:
        return []
    return list(struct.unpack(f"{len(data) // 4}I", data))
