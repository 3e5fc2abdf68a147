"""Which users of this machine may connect: asked of the system, which knows who is at the other end of a local socket.

The permissions of folder and socket say the same to begin with. They can be changed by hand, and are not looked at by
root's programs; what the system says of a connection cannot be made up.
"""

from __future__ import annotations

import os
import socket as sockets
import stat
import struct
from pathlib import Path

UCRED = struct.Struct("iII")  # pid, uid, gid
SO_PEERGROUPS = 59  # of Linux; Python has no name for it
GROUPS_BYTES_MAX = 1024  # what Python asks for at most: 256 groups. Of who has more only the first counts.
OWNER_ONLY, WITH_GROUP = 0o600, 0o660


class LocalUsers:
    """Those of one socket: the coordinator's own user and root; and, where the runtime folder is open to its group,
    the members of that.

    group: None for none.
    """

    def __init__(self, runtime: Path, with_group: bool) -> None:
        status = runtime.stat()
        open_to_group = with_group and status.st_mode & stat.S_IXGRP
        self.group = status.st_gid if open_to_group else None
        self._own = (os.geteuid(), 0)

    def own_socket(self, path: str) -> None:
        """Gives a socket's file the permissions that fit. Raises OSError."""
        if self.group is None:
            os.chmod(path, OWNER_ONLY)  # noqa: PTH101 - a path is text here
            return
        if os.stat(path).st_gid != self.group:  # noqa: PTH116
            os.chown(path, -1, self.group)
        os.chmod(path, WITH_GROUP)  # noqa: PTH101

    def problem(self, socket: sockets.socket) -> str:
        """Why the user at the other end may not connect; "" where it may. Raises OSError."""
        _, user, first = credentials(socket)
        if user in self._own or (self.group is not None and self.group in (first, *_groups(socket))):
            return ""
        allowed = f"user {self._own[0]} and root"
        if self.group is not None:
            allowed += f" and members of group {self.group}"
        return f"it is of user {user}; {allowed} may connect"


def credentials(socket: sockets.socket) -> tuple[int, int, int]:
    """Process, user and first group at the other end of a local connection, as they were when it connected.

    The process is 0 where it cannot be seen from here. Raises OSError.
    """
    found = UCRED.unpack(socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, UCRED.size))
    return found[0], found[1], found[2]


def _groups(socket: sockets.socket) -> list[int]:
    """Its other groups."""
    try:
        data = socket.getsockopt(sockets.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES_MAX)
    except OSError:
        return []
    return list(struct.unpack(f"{len(data) // 4}I", data))
